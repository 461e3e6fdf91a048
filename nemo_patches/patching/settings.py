"""All settings of apply(): the tables of the rooms together, in the order of its keywords."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_patches.stall.settings import StallSettings
from nemo_patches.sync.settings import NOTHING, Setting, Settings, SettingsError, SettingsTable
from nemo_patches.tracing.settings import TraceSettings
from nemo_patches.uneven.settings import UnevenSettings

TABLES: tuple[type[SettingsTable], ...] = (Settings, StallSettings, TraceSettings, UnevenSettings)
ALL_SETTINGS: tuple[Setting[Any], ...] = tuple(setting for table in TABLES for setting in table.settings())
_ALWAYS_SHORT = ("sync", "timeout")


@dataclass(frozen=True)
class AllSettings:
    """One of each of TABLES."""

    sync: Settings = Settings()
    stall: StallSettings = StallSettings()
    trace: TraceSettings = TraceSettings()
    uneven: UnevenSettings = UnevenSettings()

    @classmethod
    def resolve(cls, given: Mapping[str, Any] = NOTHING) -> AllSettings:
        """From apply()'s keywords (None: not given), else the environment, else the defaults. Raises SettingsError."""
        return cls(
            Settings.resolve(given),
            StallSettings.resolve(given),
            TraceSettings.resolve(given),
            UnevenSettings.resolve(given),
        )

    def __str__(self) -> str:
        """The trace's only where there is one."""
        trace = str(self.trace) if self.trace.folder else ""
        return "; ".join(filter(None, (f"{self.sync}, {self.stall}", trace, str(self.uneven))))

    def short(self) -> str:
        """For the line at the start: the mode and the wait, and what else is not as by default."""
        items = (item for table in (self.sync, self.stall, self.trace, self.uneven) for item in table.items())
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
