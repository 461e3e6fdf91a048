"""The settings of a trace: a table like the length sync's, for keywords, variables, options and texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_patches.sync.settings import NOTHING, PREFIX, Setting, SettingsTable, number, word_setting

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


def words_setting(name: str, words: tuple[str, ...], also: str, help: str, **more: Any) -> Setting[tuple[str, ...]]:
    """A setting that is some of these words, from a text with commas or a sequence, in this order; by default none."""

    def read(value: object) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        if not isinstance(given, Sequence):
            raise TypeError
        chosen = {str(word).strip() for word in given}
        if not chosen <= {*words, ""}:
            raise ValueError
        return tuple(word for word in words if word in chosen)

    allowed = f"{', '.join(map(repr, words))}, {also}"
    text = lambda value: ",".join(value) or "none"  # noqa: E731
    return Setting[tuple[str, ...]](name, (), read, allowed, help, text, words=words, several=True, **more)


def _needs_trace(table: TraceSettings) -> str:
    return "" if table.folder else f"without a trace: set trace=DIR or {PREFIX}TRACE=DIR"


@dataclass(frozen=True)
class TraceSettings(SettingsTable):
    """What is recorded, and where.

    folder: None: no trace; STDERR: lines for a person. size: MiB that the files of one process may have.
    checks: of CHECKS.
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
        is_shown=lambda table: table.folder is not None,
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
