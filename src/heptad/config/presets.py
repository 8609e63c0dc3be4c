"""Presets by name: whole jobs (`presets/*.toml`) and published model sizes (`presets/models/*.toml`).

Both are package data in the job file's own language, so a preset is copied and edited, not subclassed. A name that does
not exist is refused with the nearest one. Read next: `load.py` (jobs), `models/resolve.py` (derived fields).
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from heptad.config.schema import ModelSection
from heptad.errors import ConfigError, nearest

_FOLDER = Path(__file__).parent / "presets"


def job_presets() -> dict[str, Path]:
    """Name -> file of every job preset."""
    return _named(_FOLDER)


def model_presets() -> dict[str, Path]:
    """Name -> file of every model preset."""
    return _named(_FOLDER / "models")


def model_preset(name: str) -> dict[str, object]:
    """The fields of [model] that preset `name` sets, lists as tuples; an unknown name is refused with the nearest."""
    known = model_presets()
    if name not in known:
        close = nearest(name, known)
        raise ConfigError.of(
            "model.preset",
            name,
            f"a model preset is one of {', '.join(known)}",
            f"did you mean {close!r}?" if close else "pick one of them, or give the sizes in [model] yourself",
        )
    fields = tomllib.loads(known[name].read_text(encoding="utf-8"))
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def expand(section: ModelSection) -> ModelSection:
    """A new section: what was given over the preset's fields over the defaults; `preset` keeps its name."""
    if section.preset is None:
        return section
    given = {name: getattr(section, name) for name in section.model_fields_set}
    return ModelSection.model_validate({**model_preset(section.preset), **given})


def _named(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}
