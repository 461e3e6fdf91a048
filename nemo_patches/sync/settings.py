"""All settings in one table: keywords, variables, options, errors and texts follow from it."""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .protocol import SHORTEST_WAIT

PREFIX = "NEMO_PATCHES_"
DISABLE_VARIABLE = f"{PREFIX}DISABLE"  # no setting: it switches all of them off
NOTHING: Mapping[str, Any] = MappingProxyType({})
# Packages that a setting switches on, and that are imported only then.
TRACING = "tracing"
OPTIONS = "options"
# Words of settings.
STOCK, DEFERRED, AGREED = "stock", "deferred", "agreed"
TRAINING, EVALUATION = STAGES = ("training", "evaluation")
INPUTS, CUDA, BARRIER = CHECKS = ("inputs", "cuda", "barrier")
STDERR = Path("-")  # in place of a trace's folder

_SHORTEST_S = SHORTEST_WAIT.total_seconds()
_LONGEST_S = 86400.0
_AT_THE_START = ("sync", "timeout")  # shown in the line at the start, whatever they are
_ALWAYS_SHOWN = (*_AT_THE_START, "on_timeout", "stall_timeout")
_SETTING = "nemo_patches setting"  # the key of a field's metadata


class SettingsError(ValueError):
    """A setting has a value that is not allowed.

    The text names the setting, the value and what is allowed.
    """


@dataclass(frozen=True)
class Setting:
    """One setting: a keyword of apply(), a variable, and an option of `nemo-patches run`.

    read: from a keyword or a variable's text; raises ValueError or TypeError if it is not allowed.
    nothing: the text of an empty value. words: what a value is one of or, with `several`, some of,
    with commas; empty where it is no word. package: what it switches on; empty: the layer.
    needs: the setting without which it may have its default only. without: how an error says that.
    """

    name: str
    default: Any
    read: Callable[[Any], Any]
    allowed: str
    help: str
    unit: str = ""
    nothing: str = "none"
    words: tuple[str, ...] = ()
    several: bool = False
    package: str = ""
    needs: str = ""
    without: str = ""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def text(self, value: Any) -> str:
        """As a variable has it, without the unit."""
        if isinstance(value, timedelta):
            return f"{value.total_seconds():g}"
        if isinstance(value, tuple):
            value = ",".join(value)
        return str(value or self.nothing)

    def shown(self, value: Any) -> str:
        is_free_text = isinstance(value, str) and not self.words
        text = repr(value) if is_free_text else self.text(value) + self.unit
        return f"{self.name}={text}"

    def source_and_value(
        self, keyword: object, environment: Mapping[str, str]
    ) -> tuple[str, object]:
        """Where a value comes from, and the value: the keyword or, if that is None, the variable.

        The value is None where the variable is not set, or is empty.
        """
        if keyword is not None:
            return self.name, keyword
        return self.variable, environment.get(self.variable) or None

    def value(self, keyword: object, environment: Mapping[str, str]) -> Any:
        """From the keyword (None: not given), else the variable, else the default.

        Raises SettingsError.
        """
        source, given = self.source_and_value(keyword, environment)
        if given is None:
            return self.default
        try:
            return self.read(given)
        except (TypeError, ValueError, OverflowError):
            text = f"{source}={given!r} is not allowed; allowed: {self.allowed}"
            raise SettingsError(text) from None


def _setting(name: str, default: Any, **more: Any) -> Any:
    """A field of the table."""
    setting = Setting(name=name, default=default, **more)
    return field(default=default, metadata={_SETTING: setting})


def _word(name: str, words: tuple[str, ...], help: str, **more: Any) -> Any:
    """One of these words; the first is the default."""

    def read(value: Any) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    allowed = ", ".join(map(repr, words))
    return _setting(
        name, words[0], read=read, allowed=allowed, help=help, words=words, **more
    )


def _words(name: str, words: tuple[str, ...], also: str, help: str, **more: Any) -> Any:
    """Some of these words, from a text with commas or a sequence; by default none."""

    def read(value: Any) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        if not isinstance(given, Sequence):
            raise TypeError
        chosen = {str(word).strip() for word in given}
        if not chosen <= {*words, ""}:
            raise ValueError
        return tuple(word for word in words if word in chosen)

    allowed = f"{', '.join(map(repr, words))}, {also}"
    more |= {"words": words, "several": True}
    return _setting(name, (), read=read, allowed=allowed, help=help, **more)


def _seconds(
    name: str, default_s: int, help: str, or_never: bool = False, **more: Any
) -> Any:
    def read(value: Any) -> timedelta:
        seconds = float(value)
        is_never = or_never and seconds == 0
        if isinstance(value, bool) or not (
            is_never or _SHORTEST_S <= seconds <= _LONGEST_S
        ):
            raise ValueError
        return timedelta(seconds=seconds)

    allowed = f"a number of seconds, {_SHORTEST_S:g} to {_LONGEST_S:g}"
    if or_never:
        allowed += ", or 0 (never)"
    default = timedelta(seconds=default_s)
    return _setting(
        name, default, read=read, allowed=allowed, help=help, unit=" s", **more
    )


def _command_line(value: Any) -> str:
    """Raises ValueError where its quotes do not match, TypeError where it is no text."""
    import shlex  # few have such a command

    if not isinstance(value, str):
        raise TypeError
    shlex.split(value)
    return value


def _folder_or_stderr(value: Any) -> Path | None:
    if value in ("-", STDERR):
        return STDERR
    if not isinstance(value, str | os.PathLike):
        raise TypeError
    # Absolute: hydra changes the working directory before the first call.
    return Path(value).expanduser().absolute() if value else None


_OF_STALLS = {
    "needs": "stall_timeout",
    "without": "with stall_timeout=0, which sees no stalls",
}


@dataclass(frozen=True)
class Settings:
    """The table, with the values of one process. Its order is that of apply()'s keywords."""

    sync: str = _word(
        "sync",
        ("bounded", "local"),
        "bounded: wait for other ranks, at most the timeout; local: no communication.",
    )
    timeout: timedelta = _seconds(
        "timeout",
        10,
        "The longest time that one encoder call waits for other ranks (seconds).",
    )
    on_timeout: str = _word(
        "on_timeout",
        ("fallback", "raise"),
        "fallback: use this rank's own length; raise: an error.",
    )
    stall_timeout: timedelta = _seconds(
        "stall_timeout",
        60,
        "Seconds without a step before every rank logs where all ranks are; 0: never.",
        or_never=True,
    )
    stall_exit: timedelta = _seconds(
        "stall_exit",
        0,
        "Seconds of a stall before the process ends with exit code 83; 0: never.",
        or_never=True,
        **_OF_STALLS,
    )
    on_stall: str = _setting(
        "on_stall",
        "",
        read=_command_line,
        allowed="a command line whose quotes match, or '' (none)",
        help=(
            "A command that one rank runs once per stall, with the report as JSON on"
            " standard input."
        ),
        **_OF_STALLS,
    )
    # None: no trace; STDERR: lines for a person.
    trace: Path | None = _setting(
        "trace",
        None,
        read=_folder_or_stderr,
        allowed="a folder's path, '-' (lines on stderr), or '' (no trace)",
        help=(
            "A folder in which every rank records its encoder calls; '-': a line before"
            " and after each call, on stderr."
        ),
        nothing="off",
        package=TRACING,
    )
    trace_checks: tuple[str, ...] = _words(
        "trace_checks",
        CHECKS,
        "also several, with commas",
        "Checks to run at each encoder call: inputs, cuda, barrier, or several, with"
        " commas.",
        package=TRACING,
        needs="trace",
        without=f"without a trace: set trace=DIR or {PREFIX}TRACE=DIR",
    )
    metrics: str = _word(
        "metrics",
        (STOCK, DEFERRED),
        "stock: WER and BLEU wait for all ranks in every batch; deferred: once, at the"
        " end.",
        package=OPTIONS,
    )
    stop_together: tuple[str, ...] = _words(
        "stop_together",
        STAGES,
        "also both, with a comma",
        "Loaders whose passes end on all ranks after the same number of batches:"
        " training, evaluation, or both.",
        package=OPTIONS,
    )
    checkpoints: str = _word(
        "checkpoints",
        (AGREED, STOCK),
        "agreed: all ranks take rank 0's decisions on checkpoints; stock: each its"
        " own.",
        package=OPTIONS,
    )

    @classmethod
    def resolve(
        cls,
        given: Mapping[str, Any] = NOTHING,
        environment: Mapping[str, str] = os.environ,
    ) -> Settings:
        """From keywords (None: not given), else the environment, else the defaults.

        Raises SettingsError.
        """
        if given.get("trace") == "" and given.get("trace_checks") is None:
            # A keyword that switches the trace off leaves no use for the variable's checks.
            given = {**given, "trace_checks": ""}
        values = {
            one.name: one.value(given.get(one.name), environment)
            for one in ALL_SETTINGS
        }
        for setting in ALL_SETTINGS:
            is_chosen = values[setting.name] != setting.default
            if is_chosen and setting.needs and not values[setting.needs]:
                source, refused = setting.source_and_value(
                    given.get(setting.name), environment
                )
                raise SettingsError(
                    f"{source}={refused!r} is not allowed {setting.without}"
                )
        return cls(**values)

    def items(self) -> Iterator[tuple[Setting, Any]]:
        """Each setting, with its value here."""
        return ((setting, getattr(self, setting.name)) for setting in ALL_SETTINGS)

    def of_layer(self) -> Settings:
        """Nothing is switched on that has a package of its own."""
        return Settings(
            **{one.name: value for one, value in self.items() if not one.package}
        )

    def alike(self) -> str:
        """The text of what all ranks should have alike: all but the trace."""
        return str(replace(self, trace=None, trace_checks=()))

    def short(self) -> str:
        """For the line at the start: the mode and the wait, and what else is not as by default."""
        return self._list(_AT_THE_START, ("", TRACING, OPTIONS))

    def __str__(self) -> str:
        parts = [
            self._list(_ALWAYS_SHOWN, (package,)) for package in ("", TRACING, OPTIONS)
        ]
        return "; ".join(filter(None, parts))

    def _list(self, always: Sequence[str], packages: Sequence[str]) -> str:
        return ", ".join(
            setting.shown(value)
            for setting, value in self.items()
            if setting.package in packages
            and (setting.name in always or value != setting.default)
        )


ALL_SETTINGS: tuple[Setting, ...] = tuple(
    one.metadata[_SETTING] for one in fields(Settings)
)
