"""The data axis: every rank reads other sequences; what is cut besides is parameters, gradients and optimizer state.

Cut: nothing (stage 0, DDP), optimizer state (1), gradients too (2), parameters too (3, FSDP); inside a group of
`dp_shard` ranks with `dp_replicate` copies of the group (HSDP). A *bucket* of parameters is one flat buffer, cut into
equal contiguous shards, so a gather or a reduction is one collective without copies and every parameter's share is one
flat range (`Shard`).

Parameters come in two families (`models/cut.py`). Dense ones are cut over dp_shard × cp, in each tensor rank's shapes.
Routed experts are cut over edp, what ep and etp leave of dp_shard × cp × tp, in each expert rank's shapes: for them a
rank of a block that ep and etp do not tell apart is a data rank, since it brings tokens of its own. Buckets are of one
family; all that follows holds for each, with its own N and Φ.

Sent, per step of K micro-batches and Φ gathered or reduced elements, (N-1)/N of: stage 0: 2Φ once; 1: Φ gather + Φ
reduce-scatter; 2: Φ + KΦ; 3: K(2Φ + Φ) less what is kept at the turn from forward to backward. HSDP: an all-reduce of
Φ/N over the replicas, once a step. When: gathers start one unit ahead of their use, reductions run under the next
unit's backward (`schedule/lower.py`).

Held, bytes a parameter with Adam: see `cost.memory`. Read next: `buckets.py` (what is in a bucket), `bucket.py` (the
state machine), `engine.py`. Papers: ZeRO (Rajbhandari et al. 2020), FSDP (Zhao et al. 2023), DDP (Li et al. 2020).
"""
