"""How settings are declared, and those of the length sync: keywords, variables, options and texts follow."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from .protocol import SHORTEST_WAIT

PREFIX = "NEMO_PATCHES_"
SYNC_MODES = ("bounded", "local")
_SHORTEST_S, _LONGEST_S = SHORTEST_WAIT.total_seconds(), 86400.0
_SETTING = "nemo_patches setting"  # the key of a field's metadata
NOTHING: Mapping[str, Any] = MappingProxyType({})
T = TypeVar("T")
Table = TypeVar("Table", bound="SettingsTable")


class SettingsError(ValueError):
    """A setting has a value that is not allowed. The text names the setting, the value and what is allowed."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One setting: a keyword of apply(), a variable, and an option of `nemo-patches run`.

    read: from a keyword or a variable's text; raises ValueError or TypeError if it is not allowed.
    words: what a value is one of or, with `several`, some of, with commas; empty where it is no word.
    may_be_empty: an empty variable is a value. Of other settings it is a variable that is not set.
    is_alike: ranks that differ in it are named. needs: given the whole table, why it may have its default only, or "".
    is_shown: given the whole table, whether the table's text has it; None: where it is not the default.
    """

    name: str
    default: T
    read: Callable[[Any], T]
    allowed: str
    help: str
    text: Callable[[T], str] = str
    unit: str = ""
    words: tuple[str, ...] = ()
    several: bool = False
    may_be_empty: bool = False
    is_quoted: bool = False
    is_alike: bool = True
    needs: Callable[[Any], str] = lambda table: ""
    is_shown: Callable[[Any], bool] | None = None

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def as_field(self) -> T:
        """For a table: `sync: str = word_setting(..).as_field()`."""
        return field(default=self.default, metadata={_SETTING: self})

    def shown(self, value: T) -> str:
        return f"{self.name}={value!r}" if self.is_quoted else f"{self.name}={self.text(value)}{self.unit}"

    def given(self, keyword: object, environment: Mapping[str, str]) -> tuple[str, object]:
        """Where a value comes from, and the value: the keyword or, if that is None, the variable (None: not set)."""
        if keyword is not None:
            return self.name, keyword
        value = environment.get(self.variable)
        return self.variable, value if value or self.may_be_empty else None

    def value(self, keyword: object, environment: Mapping[str, str]) -> T:
        """From the keyword (None: not given), else the variable, else the default. Raises SettingsError."""
        source, given = self.given(keyword, environment)
        try:
            return self.default if given is None else self.read(given)
        except (TypeError, ValueError, OverflowError):
            raise SettingsError(f"{source}={given!r} is not allowed; allowed: {self.allowed}") from None


@dataclass(frozen=True)
class SettingsTable:
    """Settings that belong together, with their values: each field of a subclass is a Setting's as_field()."""

    @classmethod
    def settings(cls) -> tuple[Setting[Any], ...]:
        """In the order of the fields, which is that of apply()'s keywords."""
        return tuple(one.metadata[_SETTING] for one in fields(cls))

    @classmethod
    def resolve(
        cls: type[Table], given: Mapping[str, Any] = NOTHING, environment: Mapping[str, str] = os.environ
    ) -> Table:
        """From keywords (None: not given), else the environment, else the defaults. Raises SettingsError."""
        table = cls(*(setting.value(given.get(setting.name), environment) for setting in cls.settings()))
        for setting, value in table.items():
            if value != setting.default and (why := setting.needs(table)):
                source, refused = setting.given(given.get(setting.name), environment)
                raise SettingsError(f"{source}={refused!r} is not allowed {why}")
        return table

    def items(self) -> Iterator[tuple[Setting[Any], Any]]:
        """Each setting of the table, with its value here."""
        return ((one.metadata[_SETTING], getattr(self, one.name)) for one in fields(self))

    def __str__(self) -> str:
        return ", ".join(
            setting.shown(value)
            for setting, value in self.items()
            if (setting.is_shown(self) if setting.is_shown else value != setting.default)
        )


def always(table: SettingsTable) -> bool:
    """For Setting.is_shown."""
    return True


def word_setting(name: str, words: tuple[str, ...], help: str, **more: Any) -> Setting[str]:
    """A setting that is one of these words; the first is the default."""
    allowed = ", ".join(map(repr, words))
    return Setting(name, words[0], lambda value: words[words.index(value)], allowed, help, words=words, **more)


def words_setting(name: str, words: tuple[str, ...], also: str, help: str, **more: Any) -> Setting[tuple[str, ...]]:
    """A setting that is some of these words, from a text with commas or a sequence; by default none."""

    def read(value: object) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        if not isinstance(given, Sequence):
            raise TypeError
        chosen = {str(word).strip() for word in given}
        if not chosen <= {*words, ""}:
            raise ValueError
        return tuple(word for word in words if word in chosen)

    return Setting[tuple[str, ...]](
        name=name,
        default=(),
        read=read,
        allowed=f"{', '.join(map(repr, words))}, {also}",
        help=help,
        text=lambda value: ",".join(value) or "none",
        words=words,
        several=True,
        **more,
    )


def number(value: Any, low: float, high: float) -> float:
    """A number, or the text of one. Raises ValueError or TypeError if it is none, or out of bounds."""
    if isinstance(value, bool) or not low <= float(value) <= high:
        raise ValueError
    return float(value)


def seconds_setting(name: str, default_s: int, help: str, or_never: bool = False, **more: Any) -> Setting[timedelta]:
    def read(value: Any) -> timedelta:
        shortest_s = 0 if or_never and float(value) == 0 else _SHORTEST_S
        return timedelta(seconds=number(value, shortest_s, _LONGEST_S))

    allowed = f"a number of seconds, {_SHORTEST_S:g} to {_LONGEST_S:g}" + (", or 0 (never)" if or_never else "")
    default = timedelta(seconds=default_s)
    return Setting(name, default, read, allowed, help, lambda value: f"{value.total_seconds():g}", " s", **more)


@dataclass(frozen=True)
class Settings(SettingsTable):
    """How the length sync behaves in this process."""

    sync: str = word_setting(
        "sync",
        SYNC_MODES,
        "bounded: wait for other ranks, at most the timeout; local: no communication.",
        is_shown=always,
    ).as_field()
    timeout: timedelta = seconds_setting(
        "timeout", 10, "The longest time that one encoder call waits for other ranks (seconds).", is_shown=always
    ).as_field()
    on_timeout: str = word_setting(
        "on_timeout", ("fallback", "raise"), "fallback: use this rank's own length; raise: an error.", is_shown=always
    ).as_field()


def misspelt(environment: Mapping[str, str], known: Iterable[str]) -> Iterator[str]:
    """One sentence for each variable of ours that is set and not known."""
    endings = [variable.removeprefix(PREFIX) for variable in known]  # with the prefix, all would look similar
    for variable in sorted(name for name, value in environment.items() if name.startswith(PREFIX) and value):
        if (ending := variable.removeprefix(PREFIX)) not in endings:
            near = difflib.get_close_matches(ending, endings, n=1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"settings, after {PREFIX}: {', '.join(endings)}"
            yield f"{variable} is not a setting, and has no effect; {hint}"
