"""Presets by name: jobs (`presets/*.toml`), published model sizes (`models/`), devices and links (`clusters/`).

All are package data in the job file's own language, so a preset is copied and edited, not subclassed. A name that does
not exist is refused with the nearest one. Read next: `load.py` (jobs), `models/resolve.py`, `cluster/catalog.py`.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from heptad.config.schema import ClusterSection, ModelSection
from heptad.errors import ConfigError, nearest

_FOLDER = Path(__file__).parent / "presets"


def job_presets() -> dict[str, Path]:
    """Name -> file of every job preset."""
    return _named(_FOLDER)


def model_presets() -> dict[str, Path]:
    """Name -> file of every model preset."""
    return _named(_FOLDER / "models")


def cluster_presets() -> dict[str, Path]:
    """Name -> file of every cluster preset."""
    return _named(_FOLDER / "clusters")


def model_preset(name: str) -> dict[str, object]:
    """The fields of [model] that preset `name` sets, lists as tuples; an unknown name is refused with the nearest."""
    fields = _table("model.preset", name, model_presets(), "or give the sizes in [model] yourself")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def cluster_table(section: ClusterSection) -> dict[str, object]:
    """The table of `section`'s file or preset (the CPUs of this machine when it names neither), as it stands."""
    if section.file is None:
        return _table("cluster.preset", section.preset or "cpu", cluster_presets(), "or give cluster.file")
    try:
        return tomllib.loads(Path(section.file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        rule = f"a cluster file is TOML in UTF-8 that can be read ({error})"
        raise ConfigError.of("cluster.file", section.file, rule, "correct it, or use cluster.preset") from None


def expand(section: ModelSection) -> ModelSection:
    """A new section: what was given over the preset's fields over the defaults; `preset` keeps its name."""
    if section.preset is None:
        return section
    given = {name: getattr(section, name) for name in section.model_fields_set}
    return ModelSection.model_validate({**model_preset(section.preset), **given})


def _table(field: str, name: str, known: dict[str, Path], otherwise: str) -> dict[str, object]:
    if name not in known:
        close = nearest(name, known)
        rule = f"{field} is one of {', '.join(known)}"
        raise ConfigError.of(
            field, name, rule, f"did you mean {close!r}?" if close else f"pick one of them, {otherwise}"
        )
    return dict(_packaged(known[name]))


@cache
def _packaged(path: Path) -> dict[str, object]:
    """Package data does not change while a process runs, and a check of a job asks for it each time."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def _named(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}
