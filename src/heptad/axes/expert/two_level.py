"""A token crosses to a node once, however many of its experts are there: two levels.

`across` joins the ranks that have one place in every node; `inside` dispatches among the ranks of a node. A row goes to
the rank with its own place in each node that holds one of its experts, with its choices (int32) and its gate weights;
there `inside` treats it as a token of that rank, whose choices elsewhere are dropped, weighs and sums. One row a token
and node comes back, and the source sums them in the order of nodes.

    tokens ─ once a node, "ep" across ─ `inside` (weighed there) ─ once a node, back ─ sums

Sent across, a row: D elements and K·(4 + w) bytes, w those of a weight, forward; D elements back. Backward: the mirror,
with the weights' gradients. So a token crosses at most min(K, nodes) times in place of K, but less what stays: with
nodes chosen evenly Σ over other nodes of P(some expert is there). Precision: the sum of a node is rounded to the
stream's dtype once before it travels; in the order of nodes they are then added in at least fp32.

Source: hierarchical all-to-all, Tutel, arXiv 2206.03382, §4; a limit on nodes, DeepSeek-V3, arXiv 2412.19437, §2.1.2
and §3.2.2. Read next: `apply.py`, `cost.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heptad.axes.expert.dispatch import OneLevel, exchanged
from heptad.axes.expert.transfer import exchange, start, travel, wait
from heptad.mesh.collectives import Group, Work, all_to_all_rows
from heptad.mesh.host import host_counts
from heptad.models.experts import Experts
from heptad.models.moe import Meanwhile, even_counts, sorted_choices, spread, totalled
from heptad.models.router import Routing


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """A `models.moe.Dispatch`: `across` the nodes, and `inside` each."""

    across: Group
    inside: OneLevel

    def __call__(
        self, tokens: Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [N, D] of this rank, `routing` to the experts of all nodes, `experts`: those here -> sums [N, D]."""
        nodes, held = self.across.size, self.inside.ep.size * experts.number  # experts of a node
        chosen = routing.experts if routing.kept is None else torch.where(routing.kept, routing.experts, -1)
        slots, sent, come = self._crossing(chosen, held)
        out, home = exchange(self.across, sent, come, gives=True), exchange(self.across, come, sent, gives=True)
        weighing = exchange(self.across, sent, come)
        coming = start(spread(tokens, slots, nodes), out)  # M rows, by node and token
        weights = start(spread(routing.weights, slots, nodes), weighing)
        choices, work = self._choices(chosen.to(torch.int32)[slots // nodes], sent, come)
        beside = meanwhile()
        rows, weights = wait(coming, out), wait(weights, weighing)
        work.complete()
        local = choices.to(torch.int64) - self.across.index * held
        kept = (local >= 0) & (local < held)
        there = Routing(weights, torch.where(kept, local, 0), kept)
        results, _ = self.inside(rows, there, experts, _nothing)
        return totalled(travel(results, home), slots, tokens.shape[0], nodes), beside

    def _crossing(self, chosen: Tensor, held: int) -> tuple[Tensor, list[int], list[int]]:
        """chosen [N, K], -1 where dropped -> slots n·nodes + node of each row that is sent, rows to and from each."""
        nodes = self.across.size
        node = torch.where(chosen < 0, nodes, chosen // held)
        wanted = torch.zeros(chosen.shape[0], nodes + 1, dtype=torch.bool, device=chosen.device)
        wanted = wanted.scatter_(1, node, True)[:, :nodes]
        every = torch.arange(nodes, device=chosen.device).expand_as(wanted)
        order, totals = sorted_choices(Routing(wanted, every, wanted), nodes)
        even = even_counts(order.numel(), nodes)
        numbers = host_counts(torch.cat((totals, exchanged(totals, self.across))), even * 2)
        sent, come = numbers[:nodes], numbers[nodes:]
        return order[: sum(sent)], sent, come

    def _choices(self, chosen: Tensor, sent: list[int], come: list[int]) -> tuple[Tensor, Work]:
        """chosen [M, K] of each row sent -> of each row that comes, after the wait."""
        if self.across.size == 1:
            return chosen, Work()
        out = chosen.new_empty(sum(come), chosen.shape[1])
        return out, all_to_all_rows(out, chosen.contiguous(), sent, come, self.across, self.across.ledger.phase)


def _nothing() -> None:
    """What is computed inside a node meanwhile: the caller has done it."""
