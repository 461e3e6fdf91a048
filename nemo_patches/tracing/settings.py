"""The settings of a trace: a table like the length sync's, for keywords, variables, options and texts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_patches.sync.settings import NOTHING, PREFIX, Setting, SettingsTable, number, word_setting, words_setting

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


def _needs_trace(table: TraceSettings) -> str:
    return "" if table.folder else f"without a trace: set trace=DIR or {PREFIX}TRACE=DIR"


@dataclass(frozen=True)
class TraceSettings(SettingsTable):
    """What is recorded, and where.

    folder: None: no trace; STDERR: lines for a person. size: MiB that the files of one process may have.
    checks: of CHECKS. dump: a folder for what is dumped without a trace; None: one of the job's own; empty: no dumps.
    """

    # A trace's header has fields of their own for the size and the checks; the folders may differ between ranks.
    folder: Path | None = Setting[Path | None](
        "trace",
        None,
        _folder_or_stderr,
        "a folder's path, '-' (lines on stderr), or '' (no trace)",
        "A folder in which every rank records its encoder calls; '-': a line before and after each call, on stderr.",
        lambda folder: str(folder or "off"),
        is_alike=False,
        is_shown=lambda table: table.folder is not None or table.dump is None,
    ).as_field()
    size: float = Setting(
        "trace_size",
        256.0,
        lambda value: number(value, SMALLEST_MIB, LARGEST_MIB),
        f"a number of MiB, {SMALLEST_MIB:g} to {LARGEST_MIB:.0f}",
        "The most MiB that each rank keeps.",
        lambda size: f"{size:g}",
        " MiB",
        is_alike=False,
        is_shown=lambda table: table.folder is not None,
    ).as_field()
    checks: tuple[str, ...] = words_setting(
        "trace_checks",
        CHECKS,
        "also several, with commas",
        "Checks to run at each encoder call: inputs, cuda, barrier, or several, with commas.",
        is_alike=False,
        needs=_needs_trace,
    ).as_field()
    on_finding: str = word_setting(
        "on_finding",
        (CONTINUE, RAISE),
        "continue: log what a check finds; raise: raise it out of the encoder call, too.",
        is_shown=lambda table: bool(table.checks),
    ).as_field()
    dump: str | None = Setting[str | None](
        "dump",
        None,
        lambda value: str(_folder(value) or ""),
        "a folder's path, or '' (no dumps)",
        "Without a trace: the folder for the last encoder calls when a rank is missing; '': no dumps.",
        lambda folder: "a temporary folder" if folder is None else folder or "off",
        may_be_empty=True,
        is_alike=False,
        is_shown=lambda table: table.folder is None and table.dump is not None,
    ).as_field()

    @classmethod
    def resolve(cls, given: Mapping[str, Any] = NOTHING, environment: Mapping[str, str] = os.environ) -> TraceSettings:
        if given.get("trace") == "" and given.get("trace_checks") is None:
            # Who switches the trace off by keyword has no use for the variable's checks.
            given = {**given, "trace_checks": ""}
        return super().resolve(given, environment)

    @property
    def bound(self) -> int:
        """The size in bytes."""
        return round(self.size * (1 << 20))
