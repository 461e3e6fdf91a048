"""The types of a rule and of the findings that it returns.

A rule is a file in rules/, explained by its docstring.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from importlib import import_module
from types import ModuleType
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
class Finding:
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


Findings = Iterator[Finding]


def _finding(
    severity: Severity,
    what: str,
    read: Value | tuple[Value, ...] = (),
    instead: str = "",
    change: Change | None = None,
) -> Finding:
    values = (read,) if isinstance(read, Value) else read
    return Finding(
        severity=severity, what=what, read=values, instead=instead, change=change
    )


note, warning, error = (partial(_finding, severity) for severity in Severity)


def at(name: str, line: int) -> Value:
    return Value(name, "", origin=f"line {line}", line=line)


def stops(what: str, read: Value | tuple[Value, ...], instead: str) -> Finding:
    """A warning about a job that never reaches a step."""
    return warning(f"{what}: the job stops at its start", read, instead)


@dataclass(frozen=True)
class Rule:
    """One rule: the module `name`, which is imported when it is first looked at, as most runs need
    a few of them.

    about: "config", "code", "machine" or "ranks", the folder that the rule is in.
    """

    identifier: str
    about: str
    name: str

    @property
    def finds(self) -> str:
        return self._documentation[0]

    @property
    def why(self) -> str:
        return self._documentation[1]

    @property
    def link(self) -> str:
        return self._documentation[2]

    @property
    def worst(self) -> Severity:
        return Severity(self._module.WORST)

    def check(self, subject: Any) -> Iterable[Finding]:
        """What it finds in a Job, a Code, a Machine or Ranks, as of `about`; nothing by itself if
        others report it.
        """
        check = getattr(self._module, "check", None)
        return check(subject) if check else ()

    @property
    def whole(self) -> bool:
        return getattr(self._module, "WHOLE", False)

    @property
    def needs_nemo(self) -> bool:
        """Whether it compares with the installed NeMo, so that it finds nothing without one."""
        return getattr(self._module, "NEEDS_NEMO", False)

    @property
    def bad(self) -> str:
        return getattr(self._module, "BAD", "")

    @property
    def good(self) -> str:
        return getattr(self._module, "GOOD", "")

    @property
    def _module(self) -> ModuleType:
        return import_module(self.name)

    @property
    def _documentation(self) -> tuple[str, str, str]:
        finds, _, rest = (inspect.getdoc(self._module) or "").partition("\n\n")
        why, _, link = rest.rpartition("\nLink:")
        return " ".join(finds.split()), " ".join(why.split()), link.strip()
