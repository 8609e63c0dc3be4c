"""The one error a user meets: a job that cannot work, refused before any process starts.

A `Problem` names the field, the value found, the rule it breaks and the fix. A `ConfigError` carries *every* problem
of one validation pass, so a job is repaired in one go, and prints them on one screen. Exit code 2 (see `cli`).
Broken invariants of Heptad itself are plain `assert`s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One violated rule: `field` is a dotted path of the job file, `value` what stood there."""

    field: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}\n    rule: {self.rule}\n    fix:  {self.fix}"


class ConfigError(Exception):
    """A job that cannot work. Holds all problems found, in the order found."""

    def __init__(self, *problems: Problem) -> None:
        assert problems, "a ConfigError names at least one problem"
        super().__init__(problems)
        self.problems = problems

    @classmethod
    def of(cls, field: str, value: object, rule: str, fix: str) -> ConfigError:
        """The common case of a single problem."""
        return cls(Problem(field, value, rule, fix))

    def __str__(self) -> str:
        head = "1 problem in the job" if len(self.problems) == 1 else f"{len(self.problems)} problems in the job"
        return "\n".join([f"{head}:", *(f"  {problem}" for problem in self.problems)])


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to `word`, or None when nothing is close (for 'did you mean')."""
    options = list(known)
    same = [name for name in options if name.lower().replace("-", "_") == word.lower().replace("-", "_")]
    close = same or difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    return close[0] if close else None
