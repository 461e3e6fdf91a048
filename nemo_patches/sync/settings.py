"""The settings of the length sync: one frozen dataclass, from keywords and NEMO_PATCHES_* variables."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from .protocol import SHORTEST_WAIT

SYNC_MODES = ("bounded", "overlapped", "local")
ON_TIMEOUT = ("fallback", "raise")
LONGEST_TIMEOUT = timedelta(days=1)

SYNC_VARIABLE = "NEMO_PATCHES_SYNC"
TIMEOUT_VARIABLE = "NEMO_PATCHES_TIMEOUT"
ON_TIMEOUT_VARIABLE = "NEMO_PATCHES_ON_TIMEOUT"
CALL_TIMEOUT_VARIABLE = "NEMO_PATCHES_CALL_TIMEOUT"


class SettingsError(ValueError):
    """A setting has a value that is not allowed. The text names the setting, the value and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """How the length sync behaves in this process.

    sync: "bounded" waits for the other ranks, at most `timeout`; "overlapped" never waits and uses a round's result
        at the next call; "local" does not communicate.
    timeout: the longest wait of one encoder call, for all other ranks together.
    on_timeout: "fallback" goes on with this rank's own length; "raise" raises LengthSyncTimeout.
    call_timeout: an encoder call that lasts longer has the stacks of all threads logged, once; nothing is interrupted.
        0: never.
    """

    sync: str = "bounded"
    timeout: timedelta = timedelta(seconds=10)
    on_timeout: str = "fallback"
    call_timeout: timedelta = timedelta(seconds=60)

    def __str__(self) -> str:
        return (
            f"sync={self.sync}, timeout={self.timeout.total_seconds():g} s, on_timeout={self.on_timeout}, "
            f"call_timeout={self.call_timeout.total_seconds():g} s"
        )


def resolve(
    sync: str | None = None,
    timeout: float | str | None = None,
    on_timeout: str | None = None,
    call_timeout: float | str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """The settings from keywords (None: not given), else from the environment, else the defaults.

    The timeouts are in seconds. Raises SettingsError for a value that is not allowed, wherever it came from.
    """
    defaults = Settings()
    return Settings(
        sync=word("sync", sync, SYNC_VARIABLE, environment, SYNC_MODES, defaults.sync),
        timeout=_seconds("timeout", timeout, TIMEOUT_VARIABLE, environment, defaults.timeout),
        on_timeout=word("on_timeout", on_timeout, ON_TIMEOUT_VARIABLE, environment, ON_TIMEOUT, defaults.on_timeout),
        call_timeout=_seconds(
            "call_timeout", call_timeout, CALL_TIMEOUT_VARIABLE, environment, defaults.call_timeout, or_zero=True
        ),
    )


def word(
    name: str, given: object, variable: str, environment: Mapping[str, str], allowed: tuple[str, ...], default: str
) -> str:
    """The setting `name` as `given`, else (None) from its variable, else the default. Raises SettingsError."""
    if given is None:
        name, given = variable, environment.get(variable) or default
    if given not in allowed:
        raise SettingsError(f"{name}={given!r} is not allowed; allowed: {', '.join(map(repr, allowed))}")
    return str(given)


def _seconds(
    name: str,
    given: object,
    variable: str,
    environment: Mapping[str, str],
    default: timedelta,
    or_zero: bool = False,
) -> timedelta:
    if given is None:
        text = environment.get(variable)
        if not text:
            return default
        name, given = variable, text
    try:
        if isinstance(given, bool):
            raise ValueError
        seconds = float(given)  # type: ignore[arg-type]  # whatever it is: a refusal is an error of ours
    except (TypeError, ValueError):
        seconds = math.nan
    shortest, longest = SHORTEST_WAIT.total_seconds(), LONGEST_TIMEOUT.total_seconds()
    if not shortest <= seconds <= longest and not (or_zero and seconds == 0):
        raise SettingsError(
            f"{name}={given!r} is not allowed; allowed: a number of seconds, {shortest:g} to {longest:g}"
            + (", or 0 (never)" if or_zero else "")
        )
    return timedelta(seconds=seconds)
