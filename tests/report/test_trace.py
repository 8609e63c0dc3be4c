"""A measured step of a pipeline as panels: stage actions from unit actions, means, messages, one picture."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heptad.axes.pipeline.generate import GENERATORS, generate
from heptad.report.measured import measured_and_simulated
from heptad.schedule.action import COMPUTE, Action, Kind, UnitUse
from heptad.schedule.expand import Stages, expand
from heptad.simulate.pipeline import PairMode, simulate
from heptad.simulate.times import Times
from heptad.trace import Event

MS = 1e-3
SECONDS = {"F": 2 * MS, "B": 5 * MS, "I": 3 * MS, "W": 2 * MS}
IDLE = re.compile(r"idle ([0-9.]+)% of ([0-9.,]+) ms")


def stages_of(name: str, ranks: int, microbatches: int) -> Stages:
    """Two units a stage."""
    schedule = generate(name, ranks, None, microbatches)
    return Stages.of(schedule, tuple(range(2 * at, 2 * at + 2) for at in range(schedule.num_stages)))


def as_simulated(stages: Stages, ranks: tuple[int, ...], late_s: float = 0.0) -> list[Event]:
    """Unit events of a run that takes exactly the simulator's time: each stage action's units share it evenly."""
    count = len(stages.units)
    f, i, w, b = (SECONDS[letter] for letter in "FIWB")
    run = simulate(stages.schedule, Times.uniform(count, f, i, w, b))
    events = []
    for place, codes in enumerate(run.lines.codes):
        for at, code in enumerate(codes):
            action = Action.parse(run.lines.name(code))
            units = list(stages.units[action.index])
            units = units if action.kind is Kind.FORWARD else units[::-1]
            start, end = run.starts[place][at] + late_s, run.ends[place][at] + late_s
            step = (end - start) / len(units)
            for number, unit in enumerate(units):
                name = str(Action(action.kind, unit, action.microbatch))
                begin = start + number * step
                events.append(Event(ranks[place], "compute", name, begin, begin + step))
        events.append(Event(ranks[place], "compute", "U", 1.0, 2.0))
    return events


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "pipedream"])
def test_a_run_that_takes_the_simulators_time_is_drawn_as_simulated(name: str) -> None:
    stages, ranks = stages_of(name, 4, 8), (0, 2, 4, 6)
    events = [*as_simulated(stages, ranks, late_s=7.0), Event(1, "compute", "0F0", 0.0, 9.0)]
    drawn = measured_and_simulated(events, stages, ranks, "Step 10")
    above, below = IDLE.findall(drawn)
    assert above == below
    assert "Measured" in drawn and "Simulated" in drawn and "messages of 0 ms" in drawn
    expected = simulate(stages.schedule, Times.uniform(len(stages.units), *(SECONDS[letter] for letter in "FIWB")))
    assert float(above[1].replace(",", "")) == pytest.approx(1e3 * expected.makespan, rel=5e-3)
    assert float(above[0]) == pytest.approx(100 * expected.idle_fraction, abs=0.051)


def in_turns(stages: Stages) -> list[Event]:
    """A run in the simulator's time with pairs as blocks, whose units alternate in halves."""
    count = len(stages.units)
    run = simulate(stages.schedule, Times.uniform(count, *(SECONDS[letter] for letter in "FIWB")), pairs=PairMode.BLOCK)
    events = []
    for rank, codes in enumerate(run.lines.codes):
        actions = [Action.parse(run.lines.name(code)) for code in codes]
        starts, ends = run.starts[rank], run.ends[rank]
        for at in range(len(codes)):
            pair = at + 1 < len(codes) and starts[at + 1] < ends[at]
            if at and starts[at] < ends[at - 1]:
                continue  # the second of a pair
            sides = actions[at : at + 1 + pair]
            order = [
                (side.kind, unit, side.microbatch)
                for number in range(2)
                for half in range(2 if pair else 1)
                for side in sides
                for unit in stages.units[side.index][:: 1 if side.kind is Kind.FORWARD else -1][number : number + 1]
            ]
            now = starts[at]
            for kind, unit, microbatch in order:
                end = now + SECONDS[kind.value] / (4 if pair else 2)
                events.append(Event(rank, "compute", str(Action(kind, unit, microbatch)), now, end))
                now = end
    return events


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
def test_pairs_in_turns_are_boxes_of_their_stretches_and_simulated_as_blocks(name: str) -> None:
    stages = stages_of(name, 4, 8)
    stages = replace(stages, giving=frozenset(range(2 * len(stages.units))))
    drawn = measured_and_simulated(in_turns(stages), stages, (0, 1, 2, 3), "Step 10")
    above, below = IDLE.findall(drawn)
    assert above == below


def test_messages_are_timed_where_the_receiver_waited() -> None:
    stages = stages_of("1f1b", 2, 2)
    events = as_simulated(stages, (0, 1))
    uses = [UnitUse(str(unit), (), (), ()) for unit in range(4)]
    assert any(action.kind not in COMPUTE for slots in expand(stages, 0, uses).after.values() for action in slots)
    events += [Event(0, "comm", "1S0", 4 * MS, 5 * MS), Event(1, "comm", "2e0", 0.0, 5.5 * MS)]
    events += [Event(0, "comm", "1S1", 8 * MS, 9 * MS), Event(1, "comm", "2e1", 9.5 * MS, 9.6 * MS)]  # it was there
    assert "messages of 0.5 ms" in measured_and_simulated(events, stages, (0, 1), "Step 10")


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.integers(0, 4))
def test_recomputed_units_belong_to_the_backward(ranks: int, more: int) -> None:
    stages = stages_of("1f1b", ranks, ranks + more)
    plain = as_simulated(stages, tuple(range(ranks)))
    halved = []
    for event in plain:
        found = re.fullmatch(r"(\d+)B(\d+)", event.name)
        middle = (event.start_s + event.end_s) / 2
        if found:
            halved += [Event(event.rank, "compute", f"{found[1]}C{found[2]}", event.start_s, middle)]
            halved += [Event(event.rank, "compute", event.name, middle, event.end_s)]
        else:
            halved.append(event)
    places = tuple(range(ranks))
    assert IDLE.findall(measured_and_simulated(halved, stages, places, "")) == IDLE.findall(
        measured_and_simulated(plain, stages, places, "")
    )
