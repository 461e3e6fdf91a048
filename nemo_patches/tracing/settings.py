"""The settings of a trace: one frozen dataclass, from keywords and NEMO_PATCHES_* variables."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_patches.sync.settings import SettingsError, word

INPUTS, CUDA, BARRIER = CHECKS = ("inputs", "cuda", "barrier")
CONTINUE, RAISE = ON_FINDING = ("continue", "raise")
SMALLEST, LARGEST = 0.1, 1e6  # MiB

TRACE_VARIABLE = "NEMO_PATCHES_TRACE"
SIZE_VARIABLE = "NEMO_PATCHES_TRACE_SIZE"
CHECKS_VARIABLE = "NEMO_PATCHES_TRACE_CHECKS"
ON_FINDING_VARIABLE = "NEMO_PATCHES_ON_FINDING"


@dataclass(frozen=True)
class TraceSettings:
    """What is recorded, and where.

    folder: where the files go; None: no trace. size: MiB that the files of one process may have. checks: of CHECKS.
    on_finding: "continue", or "raise" a FindingError out of the encoder call.
    """

    folder: Path | None = None
    size: float = 256.0
    checks: tuple[str, ...] = ()
    on_finding: str = CONTINUE

    def __str__(self) -> str:
        if self.folder is None:
            return "trace=off"
        checks = f", trace_checks={','.join(self.checks)}, on_finding={self.on_finding}" if self.checks else ""
        return f"trace={self.folder}, trace_size={self.size:g} MiB{checks}"

    @property
    def bound(self) -> int:
        """The size in bytes."""
        return round(self.size * (1 << 20))


def resolve(
    trace: str | os.PathLike[str] | None = None,
    size: float | str | None = None,
    checks: str | Sequence[str] | None = None,
    on_finding: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> TraceSettings:
    """The settings from keywords (None: not given), else from the environment, else the defaults.

    An empty trace is none. Raises SettingsError for a value that is not allowed, wherever it came from.
    """
    defaults = TraceSettings()
    name, folder = _given("trace", trace, TRACE_VARIABLE, environment)
    if not isinstance(folder, str | os.PathLike | None):
        raise SettingsError(f"{name}={folder!r} is not allowed; allowed: a folder's path, or '' (no trace)")
    given_checks = _given("trace_checks", checks, CHECKS_VARIABLE, environment)
    found = TraceSettings(
        # Absolute: hydra changes the working directory before the first call.
        folder=Path(folder).expanduser().absolute() if folder else None,
        size=_size(*_given("trace_size", size, SIZE_VARIABLE, environment), defaults.size),
        # Who switches the trace off by keyword has no use for the variable's checks.
        checks=() if trace == "" and checks is None else _checks(*given_checks),
        on_finding=word("on_finding", on_finding, ON_FINDING_VARIABLE, environment, ON_FINDING, CONTINUE),
    )
    if found.checks and found.folder is None:
        name, value = given_checks
        raise SettingsError(f"{name}={value!r} is not allowed without a trace: set trace=DIR or {TRACE_VARIABLE}=DIR")
    return found


def _given(name: str, keyword: object, variable: str, environment: Mapping[str, str]) -> tuple[str, object]:
    """The name under which a value was given, and the value; None where there is none."""
    return (name, keyword) if keyword is not None else (variable, environment.get(variable) or None)


def _size(name: str, value: object, default: float) -> float:
    if value is None:
        return default
    try:
        size = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError):
        size = math.nan
    if not SMALLEST <= size <= LARGEST:
        allowed = f"a number of MiB, {SMALLEST:g} to {LARGEST:.0f}"
        raise SettingsError(f"{name}={value!r} is not allowed; allowed: {allowed}")
    return size


def _checks(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    words = value.split(",") if isinstance(value, str) else value
    if isinstance(words, Sequence):
        words = [word.strip() if isinstance(word, str) else word for word in words]
        if all(word in (*CHECKS, "") for word in words):
            return tuple(check for check in CHECKS if check in words)
    allowed = ", ".join(map(repr, CHECKS))
    raise SettingsError(f"{name}={value!r} is not allowed; allowed, also several, with commas: {allowed}")
