"""Which units each stage holds: neighbours, cut so that the costliest stage costs least. Pure, no torch.

Costs are of one micro-batch's forward in any unit of time; the embedding's lookup costs nothing and the head as much as
its matmul does. A context rank has the same share of every unit, so the axis changes no ratio. Of cuts with the same
maximum the one with the smallest sum of squares is taken, and of those the one that gives the first stages more: 30
equal blocks on 4 stages are 8, 8, 7, 7. Read next: `schedule/expand.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.config.experts import routes
from heptad.config.schema import ModelSection
from heptad.models.spec import pairs


def unit_costs(section: ModelSection, seq_len: int) -> tuple[float, ...]:
    """Cost of each unit's forward in FLOPs a token / 2: embedding, blocks, head (with multi-token prediction)."""
    width, matrices = section.width, 3 if section.mlp == "gated" else 2
    attention = _latent(section, seq_len) if section.attention_kind == "mla" else _attention(section, seq_len)
    dense, routed = attention + matrices * width * section.mlp_width, 0
    if section.experts is not None:
        met = section.experts_per_token + section.shared_experts
        routed = attention + width * section.experts
        routed += met * matrices * width * (section.expert_width or section.mlp_width)
    blocks = (float(routed if routes(section, layer) else dense) for layer in range(section.layers))
    further = section.mtp_depth * (2 * width * width + (routed or dense) + width * section.vocab)
    return (0.0, *blocks, float(width * section.vocab + further))


def _attention(section: ModelSection, seq_len: int) -> int:
    head_dim = section.head_dim or section.width // section.heads
    heads, kv_heads = section.heads * head_dim, (section.kv_heads or section.heads) * head_dim
    seen = heads * pairs(seq_len, section.window) // seq_len  # causal: half of 2·H·d·L
    return 2 * section.width * (heads + kv_heads) + seen


def _latent(section: ModelSection, seq_len: int) -> int:
    nope, rope, value = section.qk_nope_head_dim or 0, section.qk_rope_head_dim or 0, section.v_head_dim or 0
    width, heads, rank = section.width, section.heads, section.kv_lora_rank or 0
    query = heads * (nope + rope)
    queries = width * query if section.q_lora_rank is None else section.q_lora_rank * (width + query)
    keys_values = width * (rank + rope) + rank * heads * (nope + value)
    seen = heads * (nope + rope + value) * pairs(seq_len, section.window) // (2 * seq_len)
    return queries + keys_values + heads * value * width + seen


def balanced(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Units of each stage; `costs[0]` is the embedding's, `costs[-1]` the head's, and each stage has a block."""
    layers = len(costs) - 2
    assert 1 <= num_stages <= layers, (num_stages, layers)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(first: int, last: int) -> float:
        """Blocks [first, last) of the model as a stage; the first has the embedding, the last the head."""
        return sums[len(costs) if last == layers else last + 1] - sums[0 if first == 0 else first + 1]

    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{layers: (0.0, 0.0, ())}]
    for behind in range(1, num_stages + 1):  # the last `behind` stages begin at block `first`
        row = {}
        for first in range(num_stages - behind, layers - behind + 1):
            options = []
            for last, (most, squares, sizes) in best[-1].items():
                if last > first:
                    cost = cost_of(first, last)
                    options.append((max(most, cost), squares + cost * cost, (first - last, *sizes)))
            if options:
                row[first] = min(options)  # sizes are negative: of equals, more at the front
        best.append(row)
    return from_sizes([-size for size in best[-1][0][2]])


def from_sizes(sizes: Sequence[int]) -> tuple[range, ...]:
    """Units of each stage from its number of blocks."""
    stages, at = [], 1
    for number, size in enumerate(sizes):
        first, at = (0 if number == 0 else at), at + size
        stages.append(range(first, at + (number == len(sizes) - 1)))
    return tuple(stages)
