"""Faults that `verify --inject` plants, each a small change to one rank's running objects: what a real bug would do.

What a fault is: `fault.py`. Those of the data axis: `data_faults.py`; of the tensor axis and of recompute:
`tensor_faults.py`; of the pipeline: `pipeline_faults.py`; of the context axis: `context_faults.py`; of the expert axes:
`expert_faults.py`. `a+b` plants two. What `verify` names is measured (`localise.py`).
"""

from __future__ import annotations

import hashlib

from heptad.config.schema import Job
from heptad.errors import ConfigError, nearest
from heptad.models.build import build
from heptad.verify.context_faults import CONTEXT
from heptad.verify.data_faults import DATA
from heptad.verify.expert_faults import EXPERT
from heptad.verify.fault import Fault, FaultKind
from heptad.verify.pipeline_faults import PIPELINE
from heptad.verify.tensor_faults import TENSOR

KINDS: dict[str, FaultKind] = {**DATA, **TENSOR, **PIPELINE, **CONTEXT, **EXPERT}
_AIMED = "param"
"""The one kind that takes a parameter's name."""


def names() -> list[str]:
    """What `--inject` takes; `param:random` stands for `param:NAME` too."""
    return [f"{_AIMED}:random" if name == _AIMED else name for name in KINDS]


def parse(words: tuple[str, ...], job: Job, steps: int) -> list[Fault]:
    """Faults of `--inject` ("a", "a+b", "param:NAME") in `job` as it will run. Raises ConfigError."""
    return [_one(word.strip(), job, steps) for text in words for word in text.split("+")]


def _one(word: str, job: Job, steps: int) -> Fault:
    kind, _, aim = word.partition(":")
    if kind not in KINDS or bool(aim) != (kind == _AIMED):
        forms = {name.partition(":")[0]: name for name in names()}
        close = forms[kind] if kind in forms else nearest(word, names()) or names()[0]
        raise ConfigError.of("--inject", word, f"a fault is one of {', '.join(names())}", f"did you mean {close!r}?")
    home, aims = KINDS[kind].home(job), KINDS[kind].aims
    trainable = [spec for spec in build(job).specs if spec.trainable]
    targets = [spec.name for spec in trainable if aims is not None and aims(job, spec)]
    if not isinstance(home, str) and aims is not None and not targets:
        home = "every parameter that would show it is frozen (model.frozen)"
    if isinstance(home, str):
        raise ConfigError.of(
            "--inject",
            word,
            f"the fault cannot exist in this job: {home}",
            "set what stands in brackets, or choose another fault",
        )
    if KINDS[kind].second and steps < 2:
        raise ConfigError.of("--inject", word, "it shows from the second step on", "--steps 2")
    if aim not in ("", "random"):
        param = _known(aim, [spec.name for spec in trainable])
    else:
        param = _chosen(targets, f"{job.train.seed}/{word}") if targets else ""
    return Fault(kind, KINDS[kind], home, param)


def _known(name: str, params: list[str]) -> str:
    if name not in params:
        close = nearest(name, params) or params[0]
        raise ConfigError.of("--inject", f"param:{name}", "no such trainable parameter", f"did you mean {close!r}?")
    return name


def _chosen(params: list[str], key: str) -> str:
    """One of `params` at random by `key`."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return params[int.from_bytes(digest, "little") % len(params)]
