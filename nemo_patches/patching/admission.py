"""Whether this process's NeMo may be patched: the supported versions, the two switches, and misspelt variables."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping

from nemo_patches.patching import DISABLE_VARIABLE
from nemo_patches.sync import settings
from nemo_patches.sync.settings import SettingsError
from nemo_patches.uneven.settings import ALL_SETTINGS

# The one place that says which NeMo is supported; `make test-matrix` runs the last release of each of these series.
SUPPORTED_SERIES = ("2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.7", "3.0")
SUPPORTED = f"{SUPPORTED_SERIES[0]} to {SUPPORTED_SERIES[-1]}"
UNSUPPORTED_VARIABLE = "NEMO_PATCHES_UNSUPPORTED"


class UnsupportedNeMo(RuntimeError):
    """The installed NeMo is outside the supported range; nothing was patched."""


def disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether NEMO_PATCHES_DISABLE switches all off. Raises SettingsError for a value that is neither on nor off."""
    return _is_on(DISABLE_VARIABLE, environment)


def misspelt(environment: Mapping[str, str] = os.environ) -> list[str]:
    """One sentence for each NEMO_PATCHES_* variable that is neither a setting nor a switch."""
    known = [setting.variable for setting in ALL_SETTINGS]
    return list(settings.misspelt(environment, [*known, DISABLE_VARIABLE, UNSUPPORTED_VARIABLE]))


def require_supported(version: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UnsupportedNeMo for a version outside the range, unless the user has asked for it; SettingsError."""
    any_version = _is_on(UNSUPPORTED_VARIABLE, environment)
    series = re.match(r"\d+\.\d+(?!\d)", version)
    if not any_version and not (series and series[0] in SUPPORTED_SERIES):
        raise UnsupportedNeMo(
            f"NeMo {version} is not supported; supported: {SUPPORTED}. With {UNSUPPORTED_VARIABLE}=1 it is patched all "
            "the same if its code looks as expected"
        )


def nemo_version() -> str:
    """The version in NeMo's own package_info, which is that of the code, also in a checkout.

    Raises ModuleNotFoundError where there is no NeMo.
    """
    info = importlib.import_module("nemo.package_info")  # imports nothing else of NeMo
    return str(getattr(info, "__shortversion__", None) or info.__version__)


def _is_on(variable: str, environment: Mapping[str, str]) -> bool:
    value = environment.get(variable, "")
    if value not in ("", "0", "1"):
        raise SettingsError(f"{variable}={value!r} is not allowed; allowed: '1' (on), '0' (off)")
    return value == "1"
