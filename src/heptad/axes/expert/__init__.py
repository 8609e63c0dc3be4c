"""The expert axis: a mixture's experts cut over ranks, and the rows that travel between them.

What is cut: rank (ep, etp) holds experts [ep·⌈E/EP⌉, …) of each block, and of each of them rows [etp·⌈F/ETP⌉, …) of
its three matrices. Tokens are not: every data, context and tensor rank routes its own, so an expert is held by
E_dp = D_shard·C·T / (EP·ETP) ranks of such a block, whose gradients the data axis sums, and by no rank whole.

What is sent, for each block with experts:

| when | what | elements each rank sends |
|---|---|---|
| before the rows | how many go to each expert, in int64 | E (all-to-all), with ETP > 1 (ETP - 1)·E (all-gather) |
| forward | a token's row to each expert that it chose (all-to-all) | K·n·D less what stays: about (1 - 1/EP) |
| forward, ETP > 1 | the rows a rank got, to the others that hold these experts (all-gather) | (ETP - 1)·R·D |
| forward, ETP > 1 | parts of their outputs back, summed there (reduce-scatter) | the others' R·D |
| forward | outputs back; the source weighs and sums them (all-to-all) | as many as came |
| backward | the mirror: gradients of outputs out, gradients of rows back | as much again, but no counts |

n tokens of a rank, K experts a token, R rows that a rank gets. Outputs travel unweighted, so the gradient of a weight
is known where the router is. How many rows go where depends on the routing: `cost.py` says it exactly from the
choices, and in expectation without them.

In two levels (`layout.ep_inner` ranks of a node are neighbours) a token crosses to a node once, however many of its
experts are there: at most min(K, nodes) rows and, with a router that is limited to some groups of experts, as few as
that. A node weighs and sums what is its own and sends one row back, which is rounded to the stream's dtype once more
than with one level; in float64 both are equal to rounding.

Hidden: the shared experts are computed while rows travel, in both directions: start and wait of a transfer are two
autograd functions, so what runs between them in the forward runs between them in the backward. Ranks without a token
take part in everything. Sums run in a fixed order: of a token in the order of its choices, of an expert's gradient in
the order of source ranks.

What a router's losses and drops need of a sequence that several ranks hold is summed and gathered over its context and
tensor ranks: `sequences.py`.

Read `transfer.py`, then `dispatch.py`, `two_level.py`, `apply.py`, `cost.py`; the experts and the router themselves are
`models/experts.py`, `models/router.py`.

Papers: GShard, Lepikhin et al., arXiv 2006.16668; Switch, Fedus et al., arXiv 2101.03961; DeepSpeed-MoE, Rajbhandari et
al., arXiv 2201.05596 (expert tensor parallel); Tutel, Hwang et al., arXiv 2206.03382 (two-level all-to-all);
DeepSeek-V3, arXiv 2412.19437, §3.2 (node-limited dispatch, overlap with shared experts and between micro-batches).
"""
