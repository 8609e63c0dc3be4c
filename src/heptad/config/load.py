"""From a job's name or TOML file to a `Job`, and back.

Nothing is guessed and nothing dropped: an unknown key, a key in the wrong section, a value of the wrong kind and a key
that stands twice are refused, all in one ConfigError. `--set a.b=c` overrides are read as TOML values (a bare word is
text). `dump` writes every option of a resolved job: a run's folder holds a job file that loads to the same job.
Read next: `schema.py` (the fields), `check.py` (rules between fields).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from heptad.config.explain import explain
from heptad.config.presets import job_presets, model_presets
from heptad.config.schema import Job
from heptad.config.write import section_text
from heptad.errors import ConfigError, Problem, nearest


def load(job_ref: str, sets: Iterable[str] = ()) -> Job:
    """The job named `job_ref` (a preset, else a TOML path) with `sets` ("section.key=value") applied.

    ConfigError carries every problem of the file and of the overrides. Rules between fields are `check.check`'s.
    """
    return parse(_read(job_ref), job_ref, sets)


def parse(text: str, source: str, sets: Iterable[str] = ()) -> Job:
    """`load` on TOML text; `source` names it in errors."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_problem(text, source, str(error))) from None
    problems = _apply(values, sets)
    try:
        job = Job.model_validate(_tuples(values))
    except ValidationError as error:
        raise ConfigError(*problems, *explain(error, values)) from None
    if problems:
        raise ConfigError(*problems)
    return job


def dump(job: Job) -> str:
    """`job` as TOML text with every option in it: `parse(dump(job))` equals `job`."""
    return "\n".join(section_text(name, getattr(job, name)) for name in Job.model_fields)


def _read(job_ref: str) -> str:
    presets = job_presets()
    path = presets.get(job_ref, Path(job_ref))
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        rule, fix = f"a job file is UTF-8 text (byte {error.start} is not)", "save the file as UTF-8"
    except IsADirectoryError:
        rule, fix = "a job is a file, not a folder", f"name the file in it: {job_ref.rstrip('/')}/NAME.toml"
    except OSError:
        beside = sorted(str(near) for near in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        close = nearest(job_ref, [*presets, *beside])
        rule = f"a job is a preset ({', '.join(presets)}) or the path of a TOML file that can be read"
        fix = f"did you mean {close!r}?" if close else "name a preset or an existing file"
        if job_ref in model_presets():
            fix = f"it is a model's name: give debug as the job, and --set model.preset={job_ref}"
    raise ConfigError.of("JOB", job_ref, rule, fix)


def _syntax_problem(text: str, source: str, message: str) -> Problem:
    """What tomllib found, as a problem with the line it stands on; a key or section that stands twice is named."""
    found = re.search(r"at line (\d+)", message)
    lines = text.splitlines()
    number = min(int(found.group(1)) if found else len(lines), len(lines))
    line = lines[number - 1].strip() if lines else ""
    where = f"{source}, line {number}"
    if "Cannot overwrite a value" in message or "Cannot declare" in message or "Cannot mutate" in message:
        headers = [header.group(1) for header in map(re.compile(r"\s*\[+([^\]]+)\]").match, lines[:number]) if header]
        key = line.split("=")[0].strip() if not line.startswith("[") else ""
        field = ".".join(name for name in (*headers[-1:], key) if name)
        return Problem(
            field, line, f"a key or section stands once ({where}: it stands there again)", "keep one of them"
        )
    return Problem(source, line, f"the file is TOML ({message})", f"correct line {number}; text values stand in quotes")


def _apply(values: dict[str, object], sets: Iterable[str]) -> list[Problem]:
    """Write each override into `values` (this function's own copy of the file); return those that cannot be read."""
    problems, seen = [], set()
    for override in sets:
        path, equals, text = override.partition("=")
        names = path.strip().split(".")
        if not equals or len(names) < 2 or not all(names):
            problems.append(
                Problem("--set", override, "an override is section.key=value", "e.g. --set train.steps=100")
            )
            continue
        if tuple(names) in seen:
            problems.append(
                Problem("--set", override, f"an option is set once ({path.strip()} is set twice)", "keep one")
            )
            continue
        seen.add(tuple(names))
        try:
            value = _value(text.strip())
        except tomllib.TOMLDecodeError as error:
            rule = f"the value of --set {path} is a TOML value or a bare word ({error})"
            problems.append(Problem(path.strip(), text, rule, "close the quotes and brackets"))
            continue
        table: object = values
        for name in names[:-1]:
            table = table.setdefault(name, {}) if isinstance(table, dict) else None
        if isinstance(table, dict):
            table[names[-1]] = value
        else:
            rule = f"{'.'.join(names[:-1])} is no section, so it has no {names[-1]!r}"
            problems.append(Problem(path.strip(), value, rule, f"set {'.'.join(names[:-1])} as a whole"))
    return problems


def _value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if text[:1] in ('"', "'", "[", "{"):
            raise
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _tuples(value: object) -> object:
    """TOML arrays as tuples, which frozen sections hold."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
