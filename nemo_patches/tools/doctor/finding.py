"""The types of a rule and of the findings that it returns.

A rule is a file in rules/, explained by its docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.trees import Keys


class Severity(IntEnum):
    """error: the config says that a hang or silent corruption is reachable. warning: the job stops
    at its start, or whether it is reachable depends on what the config leaves open. note: what to
    know; a note is no finding."""

    NOTE = 0
    WARNING = 1
    ERROR = 2

    def __str__(self) -> str:
        return self.name.lower()


NOTE, WARNING, ERROR = Severity


@dataclass(frozen=True)
class Change:
    """One value to write into the config, safe without knowing the data."""

    keys: Keys
    value: Any


@dataclass(frozen=True)
class RuleFinding:
    """One thing that a rule found: `what`, the values that it `read`, what to write `instead`, and
    the safe change.

    The line of the finding is that of the first value that was read and that the config has, or
    else that of the section in which the first one is missing.
    """

    severity: Severity
    what: str
    read: tuple[Value, ...]
    instead: str = ""
    change: Change | None = None

    @property
    def line(self) -> int | None:
        """The line of the config, from 1; None where nothing of what was read is in the file."""
        own = (value.line for value in self.read if value.origin.startswith("line "))
        return next(own, None) or next(
            (value.line for value in self.read if value.line), None
        )


Findings = Iterator[RuleFinding]


def _finding(
    severity: Severity,
    what: str,
    read: Value | tuple[Value, ...] = (),
    instead: str = "",
    change: Change | None = None,
) -> RuleFinding:
    values = (read,) if isinstance(read, Value) else read
    return RuleFinding(
        severity=severity, what=what, read=values, instead=instead, change=change
    )


note, warning, error = (partial(_finding, severity) for severity in Severity)


def at(name: str, line: int) -> Value:
    return Value(name, "", origin=f"line {line}", line=line)


def stops(what: str, read: Value | tuple[Value, ...], instead: str) -> RuleFinding:
    """A warning about a job that never reaches a step."""
    return warning(f"{what}: the job stops at its start", read, instead)


@dataclass(frozen=True)
class Rule:
    """One rule, as its file has it.

    about: "config", "code", "machine" or "ranks", the folder that the file is in. check: what it
    finds in a Job, a Code, a Machine or Ranks. whole: also its notes are printed with all lines.
    needs_nemo: without an installed NeMo it finds nothing.
    """

    identifier: str
    about: str
    finds: str
    why: str
    link: str
    worst: Severity
    check: Callable[[Any], Iterable[RuleFinding]]
    whole: bool
    needs_nemo: bool
    bad: str
    good: str
