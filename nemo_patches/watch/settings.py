"""The settings of stall reports: a table beside sync/settings.py's."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..sync.settings import Setting, SettingsTable, always, seconds_setting


def _command_line(value: Any) -> str:
    """Raises ValueError where its quotes do not match, TypeError where it is no text."""
    if not isinstance(value, str):
        raise TypeError
    shlex.split(value)
    return value


def _needs_stalls(table: StallSettings) -> str:
    return "" if table.stall_timeout else "with stall_timeout=0, which sees no stalls"


@dataclass(frozen=True)
class StallSettings(SettingsTable):
    """What is reported, and what is done about it."""

    stall_timeout: timedelta = seconds_setting(
        "stall_timeout",
        60,
        "Seconds without a step before every rank logs where all ranks are; 0: never.",
        True,
        is_shown=always,
    ).as_field()
    stall_exit: timedelta = seconds_setting(
        "stall_exit",
        0,
        "Seconds of a stall before the process ends with exit code 83; 0: never.",
        True,
        needs=_needs_stalls,
    ).as_field()
    on_stall: str = Setting(
        "on_stall",
        "",
        _command_line,
        "a command line whose quotes match, or '' (none)",
        "A command that one rank runs once per stall, with the report as JSON on standard input.",
        lambda command: command or "none",
        is_quoted=True,
        needs=_needs_stalls,
    ).as_field()
