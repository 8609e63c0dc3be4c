"""PipeDream: 1F1B without a flush and with a weight update after every backward, so weights are stale; it needs
stashing.

The lines are those of 1F1B, but they are one stretch of a stream: M counts all micro-batches between two drains of
the pipeline, each of which is a mini-batch with its own update. In a job the stretch is a step: `global_batch` makes M
asynchronous updates of each stage, then the pipeline drains (so that evaluation, checkpoints and the learning rate's
schedule see one version); the loss of micro-batch m is the mean over its own targets on all data ranks. What that means
stands in `versions`: in each step rank r's stage starts at version 0; its B of a micro-batch makes the next version at
once; F of micro-batch m uses the version after the rank's own earlier backwards, which is max(0, m-(P-r-1)); B of m
uses the weights of its F (they are kept: at most min(M, P-r) versions are alive on rank r, as many from M = 2(P-r-1)
on) and its gradient is added to the newest ones. So different stages see micro-batch m with different staleness: P-r-1
updates on rank r, none on the last. Idle only while filling and draining, (P-1)/(M+P-1) of the stretch. Refused, see
`config/pipedream.py`: clipping, stages 2 and 3, tied tables. Source: PipeDream, arXiv 1806.03377, §3.3. Read next:
`schedule/versions.py` (the actions), `train/stale.py` (the updates), `verify/stale.py` (what they are compared with).
"""

from __future__ import annotations

from heptad.axes.pipeline.generators.one_f_one_b import live, one_f_one_b
from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Line, singles

__all__ = ["live", "pipedream", "versions"]


def pipedream(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Line, ...]:
    """The lines of P ranks."""
    return one_f_one_b(num_ranks, chunks, num_microbatches)


def versions(line: Line) -> dict[int, int]:
    """Micro-batch -> the number of updates in the weights that its forward and its backward on this rank use."""
    updates, used = 0, dict[int, int]()
    for action in singles(line):
        if action.kind is Kind.FORWARD:
            used[action.microbatch] = updates
        else:
            updates += 1
    return used
