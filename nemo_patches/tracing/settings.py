"""The settings of a trace: a table like the length sync's, for keywords, variables, options and texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from nemo_patches.sync.settings import Setting, SettingsError, number, word_setting

INPUTS, CUDA, BARRIER = CHECKS = ("inputs", "cuda", "barrier")
CONTINUE, RAISE = "continue", "raise"
SMALLEST_MIB, LARGEST_MIB = 0.1, 1e6
STDERR = Path("-")


def _folder(value: object) -> Path | None:
    if not isinstance(value, str | os.PathLike):
        raise TypeError
    # Absolute: hydra changes the working directory before the first call.
    return Path(value).expanduser().absolute() if value else None


def _folder_or_stderr(value: object) -> Path | None:
    return STDERR if value in ("-", STDERR) else _folder(value)


def chosen_words(value: object, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """From a text with commas, or a sequence; in the order of `allowed`. Raises ValueError or TypeError."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, Sequence):
        raise TypeError
    chosen = {str(word).strip() for word in words}
    if not chosen <= {*allowed, ""}:
        raise ValueError
    return tuple(word for word in allowed if word in chosen)


TRACE: Setting[Path | None] = Setting(
    "trace",
    None,
    _folder_or_stderr,
    "a folder's path, '-' (lines on stderr), or '' (no trace)",
    "A folder; every rank records its encoder calls there. '-': a line before and after each call, on stderr.",
    lambda folder: str(folder or "off"),
)
TRACE_SIZE = Setting(
    "trace_size",
    256.0,
    lambda value: number(value, SMALLEST_MIB, LARGEST_MIB),
    f"a number of MiB, {SMALLEST_MIB:g} to {LARGEST_MIB:.0f}",
    "MiB that each rank may write.",
    lambda size: f"{size:g}",
    " MiB",
)
TRACE_CHECKS: Setting[tuple[str, ...]] = Setting(
    "trace_checks",
    (),
    lambda value: chosen_words(value, CHECKS),
    f"{', '.join(map(repr, CHECKS))}, also several, with commas",
    "Checks of each encoder call: inputs, cuda, barrier, or several, with commas.",
    lambda checks: ",".join(checks) or "none",
)
ON_FINDING = word_setting(
    "on_finding", (CONTINUE, RAISE), "continue: log what a check finds; raise: raise it out of the encoder call, too."
)
DUMP: Setting[str | None] = Setting(
    "dump",
    None,
    lambda value: str(_folder(value) or ""),
    "a folder's path, or '' (no dumps)",
    "Without a trace: where the last encoder calls go when a rank is missing; '': nowhere.",
    lambda folder: "a temporary folder" if folder is None else folder or "off",
)
SETTINGS: tuple[Setting[Any], ...] = (TRACE, TRACE_SIZE, TRACE_CHECKS, ON_FINDING, DUMP)


@dataclass(frozen=True)
class TraceSettings:
    """What is recorded, and where; a field for each of SETTINGS, in their order.

    folder: None: no trace; STDERR: lines for a person. size: MiB that the files of one process may have.
    checks: of CHECKS. dump: a folder for what is dumped without a trace; None: one of the job's own; empty: no dumps.
    """

    folder: Path | None = TRACE.default
    size: float = TRACE_SIZE.default
    checks: tuple[str, ...] = TRACE_CHECKS.default
    on_finding: str = ON_FINDING.default
    dump: str | None = DUMP.default

    def items(self) -> Iterable[tuple[Setting[Any], Any]]:
        """Each setting of the table, with its value here."""
        return zip(SETTINGS, astuple(self), strict=True)

    def __str__(self) -> str:
        if self.folder is None:
            return TRACE.shown(None) if self.dump is None else DUMP.shown(self.dump)
        without = (DUMP,) if self.checks else (DUMP, TRACE_CHECKS, ON_FINDING)
        return ", ".join(setting.shown(value) for setting, value in self.items() if setting not in without)

    @property
    def bound(self) -> int:
        """The size in bytes."""
        return round(self.size * (1 << 20))


def resolve(
    trace: str | os.PathLike[str] | None = None,
    size: float | str | None = None,
    checks: str | Sequence[str] | None = None,
    on_finding: str | None = None,
    dump: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> TraceSettings:
    """The settings from keywords (None: not given), else from the environment, else the defaults.

    An empty trace is none; with an empty dump there are no dumps. Raises SettingsError for a value that is not allowed,
    wherever it came from.
    """
    if trace == "" and checks is None:
        checks = ""  # who switches the trace off by keyword has no use for the variable's checks
    if dump is None and environment.get(DUMP.variable) == "":
        dump = ""  # elsewhere a variable that is empty is one that is not set
    given = zip(SETTINGS, (trace, size, checks, on_finding, dump), strict=True)
    settings = TraceSettings(*(setting.value(keyword, environment) for setting, keyword in given))
    if settings.checks and settings.folder is None:
        source, value = TRACE_CHECKS.given(checks, environment)
        raise SettingsError(f"{source}={value!r} is not allowed without a trace: set trace=DIR or {TRACE.variable}=DIR")
    return settings
