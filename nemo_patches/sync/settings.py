"""The settings of the length sync: one table, from which keywords, variables, options and texts follow."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from .protocol import SHORTEST_WAIT

PREFIX = "NEMO_PATCHES_"
SYNC_MODES = ("bounded", "overlapped", "local")
_SHORTEST_S, _LONGEST_S = SHORTEST_WAIT.total_seconds(), 86400.0
T = TypeVar("T")


class SettingsError(ValueError):
    """A setting has a value that is not allowed. The text names the setting, the value and what is allowed."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One setting: a keyword of apply(), a variable, and an option of `nemo-patches run`."""

    name: str
    default: T
    read: Callable[[Any], T]  # from a keyword or a variable's text; raises ValueError or TypeError if it is not allowed
    allowed: str
    help: str
    text: Callable[[T], str] = str
    unit: str = ""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def shown(self, value: T) -> str:
        return f"{self.name}={self.text(value)}{self.unit}"

    def given(self, keyword: object, environment: Mapping[str, str]) -> tuple[str, object]:
        """Where a value comes from, and the value: the keyword or, if that is None, the variable (None if empty)."""
        return (self.name, keyword) if keyword is not None else (self.variable, environment.get(self.variable) or None)

    def value(self, keyword: object, environment: Mapping[str, str]) -> T:
        """From the keyword (None: not given), else the variable, else the default. Raises SettingsError."""
        source, given = self.given(keyword, environment)
        try:
            return self.default if given is None else self.read(given)
        except (TypeError, ValueError, OverflowError):
            raise SettingsError(f"{source}={given!r} is not allowed; allowed: {self.allowed}") from None


def word_setting(name: str, words: tuple[str, ...], help: str) -> Setting[str]:
    """A setting that is one of these words; the first is the default."""
    return Setting(name, words[0], lambda value: words[words.index(value)], ", ".join(map(repr, words)), help)


def number(value: Any, low: float, high: float) -> float:
    """A number, or the text of one. Raises ValueError or TypeError if it is none, or out of bounds."""
    if isinstance(value, bool) or not low <= float(value) <= high:
        raise ValueError
    return float(value)


def seconds_setting(name: str, default_s: int, help: str, or_never: bool = False) -> Setting[timedelta]:
    def read(value: Any) -> timedelta:
        shortest_s = 0 if or_never and float(value) == 0 else _SHORTEST_S
        return timedelta(seconds=number(value, shortest_s, _LONGEST_S))

    allowed = f"a number of seconds, {_SHORTEST_S:g} to {_LONGEST_S:g}" + (", or 0 (never)" if or_never else "")
    default = timedelta(seconds=default_s)
    return Setting(name, default, read, allowed, help, lambda value: f"{value.total_seconds():g}", " s")


SYNC = word_setting("sync", SYNC_MODES, "bounded: wait for other ranks; overlapped: never; local: no communication.")
TIMEOUT = seconds_setting("timeout", 10, "Seconds: the longest wait of one encoder call, for all other ranks.")
ON_TIMEOUT = word_setting("on_timeout", ("fallback", "raise"), "fallback: use this rank's own length; raise: an error.")
SETTINGS: tuple[Setting[Any], ...] = (SYNC, TIMEOUT, ON_TIMEOUT)
# Of NeMo's checkpoint callback, not of the length sync.
CHECKPOINTS = word_setting(
    "checkpoints", ("agreed", "stock"), "agreed: all ranks take rank 0's decisions on checkpoints; stock: each its own."
)


@dataclass(frozen=True)
class Settings:
    """How the length sync behaves in this process; a field for each of SETTINGS, in their order."""

    sync: str = SYNC.default
    timeout: timedelta = TIMEOUT.default
    on_timeout: str = ON_TIMEOUT.default

    def items(self) -> Iterable[tuple[Setting[Any], Any]]:
        """Each setting of the table, with its value here."""
        return zip(SETTINGS, astuple(self), strict=True)

    def __str__(self) -> str:
        return ", ".join(setting.shown(value) for setting, value in self.items())


def resolve(
    sync: str | None = None,
    timeout: float | str | None = None,
    on_timeout: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """From keywords (timeouts in seconds), else the environment, else the defaults. Raises SettingsError."""
    given = zip(SETTINGS, (sync, timeout, on_timeout), strict=True)
    return Settings(*(setting.value(keyword, environment) for setting, keyword in given))


def misspelt(environment: Mapping[str, str], known: Iterable[str]) -> Iterator[str]:
    """One sentence for each variable of ours that is set and not known."""
    endings = [variable.removeprefix(PREFIX) for variable in known]  # the prefix would make all of them alike
    for variable in sorted(name for name, value in environment.items() if name.startswith(PREFIX) and value):
        if (ending := variable.removeprefix(PREFIX)) not in endings:
            near = difflib.get_close_matches(ending, endings, n=1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"settings, after {PREFIX}: {', '.join(endings)}"
            yield f"{variable} is not a setting, and has no effect; {hint}"
