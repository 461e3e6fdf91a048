"""All settings of apply(): the tables together, in the order of its keywords; and that of a trace.

A trace's table stands here, so that nothing of tracing/ is imported where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_patches.sync.settings import (
    NOTHING,
    PREFIX,
    Setting,
    Settings,
    SettingsError,
    SettingsTable,
    word_setting,
    words_setting,
)
from nemo_patches.watch.settings import StallSettings

STOCK, DEFERRED, AGREED = "stock", "deferred", "agreed"
TRAINING, EVALUATION = STAGES = ("training", "evaluation")
STDERR = Path("-")  # in place of a trace's folder
INPUTS, CUDA, BARRIER = CHECKS = ("inputs", "cuda", "barrier")
_ALWAYS_SHORT = ("sync", "timeout")


def _folder_or_stderr(value: object) -> Path | None:
    if value in ("-", STDERR):
        return STDERR
    if not isinstance(value, str | os.PathLike):
        raise TypeError
    # Absolute: hydra changes the working directory before the first call.
    return Path(value).expanduser().absolute() if value else None


def _needs_trace(table: TraceSettings) -> str:
    return "" if table.folder else f"without a trace: set trace=DIR or {PREFIX}TRACE=DIR"


@dataclass(frozen=True)
class TraceSettings(SettingsTable):
    """What is recorded, and where. folder: None: no trace; STDERR: lines for a person. checks: of CHECKS."""

    # A trace's header has a field of its own for the checks; the folders may differ between ranks.
    folder: Path | None = Setting[Path | None](
        "trace",
        None,
        _folder_or_stderr,
        "a folder's path, '-' (lines on stderr), or '' (no trace)",
        "A folder in which every rank records its encoder calls; '-': a line before and after each call, on stderr.",
        lambda folder: str(folder or "off"),
        is_alike=False,
    ).as_field()
    checks: tuple[str, ...] = words_setting(
        "trace_checks",
        CHECKS,
        "also several, with commas",
        "Checks to run at each encoder call: inputs, cuda, barrier, or several, with commas.",
        is_alike=False,
        needs=_needs_trace,
    ).as_field()

    @classmethod
    def resolve(cls, given: Mapping[str, Any] = NOTHING, environment: Mapping[str, str] = os.environ) -> TraceSettings:
        if given.get("trace") == "" and given.get("trace_checks") is None:
            # A keyword that switches the trace off leaves no use for the variable's checks.
            given = {**given, "trace_checks": ""}
        return super().resolve(given, environment)


@dataclass(frozen=True)
class OptionSettings(SettingsTable):
    """What switches on options/, which is imported only then; hence this table is here. stop_together: of STAGES."""

    metrics: str = word_setting(
        "metrics",
        (STOCK, DEFERRED),
        "stock: WER and BLEU wait for all ranks in every batch; deferred: once, at the end.",
    ).as_field()
    stop_together: tuple[str, ...] = words_setting(
        "stop_together",
        STAGES,
        "also both, with a comma",
        "Loaders whose passes end on all ranks after the same number of batches: training, evaluation, or both.",
    ).as_field()
    checkpoints: str = word_setting(
        "checkpoints",
        (AGREED, STOCK),
        "agreed: all ranks take rank 0's decisions on checkpoints; stock: each its own.",
    ).as_field()


TABLES: tuple[type[SettingsTable], ...] = (Settings, StallSettings, TraceSettings, OptionSettings)
ALL_SETTINGS: tuple[Setting[Any], ...] = tuple(setting for table in TABLES for setting in table.settings())


@dataclass(frozen=True)
class AllSettings:
    """One of each of TABLES."""

    sync: Settings = Settings()
    stall: StallSettings = StallSettings()
    trace: TraceSettings = TraceSettings()
    options: OptionSettings = OptionSettings()

    @classmethod
    def resolve(cls, given: Mapping[str, Any] = NOTHING) -> AllSettings:
        """From apply()'s keywords (None: not given), else the environment, else the defaults. Raises SettingsError."""
        return cls(
            Settings.resolve(given),
            StallSettings.resolve(given),
            TraceSettings.resolve(given),
            OptionSettings.resolve(given),
        )

    def __str__(self) -> str:
        """The trace's only where there is one."""
        trace = str(self.trace) if self.trace.folder else ""
        return "; ".join(filter(None, (f"{self.sync}, {self.stall}", trace, str(self.options))))

    def short(self) -> str:
        """For the line at the start: the mode and the wait, and what else is not as by default."""
        items = (item for table in (self.sync, self.stall, self.trace, self.options) for item in table.items())
        return ", ".join(
            setting.shown(value)
            for setting, value in items
            if setting.name in _ALWAYS_SHORT or value != setting.default
        )


def refusals(given: Mapping[str, Any] = NOTHING) -> Iterator[SettingsError]:
    """Why apply() would refuse these keywords and this process's environment; one at most for each table."""
    for table in TABLES:
        try:
            table.resolve(given)
        except SettingsError as error:
            yield error
