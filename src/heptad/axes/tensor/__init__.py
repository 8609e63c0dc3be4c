"""The tensor axis: features, heads and vocabulary are cut over T ranks that read the same tokens.

What is cut: the output features of q, k, v, gate, up and the head's rows, the input features of `out` and `down`, the
rows of the token table (`models/cut.py` has the table). Norms and biases of row-parallel linears are whole on every
rank. With fewer kv heads than ranks, neighbours hold the same one and their gradients are summed. The vocabulary and
the MLP's width need not be divisible: missing rows are zeros without probability.

Latent attention cuts what reads its latents, by heads; what makes them is whole and works on the stream's rows, so the
latents enter the region and not the stream. Routed experts are no region: each rank routes rows of its own, of a cut
stream those it has, of a whole one a slice (`Stream.slice`, `join`); shared experts are cut as an MLP.

What is sent when (`mesh/regions.py`): each block enters two regions and leaves two, forward and backward. Whole stream:
4 all-reduces of [B, L, D] a block. Cut stream (sequence parallelism): all-gathers and reduce-scatters instead, of the
same total; unless `keep_gathered`, inputs are gathered again in the backward: 2 + 2 forward, 4 + 2 backward. The head
sends three numbers a token for the loss, never logits. After the last backward, once a step: gradients of norms,
learned positions and shared kv heads, in one all-reduce a group. Overlap: a backward's gather runs under the matmul of
the input gradient, its reduction under the matmuls of the weight gradients.

What it costs: 4·B·L·D elements a block each way times (T-1)/T, on the fastest link; it keeps B·L·D·(10 + 24/T) bytes a
block in half precision (34/T with the cut stream, 4 + 30/T with `keep_gathered`): arXiv 2205.05198 §4, `cost.py`.

Read next: `cost.py`, `apply.py`, `mesh/regions.py`, `models/parallel.py`, `models/loss.py`. Papers: Megatron-LM,
arXiv 1909.08053; sequence parallelism, arXiv 2205.05198.
"""
