"""What the expert axis sends in a step, given how many rows go where (`flow.py`). Pure, no torch.

With e bytes of an element, w of a weight, D width, K choices, El experts of a rank, on each rank:

| transfer | sent, forward |
|---|---|
| counts over "ep" | an all-to-all of 8·EP·El bytes; ETP > 1: an all-gather of 8·ETP·EP·El over "etp" |
| rows, "ep" | rows for experts elsewhere · D·e |
| rows, "etp" | (ETP - 1) · rows that came · D·e, an all-gather |
| parts, "etp" | rows that came to the other "etp" ranks · D·e, a reduce-scatter |
| outputs, "ep" | rows that came from elsewhere · D·e |

Two levels: EP is ranks of a node there, and the tokens are those that came; before and behind it, over the nodes:

| transfer | sent, forward |
|---|---|
| counts | an all-to-all of 8·nodes bytes |
| rows, weights, choices | rows for other nodes · D·e, · K·w, · K·4: three |
| outputs | rows that came from other nodes · D·e |

The backward sends no counts and no choices, and the mirror of the rest: gradients of outputs to where outputs came
from, of rows and weights to where these came from, each if somebody wants it. So it sends what came in the forward.
Where a block runs again, the forward is sent again, in the backward. Read next: `dispatch.py`, `two_level.py`,
`account/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heptad.axes.expert.flow import Routed, Rows, Sizes, expected, joined
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.schedule.action import Segments
from heptad.trace import Transfer
from heptad.units import sent_bytes

COUNT_BYTES, CHOICE_BYTES = 8, 4
GATE = ".router.gate.weight"


def forward(sizes: Sizes, rows: Rows) -> list[Transfer]:
    """What one mixture sends in one forward; the phase is the caller's."""
    found = []
    counts = COUNT_BYTES * sizes.inside * sizes.held
    if sizes.nodes > 1:
        count_bytes = sent_bytes("all_to_all", COUNT_BYTES * sizes.nodes, sizes.nodes)
        each = sizes.row_bytes + sizes.choices * (sizes.wide_bytes + CHOICE_BYTES)
        found.append(Transfer("all_to_all", "ep", "", count_bytes + _bytes(rows.across[0], each), 4))
        found.append(Transfer("all_to_all", "ep", "", _bytes(rows.across[1], sizes.row_bytes)))
    if sizes.inside > 1:
        found.append(Transfer("all_to_all", "ep", "", sent_bytes("all_to_all", counts, sizes.inside)))
        found.append(Transfer("all_to_all", "ep", "", _bytes(sum(rows.ep), sizes.row_bytes), 2))
    if sizes.etp > 1:
        found.append(Transfer("all_gather", "etp", "", sent_bytes("all_gather", sizes.etp * counts, sizes.etp)))
        found += _whole(sizes, rows, 1)
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whose gradients somebody wants: outputs of experts, gate weights, tokens."""

    outputs: bool
    weights: bool
    tokens: bool


def backward(sizes: Sizes, rows: Rows, wanted: Wanted) -> list[Transfer]:
    """What one mixture sends in one backward."""
    found, row_bytes = list[Transfer](), sizes.row_bytes

    def send(number: float, each: int) -> None:
        found.append(Transfer("all_to_all", "ep", "", _bytes(number, each)))

    if sizes.nodes > 1:
        if wanted.outputs or wanted.weights:
            send(rows.across[0], row_bytes)
        if wanted.weights:
            send(rows.across[1], sizes.choices * sizes.wide_bytes)
        if wanted.tokens:
            send(rows.across[1], row_bytes)
    if sizes.inside > 1:
        if wanted.outputs:
            send(rows.ep[0], row_bytes)
        if wanted.tokens:
            send(rows.ep[1], row_bytes)
    if sizes.etp > 1:
        gathered, reduced = _whole(sizes, rows, 1)
        found += [gathered] * wanted.outputs + [reduced] * wanted.tokens
    return found


def _whole(sizes: Sizes, rows: Rows, times: int) -> list[Transfer]:
    """Rows to all of "etp", and parts of sums back."""
    sent = zip(("all_gather", "reduce_scatter"), rows.whole, strict=True)
    return [Transfer(op, "etp", "", _bytes(number, sizes.row_bytes), times) for op, number in sent]


def _bytes(rows: float, each: int) -> int:
    return round(rows * each)


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of a model's: its router's name, the unit it is in, what its backward sends, and whether it has one."""

    router: str
    unit: int
    wanted: Wanted
    trains: bool


def mixtures(units: Sequence[UnitSpec], specs: Sequence[ParamSpec]) -> list[Mixture]:
    """Every mixture of a model, in order; `units`, `specs` of all of it."""
    trained = [spec.name for spec in specs if spec.trainable]
    found = []
    for spec in specs:
        if not spec.name.endswith(GATE):
            continue
        name = spec.name.removesuffix(GATE)  # of the mixture
        unit = next(at for at, item in enumerate(units) if spec.name.startswith(f"{item.name}."))
        before = _any(trained, [item.name for item in units[:unit]])
        tokens = before or _any(_ahead(trained, name), [units[unit].name])
        weights = tokens or spec.trainable
        outputs = tokens or _any(trained, [f"{name}.experts"])
        alive = before or _any(trained, [units[unit].name])
        found.append(Mixture(f"{name}.router", unit, Wanted(outputs, weights, tokens), alive))
    return found


def _ahead(trained: Sequence[str], name: str) -> list[str]:
    """Of the parameters in a mixture's own unit those that its tokens come from: its norm, and attention ahead of it;
    further predictions read what is ahead of theirs."""
    block, _, _ = name.rpartition(".")
    outer, _, _ = block.rpartition(".")
    ahead = [f"{name}.norm", f"{block}.attention"]
    if block.endswith(".block"):  # a prediction's: what joins its tokens, and all of the predictions before it
        prefix, _, number = outer.rpartition(".")
        ahead += [f"{outer}.{part}" for part in ("stream_norm", "token_norm", "join", "tokens")]
        ahead += [f"{prefix}.{at}" for at in range(int(number))]
    return [item for item in trained if any(item.startswith(f"{start}.") for start in ahead)]


def _any(trained: Sequence[str], prefixes: Sequence[str]) -> bool:
    return any(name.startswith(f"{prefix}.") for name in trained for prefix in prefixes)


def traffic(
    units: Sequence[UnitSpec],
    specs: Sequence[ParamSpec],
    sizes: Sizes,
    routed: Routed,
    recompute: Segments = (),
) -> list[Transfer]:
    """What a rank sends in a step, given where the tokens of its block went."""
    again = {unit for segment in recompute for unit in segment}
    found = []
    for mixture in mixtures(units, specs):
        for call in range(len(routed.calls[routed.rank].get(mixture.router, ()))):
            flow = joined(sizes, [calls[mixture.router][call] for calls in routed.calls])
            found += _step(sizes, Rows.of(sizes, flow, routed.rank), mixture, mixture.unit in again)
    return found


def expected_traffic(
    units: Sequence[UnitSpec],
    specs: Sequence[ParamSpec],
    sizes: Sizes,
    tokens: int,
    runs: Sequence[int],
    recompute: Segments = (),
) -> list[Transfer]:
    """The same in expectation, of a block's first rank; tokens: of a rank in a micro-batch; runs: micro-batches of each
    unit."""
    again = {unit for segment in recompute for unit in segment}
    rows = Rows.of(sizes, expected(sizes, tokens), 0)
    found = []
    for mixture in mixtures(units, specs):
        found += runs[mixture.unit] * _step(sizes, rows, mixture, mixture.unit in again)
    return found


def _step(sizes: Sizes, rows: Rows, mixture: Mixture, again: bool) -> list[Transfer]:
    """One micro-batch's forward, another in the backward where it runs again, and the backward."""
    once = forward(sizes, rows)
    after = (once if again and mixture.trains else []) + backward(sizes, rows, mixture.wanted)
    return [Transfer(item.op, item.axis, "forward", item.num_bytes, item.count) for item in once] + [
        Transfer(item.op, item.axis, "backward", item.num_bytes, item.count) for item in after
    ]
