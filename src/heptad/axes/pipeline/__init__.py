"""The pipeline axis: layers are cut into stages, and P ranks pass micro-batches through them, both ways.

What is cut: the list of units into P·V stages, V on each rank; the batch into M micro-batches. Rank r holds stages r,
r+P, ... (naive, gpipe, 1f1b, interleaved, pipedream, zbh1), or r and 2P-1-r (zbv, dualpipev), or, of P stages, r and
P-1-r, so that each stage is there twice (dualpipe).

What is sent when: the output of a stage's last unit to the rank of the next stage after each F, its gradient to the
rank of the stage below after each B or I. Two stages on one rank send nothing.

What it costs: B·L·D elements per micro-batch and stage boundary each way, and idle time and memory by schedule. With F,
B, I, W the times of one chunk, r the rank; idle is time a rank waits within the step; alive are chunks (stage,
micro-batch) between F and the end of B, W included. Proven in `tests/axes/pipeline/`, in the range given.

    schedule     idle time of a rank      where          alive on rank r                         where
    naive        (P-1)M·V(F+B)            always         V                                       always
    gpipe        (P-1)(F+B)               M >= P         V·M                                     always
    1f1b         (P-1)(F+B)               always         min(M, P-r)                             always
    interleaved  (P-1)(F+B)               M >= P         min(VM, 2(P-r-1) + (V-1)m + 1)          always
    zbh1         (P-1)(F+B-2W)            see below      min(VM, P + (V-1)m)                     always
    zbv          P-1, if F = I = W = 1    M >= 2P-1      min(2M, 2P, M+r+1)                      always
    dualpipe     (P/2-1)(F&B+B-3W)        see below      P+1                                     P, M even, M >= 2P
    dualpipev    (P-1)(F&B+B-3W)          see below      2P+1                                    M >= 2P

m = ceil(M/floor(M/P)), the longest round of micro-batches: P if P divides M, M if M < P.

Read next: `generate.py`, `generators/`, `schedule/pipeline.py`, `schedule/pipeline_check.py`.
Papers: GPipe 1811.06965, PipeDream 1806.03377, Megatron-LM 2104.04473, zero bubble 2401.10241, V shapes 2405.15362,
DualPipe 2412.19437 §3.2.1.
"""
