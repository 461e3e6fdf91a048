"""The settings of stall reports: a table beside sync/settings.py's."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

from ..sync.settings import Setting, SettingsError, seconds_setting


def _command_line(value: Any) -> str:
    """Raises ValueError where its quotes do not match, TypeError where it is no text."""
    if not isinstance(value, str):
        raise TypeError
    shlex.split(value)
    return value


CALL_TIMEOUT = seconds_setting("call_timeout", 60, "Seconds: of a longer call, all stacks are logged; 0: off.", True)
STALL_TIMEOUT = seconds_setting(
    "stall_timeout", 60, "Seconds without a step, after which every rank says where all are; 0: never.", True
)
STALL_EXIT = seconds_setting(
    "stall_exit", 0, "Seconds of a stall, after which the process ends with exit code 83; 0: never.", True
)
ON_STALL = Setting(
    "on_stall",
    "",
    _command_line,
    "a command line whose quotes match, or '' (none)",
    "A command, run once per stall by one rank, with the report as JSON on its standard input.",
    lambda command: command or "none",
)
SETTINGS: tuple[Setting[Any], ...] = (CALL_TIMEOUT, STALL_TIMEOUT, STALL_EXIT, ON_STALL)


@dataclass(frozen=True)
class StallSettings:
    """What is reported, and what is done about it; a field for each of SETTINGS, in their order."""

    call_timeout: timedelta = CALL_TIMEOUT.default
    stall_timeout: timedelta = STALL_TIMEOUT.default
    stall_exit: timedelta = STALL_EXIT.default
    on_stall: str = ON_STALL.default

    def items(self) -> Iterable[tuple[Setting[Any], Any]]:
        """Each setting of the table, with its value here."""
        return zip(SETTINGS, astuple(self), strict=True)

    def __str__(self) -> str:
        """The timeouts, and what else is not as by default."""
        return ", ".join(
            f"{setting.name}={value!r}" if setting is ON_STALL else setting.shown(value)
            for setting, value in self.items()
            if setting in (CALL_TIMEOUT, STALL_TIMEOUT) or value != setting.default
        )


def resolve(
    call_timeout: float | str | None = None,
    stall_timeout: float | str | None = None,
    stall_exit: float | str | None = None,
    on_stall: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> StallSettings:
    """From keywords (times in seconds), else the environment, else the defaults. Raises SettingsError."""
    given = (call_timeout, stall_timeout, stall_exit, on_stall)
    settings = StallSettings(
        *(setting.value(keyword, environment) for setting, keyword in zip(SETTINGS, given, strict=True))
    )
    for setting, keyword in ((STALL_EXIT, stall_exit), (ON_STALL, on_stall)):
        source, value = setting.given(keyword, environment)
        if not settings.stall_timeout and value is not None and setting.read(value) != setting.default:
            raise SettingsError(f"{source}={value!r} is not allowed with {STALL_TIMEOUT.name}=0, which sees no stalls")
    return settings
