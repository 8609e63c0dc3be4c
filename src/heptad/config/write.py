"""TOML text of options: what `load.dump` saves and what messages show. Python itself only reads TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from heptad.config.schema import Section


def section_text(name: str, section: Section) -> str:
    """[name] and one line for each option."""
    return f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in _shown(section).items())


def toml_value(value: object) -> str:
    """One value as TOML writes it; None is "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    items = _shown(value) if isinstance(value, Section) else value
    assert isinstance(items, Mapping), f"no TOML form of {value!r}"
    return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in items.items()) + "}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def _shown(section: Section) -> dict[str, object]:
    """Key -> value as the file has them: by alias, absent text left out (there "none" would be text)."""
    kind = type(section)
    values = {name: getattr(section, name) for name in kind.model_fields}
    return {
        kind.model_fields[name].alias or name: value
        for name, value in values.items()
        if value is not None or name in kind.nullable()
    }
