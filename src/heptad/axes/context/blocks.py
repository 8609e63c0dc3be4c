"""What one set of queries computes against one set of keys, as few rectangles as cover exactly what is visible.

A query sees a key of its own document that is not behind it and, with a window W, less than W before it. What is not
visible is never computed: a hop that no document spans has no block. Three kinds, so that no mask is larger than
TILE x TILE:

| kind | query i sees key j of the block | mask |
|---|---|---|
| full | always | none |
| causal | i >= j; as many queries as keys | the kernel's own |
| window | i - j < offset | at most TILE x TILE |

Without a window, a zigzag hop of one document a row is one block: causal on a rank's own keys (its two chunks lie in
order, so the whole is one triangle), full on those of another. With a window the queries are taken in tiles of
min(TILE, W): keys of the tile itself (causal), keys all of it sees (full), keys that leave the window within the tile
(window). Adjacent full blocks that form a larger rectangle are joined; so are rows that are cut alike.

Pure, no torch. Read next: `split.py`, `ring.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from heptad.models.placement import Placement, Runs

TILE = 256
"""Most queries, and most keys, of a block with a mask."""

Kind = Literal["full", "causal", "window"]


class Block(NamedTuple):
    """Queries [q_start, q_stop) against keys [k_start, k_stop), places in the local tensors, for rows [*rows).

    rows: `slice(*block.rows)` of the batch dim. offset: of a window block, else 0: query q_start + i sees key
    k_start + j exactly when i - j < offset. Every query of a block sees at least one of its keys.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: Kind
    rows: tuple[int, int]
    offset: int = 0


class _Area(NamedTuple):
    """A block of one row."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: Kind = "full"
    offset: int = 0


class _Placed(NamedTuple):
    """Tokens [start, stop) of one document and the place of the first."""

    start: int
    stop: int
    place: int


_Rest = TypeVarTuple("_Rest")
_Found = TypeVar("_Found")


def remembered(make: Callable[[Placement, *_Rest], _Found]) -> Callable[[Placement, *_Rest], _Found]:
    """`make`, once for its arguments and forgotten with the placement, so with the last batch that has it.

    Each layer asks again, forward and backward; packed rows have a new placement each.
    """
    known: WeakKeyDictionary[Placement, dict[tuple[*_Rest], _Found]] = WeakKeyDictionary()

    @wraps(make)
    def found(placement: Placement, *rest: *_Rest) -> _Found:
        made = known.setdefault(placement, {})
        if rest not in made:
            made[rest] = make(placement, *rest)
        return made[rest]

    return found


@remembered
def between(placement: Placement, q_rank: int, k_rank: int, window: int | None) -> tuple[Block, ...]:
    """Blocks of ring rank `q_rank`'s queries and ring rank `k_rank`'s keys."""
    q_runs, k_runs = (tuple(ranks[rank] for ranks in placement.runs) for rank in (q_rank, k_rank))
    return blocks(q_runs, k_runs, window)


def blocks(q_runs: tuple[Runs, ...], k_runs: tuple[Runs, ...], window: int | None) -> tuple[Block, ...]:
    """q_runs, k_runs: of each row of the batch, what the local queries and keys are, in the order in which they lie.

    Each visible pair is in exactly one block. Any two sets of runs will do, the same one too.
    """
    assert len(q_runs) == len(k_runs) and (window is None or window > 0)
    found: list[Block] = []
    first = 0
    for last in range(1, len(q_runs) + 1):
        if last < len(q_runs) and (q_runs[last], k_runs[last]) == (q_runs[first], k_runs[first]):
            continue
        for area in _row(q_runs[first], k_runs[first], window):
            found.append(Block(*area[:4], area.kind, (first, last), area.offset))
        first = last
    return tuple(found)


def work(some: Iterable[Block]) -> int:
    """(query, key) pairs that these blocks see, over their rows: x 4 · heads · head_dim are the FLOPs forward."""
    return sum((block.rows[1] - block.rows[0]) * _seen(block) for block in some)


def _seen(block: Block) -> int:
    queries, keys = block.q_stop - block.q_start, block.k_stop - block.k_start
    if block.kind == "full":
        return queries * keys
    if block.kind == "causal":
        return queries * (queries + 1) // 2
    late = max(0, queries - block.offset)  # query offset + i does not see the first i + 1 keys
    ramp = min(late, keys)
    return queries * keys - ramp * (ramp + 1) // 2 - (late - ramp) * keys


def _row(q_runs: Runs, k_runs: Runs, window: int | None) -> Iterator[_Area]:
    """Of one row, document by document."""
    queries, keys = _by_document(q_runs), _by_document(k_runs)
    for document, asking in queries.items():
        if document in keys:
            yield from _document(asking, keys[document], window)


def _by_document(runs: Runs) -> dict[int, list[_Placed]]:
    found: dict[int, list[_Placed]] = {}
    place = 0
    for run in runs:
        found.setdefault(run.document_start, []).append(_Placed(run.start, run.stop, place))
        place += run.stop - run.start
    return found


def _document(asking: list[_Placed], keys: list[_Placed], window: int | None) -> Iterator[_Area]:
    reach = max(run.stop for run in asking) - min(run.start for run in keys)
    plain = window is None or reach <= window
    if plain and _tokens(asking) == _tokens(keys) and _in_order(asking) and _in_order(keys):
        size = sum(run.stop - run.start for run in asking)
        yield _Area(asking[0].place, asking[0].place + size, keys[0].place, keys[0].place + size, "causal")
        return
    areas = [
        area
        for some in asking
        for seen in keys
        for area in (_plain(some, seen) if window is None else _windowed(some, seen, window))
    ]
    yield from (area for area in areas if area.kind != "full")
    yield from _joined(area for area in areas if area.kind == "full")


def _tokens(runs: Sequence[_Placed]) -> list[tuple[int, int]]:
    return [(run.start, run.stop) for run in runs]


def _in_order(runs: Sequence[_Placed]) -> bool:
    """Tokens ascend, place after place."""
    return all(
        before.stop <= run.start and before.place + before.stop - before.start == run.place
        for before, run in pairwise(runs)
    )


def _area(q: _Placed, k: _Placed, queries: tuple[int, int], keys: tuple[int, int], kind: Kind = "full") -> _Area:
    """Tokens [*queries) of run q and [*keys) of run k, as places."""
    to_q, to_k = q.place - q.start, k.place - k.start
    return _Area(queries[0] + to_q, queries[1] + to_q, keys[0] + to_k, keys[1] + to_k, kind)


def _plain(q: _Placed, k: _Placed) -> Iterator[_Area]:
    """Two runs of a document, no window."""
    before = min(k.stop, q.start)
    if k.start < before:
        yield _area(q, k, (q.start, q.stop), (k.start, before))
    first, last = max(k.start, q.start), min(k.stop, q.stop)
    if first < last:
        yield _area(q, k, (first, last), (first, last), "causal")
        if last < q.stop:
            yield _area(q, k, (last, q.stop), (first, last))


def _windowed(q: _Placed, k: _Placed, window: int) -> Iterator[_Area]:
    """Two runs of a document; only queries that see some key: from its first one to `window` - 1 behind its last."""
    if q.stop - k.start <= window:
        yield from _plain(q, k)
        return
    stop = min(q.stop, k.stop - 1 + window)
    tile = min(TILE, window)
    for first in range(max(q.start, k.start), stop, tile):
        last = min(first + tile, stop)
        tokens = _Placed(first, last, q.place + first - q.start)
        inside = max(k.start, last - window)  # from here on, keys that are in the window of all queries of the tile
        if inside < k.stop:
            yield from _plain(tokens, _Placed(inside, k.stop, k.place + inside - k.start))
        edge, edge_stop = max(k.start, first - window + 1), min(k.stop, last - window)
        if edge < edge_stop:
            queries, offset = (first, min(last, edge_stop - 1 + window)), window - (first - edge)
            if queries[1] - first <= offset:  # cut short by the end of the run of keys
                yield _area(q, k, queries, (edge, edge_stop))
            else:
                yield _area(q, k, queries, (edge, edge_stop), "window")._replace(offset=offset)


def _joined(areas: Iterable[_Area]) -> list[_Area]:
    """Full rectangles: first along the keys, then along the queries."""
    found: list[_Area] = []
    for area in sorted(areas, key=lambda area: (area.q_start, area.q_stop, area.k_start)):
        if found and found[-1][:2] == area[:2] and found[-1].k_stop == area.k_start:
            area = found.pop()._replace(k_stop=area.k_stop)
        found.append(area)
    wide, found = found, []
    for area in sorted(wide, key=lambda area: (area.k_start, area.k_stop, area.q_start)):
        if found and found[-1][2:4] == area[2:4] and found[-1].q_stop == area.q_start:
            area = found.pop()._replace(q_stop=area.q_stop)
        found.append(area)
    return found
