"""Why apply() would refuse the settings of this process, each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_patches.sync.settings import ALL_SETTINGS, NOTHING, Settings, SettingsError


def refusals(given: Mapping[str, Any] = NOTHING) -> Iterator[SettingsError]:
    """given: keywords of apply(); what is not among them comes from the environment."""
    is_refused = False
    for setting in ALL_SETTINGS:
        try:
            setting.value(given.get(setting.name), os.environ)
        except SettingsError as error:
            is_refused = True
            yield error
    if not is_refused:
        try:
            Settings.resolve(given)
        except SettingsError as error:
            yield error
