"""The pipeline axis: layers are cut into stages, and P ranks pass micro-batches through them, both ways.

What is cut: the list of units into P·V stages, V on each rank; the batch into M micro-batches. Rank r holds stages r,
r+P, ... (naive, gpipe, 1f1b, interleaved, pipedream, zbh1), or r and 2P-1-r (zbv, dualpipev), or, of P stages, r and
P-1-r, so that each stage is there twice (dualpipe).

What is sent when: the output of a stage's last unit to the rank of the next stage after each F, its gradient to the
rank of the stage below after each B or I. Two stages on one rank send nothing.

What it costs: B·L·D elements per micro-batch and stage boundary each way, and idle time and memory by schedule. F, B,
I, W are the times of one chunk, F&B of an overlapped pair, r is the rank. Idle is the time within a step in which a
rank computes nothing, the same on every rank; alive are chunks (stage, micro-batch) between F and the end of the
backward, its W included. Each is proven in the range given, P <= 32 and M <= 128 (`tests/axes/pipeline/`,
`tests/simulate/`).

    schedule     idle time             exact where                   most alive on rank r            exact where
    naive        (P-1)MV(F+B)          always                        V                               always
    gpipe        (P-1)(F+B)            M >= P, or V = 1              VM                              always
    1f1b         (P-1)(F+B)            always                        min(M, P-r)                     always
    interleaved  (P-1)(F+B)            M >= P, or V = 1              min(VM, 2(P-r-1) + (V-1)m + 1)  always
    pipedream    (P-1)(F+B) a stretch  always                        min(M, P-r), and weights        always
    zbh1         (P-1)(F+B-2W)         M >= P, W <= min(F, I)        min(VM, P + (V-1)m)             always
    zbv          (P-1)F                M >= 2P-1, F = I = W          min(2M, 2P, M+r+1)              always
    dualpipe     (P/2-1)(F&B+B-3W)     F = I >= W, F&B = F+B, block  P+1                             always
    dualpipev    (P-1)(F&B+B-3W)       F = I >= W, F&B = F+B, block  2P+1                            always

m = ceil(M/max(1, floor(M/P))), the longest round of micro-batches: P if P divides M, M if M < P. Block: a pair starts
when both inputs are there. dualpipe needs even P and M, M >= 2P; dualpipev M >= 2P; the others take any M.

Read next: `generate.py`, `generators/`, `formulas.py`, `schedule/pipeline.py`, `schedule/pipeline_check.py`.
Papers: GPipe 1811.06965, PipeDream 1806.03377, Megatron-LM 2104.04473, zero bubble 2401.10241, V shapes 2405.15362,
DualPipe 2412.19437 §3.2.1.
"""
