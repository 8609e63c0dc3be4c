"""Rules of the context axis, and what its options mean: how many ranks a ring has and over how many heads are dealt.

A cut sequence is padded to a multiple of C, so any length works. Under "ulysses" heads are dealt over all C ranks; in a
ring of R ranks, each of them U neighbours that deal heads, C = R·U. Read next: `axes/context/`, `sizes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from heptad.config.effect import idle
from heptad.config.schema import Job, LayoutSection, ModelSection
from heptad.config.sizes import around, divisors, divisors_near
from heptad.errors import Problem


def degrees(layout: LayoutSection) -> tuple[int, int]:
    """(R, U): ranks that keys and values go round, or are gathered from; neighbours that deal heads. R·U = cp."""
    inner = {"ulysses": layout.cp, "ring+ulysses": layout.cp_ulysses}.get(layout.context, 1)
    return layout.cp // inner, inner


def sent_kv_heads(heads: int, kv_heads: int, dealt: int) -> int:
    """Kv heads that are sent where `heads` query heads are dealt over `dealt` ranks: `kv_heads`, or copies of them, as
    few as make equal parts that each rank's query heads need."""
    return heads // math.gcd(heads // kv_heads, heads // dealt)


def cuts_for_balance(layout: LayoutSection) -> bool:
    """Whether `context_split` is read: some ranks would have more to compute than others in plain order."""
    return layout.cp > 1 and layout.context != "ulysses"


def in_words(layout: LayoutSection) -> str:
    """How a cut sequence attends: "ring, zigzag"."""
    kind = f"{layout.context} of {layout.cp_ulysses}" if layout.context == "ring+ulysses" else layout.context
    return f"{kind}, {layout.context_split}" if cuts_for_balance(layout) else kind


def problems(job: Job, model: ModelSection) -> Iterator[Problem]:
    """`model` is the section with its preset filled in."""
    layout, cp = job.layout, job.layout.cp
    if cp == 1:
        yield from idle(
            "layout", layout, ("context", "cp_ulysses", "context_split"), "the sequence is whole (cp = 1)", "cp > 1"
        )
        return
    if layout.context != "ring+ulysses":
        why = f'it is the inner factor of "ring+ulysses", but context is "{layout.context}"'
        yield from idle("layout", layout, ("cp_ulysses",), why, 'context = "ring+ulysses"')
    if not cuts_for_balance(layout):
        why = 'under context = "ulysses" every rank attends from all tokens, so any split is balanced'
        yield from idle("layout", layout, ("context_split",), why, 'context = "ring"')
    if job.data.seq_len < cp:
        rule = f"each of the cp = {cp} ranks holds a token of a sequence, but there are {job.data.seq_len}"
        yield Problem("data.seq_len", job.data.seq_len, rule, f"seq_len >= {cp}, or cp <= {job.data.seq_len}")
    if layout.engine == "fsdp2":
        rule = f"fsdp2 is the reference of the data axis alone, but cp = {cp}"
        yield Problem("layout.engine", layout.engine, rule, 'engine = "heptad", or cp = 1')
    yield from _ulysses(layout, model)


def _ulysses(layout: LayoutSection, model: ModelSection) -> Iterator[Problem]:
    cp, inner = layout.cp, layout.cp_ulysses
    if layout.context == "ring+ulysses":
        rule = ""
        if cp % inner:
            rule = f"cp_ulysses divides cp ({cp} % {inner} = {cp % inner})"
        elif inner == 1:
            rule = "cp_ulysses = 1 deals no heads, which is ring alone"
        elif inner == cp:
            rule = f"cp_ulysses = cp = {cp} leaves a ring of one rank, which is ulysses alone"
        if rule:
            between = [item for item in divisors(cp) if 1 < item < cp]
            fix = f"cp_ulysses = {' or '.join(map(str, between))}" if between else "a cp with two factors, such as 4"
            other = "ulysses" if inner == cp else "ring"
            yield Problem("layout.cp_ulysses", inner, rule, f'{fix}, or context = "{other}"')
            return
    _, dealt = degrees(layout)
    if dealt > 1 and model.heads % (dealt * layout.tp):
        own = f"{model.heads} / {layout.tp}" if layout.tp > 1 else str(model.heads)
        rule = f"ulysses deals the heads of a tensor rank ({own}) over {dealt} context ranks in equal parts"
        fix = f'heads = {around(model.heads, dealt * layout.tp)}, or context = "ring"'
        if layout.context == "ulysses" and model.heads % layout.tp == 0:
            near = divisors_near(model.heads // layout.tp, dealt).split(" or ")
            several = [number for number in near if number != "1"]  # cp = 1 would leave context without effect
            fix = f"cp = {' or '.join(several)}, {fix}" if several else fix
        yield Problem("layout.context", layout.context, rule, fix)
