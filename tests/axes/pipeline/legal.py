"""Which (schedule, P, V, M) the tests draw: everything that `generate` takes, up to a size."""

from __future__ import annotations

from hypothesis import strategies as st

from heptad.axes.pipeline.generate import GENERATORS

Case = tuple[str, int, int, int]


@st.composite
def cases(draw: st.DrawFn, name: str, ranks: int = 32, microbatches: int = 128, actions: int = 9000) -> Case:
    """(P, V, M) that the schedule `name` can do, with at most about `actions` stages × micro-batches."""
    generator = GENERATORS[name]
    most = min(ranks, microbatches // max(1, generator.least))
    num_ranks = draw(st.integers(1, most // 2)) * 2 if generator.even else draw(st.integers(1, most))
    chunks = draw(st.integers(1, 4)) if generator.any_chunks else generator.chunks
    least = max(1, generator.least * num_ranks)
    upper = max(least, min(microbatches, actions // (num_ranks * chunks)))
    num_microbatches = draw(st.integers(least, upper))
    return name, num_ranks, chunks, num_microbatches - (num_microbatches % 2 if generator.even else 0)


def small(ranks: int = 6, microbatches: int = 14) -> list[Case]:
    """Every legal case up to a size, V up to 3."""
    found = []
    for name, generator in GENERATORS.items():
        for num_ranks in range(1, ranks + 1):
            for num_microbatches in range(max(1, generator.least * num_ranks), microbatches + 1):
                if generator.even and (num_ranks % 2 or num_microbatches % 2):
                    continue
                every = (1, 2, 3) if generator.any_chunks else (generator.chunks,)
                found += [(name, num_ranks, chunks, num_microbatches) for chunks in every]
    return found
