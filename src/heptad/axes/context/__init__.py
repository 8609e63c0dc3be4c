"""The context axis: the tokens of every sequence are cut over C ranks, and only core attention looks beyond its own.

What is cut: each row of a micro-batch, padded to a multiple of C with ignored tokens. Labels are shifted before, on the
whole row; ids, labels, positions, documents and token numbers then take one permutation (`split.py`), and every other
part of the model works on a rank's n = L/C tokens as on a batch of its own. Parameters are whole on every context rank:
for them it is one more data rank, and tokens are counted once. What further predictions read and predict is shifted on
whole rows, then cut alike; what a router needs of whole sequences is summed (`axes/expert/sequences.py`).

C = R·U: R ring ranks hold different tokens ("zigzag": of each document chunks r and 2R-1-r of 2R, equal work under a
causal mask; "contiguous": plain order); the U neighbours of a ring rank share its tokens and deal heads.

What is sent when: in each block's attention, forward and again mirrored in the backward, nothing else.

    context        R    U    forward                                  backward
    ring           C    1    R-1 hops of K/V                          R-1 hops of K/V, R-1 of their gradients
    ulysses        1    C    all-to-all of q, k, v; another of out    the same two, of gradients
    ring+ulysses   R    U    the all-to-alls around the hops          likewise
    gather         C    1    all-gather of K/V                        all-gather again, reduce-scatter of gradients

A hop's K/V travel while the block of those at hand is computed; only what is visible is computed (`blocks.py`), so a
hop that no document or window spans is passed on at once. Partial results are merged by their log-sum-exp.

What it costs, in elements a rank sends per block of the model and micro-batch (H query, K kv heads of a tensor rank, d
head_dim; gradients of a ring's or a gather's K/V are fp32 or wider, as they are sums):

    hops, gather   (R-1)·2·B·n·K·d forward, twice that backward; n the same under ring+ulysses, where K/U heads of U·n
                   tokens travel
    all-to-alls    (U-1)/U·B·n·d·(2H + 2K) forward, as much backward; with fewer kv heads than ranks, or a number that
                   U does not divide, some travel to several ranks and count each time (`ulysses.py`)

Kept from forward to backward: q, k, v, out and the log-sum-exp of a rank's own share, O(L/C); never an L x L tensor,
and no mask above TILE x TILE. "gather" holds all keys of one layer while it runs, O(L). Hops suit slow links, as they
hide behind O(L²/C) work; all-to-alls suit fast ones, and U divides H; "ring+ulysses" uses both levels. "gather" is one
collective where hops would be short.

Read next: `split.py`, `blocks.py`, `ring.py`, `ulysses.py`, `gather.py`, `merge.py`, `kernels.py`, `apply.py`,
`models/placement.py`. Papers: ring attention, arXiv 2310.01889; balanced orders: striped, arXiv 2311.09431, and the
2C chunks of Llama 3, arXiv 2407.21783 §3.3.2, which gathers K/V; each document by itself, arXiv 2503.17924;
DeepSpeed-Ulysses, arXiv 2309.14509; both at once (USP), arXiv 2405.07719.
"""
