"""Seconds to simulate a schedule, and what comes out: python -m benchmarks.simulate [SCHEDULE P M [COMM]]."""

from __future__ import annotations

import sys
import time

from heptad.axes.pipeline.generate import generate
from heptad.simulate.pipeline import simulate
from heptad.simulate.times import Links, Times


def main(name: str = "1f1b", num_ranks: str = "512", num_microbatches: str = "2048", comm: str = "0") -> None:
    begun = time.process_time()
    schedule = generate(name, int(num_ranks), None, int(num_microbatches))
    generated = time.process_time()
    links = Links.uniform(schedule.num_stages, float(comm))
    run = simulate(schedule, Times.uniform(schedule.num_stages), links)
    idle = run.idle_fraction
    done = time.process_time()
    steps = sum(len(codes) for codes in run.lines.codes)
    print(f"{name} P {num_ranks} M {num_microbatches} comm {comm}: {steps:,} actions")
    print(f"generated in {generated - begun:.1f} s CPU, simulated in {done - generated:.1f} s CPU")
    print(f"makespan {run.makespan:g}, idle {idle:.4%}, live at most {max(run.peak_live)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
