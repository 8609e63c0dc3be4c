"""docs/ cannot drift: every field of the job file stands there with its type and default, printed programs are real."""

from __future__ import annotations

import re
import textwrap
import types
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from heptad.account.traffic import step_traffic
from heptad.axes.pipeline.legal import check_job
from heptad.axes.program import programs_of
from heptad.config.check import check
from heptad.config.load import load, parse
from heptad.config.schema import Job, RopeScaling, Section, SourceSection
from heptad.config.unbuilt import TABLE
from heptad.config.write import toml_value
from heptad.errors import ConfigError
from heptad.models.build import build
from heptad.models.resolve import resolve
from heptad.report.ledger import traffic_table
from heptad.schedule.action import format_program
from heptad.train.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SECTIONS: dict[str, type[Section]] = {
    **{name: field.annotation for name, field in Job.model_fields.items() if isinstance(field.annotation, type)},
    "model.rope_scaling": RopeScaling,
    "data.sources": SourceSection,
}
WRITTEN_BY_BENCH = "docs/benchmarks.md"
NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def type_text(annotation: Any, metadata: list[Any]) -> str:
    """An annotation of the schema in the words of docs/jobfile.md: "integer ≥ 1", "`none`, `cpu` or `nvme`"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(args[0], [*args[1:], *metadata])
    limits = [
        f"{sign} {getattr(item, key):g}"
        for part in metadata
        for item in getattr(part, "metadata", [part])
        for key, sign in SIGNS.items()
        if getattr(item, key, None) is not None
    ]
    if origin in (Union, types.UnionType):
        parts = [type_text(arg, metadata) for arg in args if arg is not type(None)]
        optional = ["`none`"] if type(None) in args and str not in args else []
        return " or ".join(dict.fromkeys([*parts, *optional]))
    if origin is Literal:
        words = [f"`{word}`" for word in args]
        return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" or {words[-1]}"
    if origin is tuple:
        if args[1:] == (Ellipsis,):
            return (
                "list of tables"
                if isinstance(args[0], type) and issubclass(args[0], Section)
                else "list of " + type_text(args[0], [])
            )
        return f"list of {len(args)}: each {type_text(args[0], [])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "table"
    return " and ".join([f"{NAMES[annotation]} {limits[0]}", *limits[1:]]) if limits else NAMES[annotation]


def default_text(field: Any) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "not set"
    return f"`{toml_value(field.default)}`"


def expected_rows(section: type[Section]) -> dict[str, tuple[str, str]]:
    """Key as the file has it -> (type, default)."""
    return {
        field.alias or name: (type_text(field.annotation, field.metadata), default_text(field))
        for name, field in section.model_fields.items()
    }


def written_rows(name: str) -> dict[str, tuple[str, str, str]]:
    """Key -> (type, default, effect) in the table below the heading `## [name]` of docs/jobfile.md."""
    text = (DOCS / "jobfile.md").read_text(encoding="utf-8")
    parts = text.split(f"\n## [{name}]\n")
    assert len(parts) == 2, f"docs/jobfile.md has one heading '## [{name}]'"
    body = parts[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w]+)` \| (.+?) \| (.+?) \| (.+) \|$", body, re.MULTILINE)
    return {key: (kind.strip(), default.strip(), effect.strip()) for key, kind, default, effect in rows}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_option_stands_in_the_job_file_page(name: str) -> None:
    written = written_rows(name)
    assert {key: row[:2] for key, row in written.items()} == expected_rows(SECTIONS[name])
    assert list(written) == list(expected_rows(SECTIONS[name])), "in the schema's order"
    assert all(len(effect) > 10 for _, _, effect in written.values())


def test_the_page_has_every_section_and_no_other() -> None:
    headings = re.findall(r"^## \[(.+)\]$", (DOCS / "jobfile.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(SECTIONS)


def test_what_is_not_built_is_marked_so_and_nothing_else() -> None:
    unbuilt = {tuple(option.rstrip("_").split(".")) for option, _, _ in TABLE}
    marked = {(name, key) for name in SECTIONS for key, row in written_rows(name).items() if "Not built yet" in row[2]}
    assert marked == unbuilt


def test_printed_programs_are_those_of_the_executor() -> None:
    """Each block of docs/design-notes.md that begins with a timeline command shows what it prints."""
    text = (DOCS / "design-notes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^    \$ heptad timeline (.+)\n((?:    .*\n)+)", text, re.MULTILINE)
    assert len(blocks) >= 4
    for command, printed in blocks:
        words = command.split()
        job = load(words[0], sets_of(words))
        check_job(job)
        resolved = resolve(job)
        model = build(resolved)
        _, programs = programs_of(resolved, model.unit_specs, model.specs)
        lines = [format_program(program) for program in programs]
        assert printed.split() == "\n".join(lines).split(), command
        assert all(unit.name in text for unit in model.unit_specs)


def test_every_metric_is_defined() -> None:
    text = (DOCS / "definitions.md").read_text(encoding="utf-8")
    assert [name for name in METRICS if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *DOCS.glob("*.md")])
)
def test_links_lead_somewhere_and_job_blocks_load(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+?)(?:#.*?)?\)", text):
        there = (ROOT / page).parent.joinpath(target).exists() or target == WRITTEN_BY_BENCH
        assert there or target.startswith("https://"), target
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)):
        check(parse(block, f"{page} block {number}"))


def readme_block(verb: str) -> tuple[list[str], str]:
    """Arguments after `heptad` and what is printed below, of the README's only block that begins with `verb`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(rf"^    \$ heptad ({verb}.*)\n((?:    .*\n)+)", text, re.MULTILINE)
    assert len(found) == 1, found
    return found[0][0].split(), textwrap.dedent(found[0][1])


def sets_of(words: list[str]) -> list[str]:
    return [word for flag, word in pairwise(words) if flag == "--set"]


def test_the_readmes_ledger_is_what_the_formulas_say() -> None:
    words, printed = readme_block("train debug --ledger")
    job = load(words[1], sets_of(words))
    check(job)
    job = resolve(job)
    model = build(job)
    predicted = step_traffic(job, model.unit_specs, model.specs)
    assert traffic_table(predicted, predicted) + "\n" == printed


def test_the_readmes_refusal_is_what_is_printed() -> None:
    words, printed = readme_block("train default --set layout.tp=4")
    with pytest.raises(ConfigError) as refused:
        check(load(words[1], sets_of(words)))
    assert f"{refused.value}\n" == printed


def test_the_readme_has_a_line_for_every_folder() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    folders = sorted(path.parent.name for path in (ROOT / "src/heptad").glob("*/__init__.py"))
    assert [name for name in folders if f"`{name}/`" not in text] == []
    assert len(text.splitlines()) <= 150


def test_the_page_of_cases_has_those_that_are_named() -> None:
    named = re.compile(r"\bC-(\d{3})\b|test_c_(\d{3})")
    files = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    cited = {a or b for path in files if path != Path(__file__) for a, b in named.findall(path.read_text("utf-8"))}
    assert cited == {a for a, _ in named.findall((DOCS / "cases.md").read_text("utf-8").partition("\n## ")[2])}
