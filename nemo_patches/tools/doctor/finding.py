"""The types of a rule (a file in rules/, explained by its docstring) and of the findings that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.yaml_text import Keys


class Severity(IntEnum):
    """error: the config says that a hang or silent corruption is reachable. warning: the job stops at its start, or
    whether it is reachable depends on what the config leaves open. note: what to know; a note is no finding."""

    NOTE = 0
    WARNING = 1
    ERROR = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Change:
    """One value to write into the config, safe without knowing the data."""

    keys: Keys
    value: Any


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found: `what`, the values that it `read`, what to write `instead`, and the safe change.

    The line of the finding is that of the first value that was read and that the config has, or else that of the
    section in which the first one is missing.
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
        return next(own, None) or next((value.line for value in self.read if value.line), None)


@dataclass(frozen=True)
class Rule:
    """One rule: `finds` and `why` are a sentence each, `link` is where to read on, `worst` its highest severity.

    about: "config", "code", "machine" or "ranks", the folder that the rule is in; `check` takes a Job, a Code, ...
    folded: its notes are those that nearly every config gets. topic: of a machine, what was looked at. bad, good: a
    config that it finds something in, and the same one mended.
    """

    identifier: str
    about: str
    finds: str
    why: str
    link: str
    worst: Severity
    check: Callable[[Any], Iterable[Finding]]
    folded: bool = False
    topic: str = ""
    bad: str = ""
    good: str = ""
