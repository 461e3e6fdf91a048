"""Whether this process's NeMo may be patched: versions, the two switches, misspelt variables."""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Mapping

from nemo_patches.patching import DISABLE_VARIABLE, UNSUPPORTED_VARIABLE
from nemo_patches.sync.settings import ALL_SETTINGS, PREFIX, SettingsError

# The only list of supported NeMo series; `make test-matrix` runs the last release of each.
SUPPORTED_SERIES = ("2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "2.7", "3.0")
# patches/ has diffs for them; docs/vendors.md says why apply() refuses them.
DIFFS_ONLY = ("1.23", "2.0")
SUPPORTED = f"{SUPPORTED_SERIES[0]} to {SUPPORTED_SERIES[-1]}"
# Whether NeMo is patched: of a process, and of an environment.
ON, OFF, CANNOT_BE = "on", "off here", "cannot be"


class UnsupportedNeMo(RuntimeError):
    """The installed NeMo is outside the supported range; nothing was patched."""


def is_disabled() -> bool:
    """Whether NEMO_PATCHES_DISABLE switches everything off.

    Raises SettingsError for any value but on and off.
    """
    return _is_on(DISABLE_VARIABLE, os.environ)


def misspelt(environment: Mapping[str, str] = os.environ) -> list[str]:
    """One sentence for each NEMO_PATCHES_* variable that is set, and is neither a setting nor a
    switch.
    """
    known = [setting.variable for setting in ALL_SETTINGS]
    known += [DISABLE_VARIABLE, UNSUPPORTED_VARIABLE]
    # With the prefix, all would look similar.
    endings = [variable.removeprefix(PREFIX) for variable in known]
    ours = sorted(
        name for name, value in environment.items() if name.startswith(PREFIX) and value
    )
    sentences = []
    for variable in ours:
        if variable in known:
            continue
        near = difflib.get_close_matches(variable.removeprefix(PREFIX), endings, n=1)
        hint = f"settings, after {PREFIX}: {', '.join(endings)}"
        if near:
            hint = f"did you mean {PREFIX}{near[0]}?"
        sentences.append(f"{variable} is not a setting, and has no effect; {hint}")
    return sentences


def require_supported(
    version: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise UnsupportedNeMo for a version outside the range, unless the user has asked for it;
    SettingsError.
    """
    if (
        not _is_on(UNSUPPORTED_VARIABLE, environment)
        and _series(version) not in SUPPORTED_SERIES
    ):
        raise UnsupportedNeMo(
            f"NeMo {version} is not supported; supported: {', '.join(SUPPORTED_SERIES)}. "
            f"With {UNSUPPORTED_VARIABLE}=1 it is patched all the same if its code looks as "
            f"expected{_about(version)}"
        )


def how_unknown(version: str) -> str:
    """How the series of this NeMo differs from all that are known, in words; else empty."""
    series = _series(version)
    if series in (*SUPPORTED_SERIES, *DIFFS_ONLY):
        return ""
    if _number(series) > _number(SUPPORTED_SERIES[-1]):
        return "newer than any that was tested"
    return "of a series that was not tested"


def _about(version: str) -> str:
    if _series(version) in DIFFS_ONLY:
        series = " and ".join(DIFFS_ONLY)
        return f"; for {series} there are diffs, and docs/vendors.md says why not more"
    from nemo_patches.patching import released_source

    return f". {released_source.compare(version, SUPPORTED, how_unknown(version))}"


def _series(version: str) -> str:
    """Its first two numbers; empty where it does not begin with two."""
    series = re.match(r"\d+\.\d+(?!\d)", version)
    return series[0] if series else ""


def _number(series: str) -> tuple[int, ...]:
    return tuple(int(number) for number in series.split(".") if number)


def nemo_version() -> str:
    """The version in NeMo's own package_info, which is that of the code, also in a checkout.

    Raises ModuleNotFoundError where there is no NeMo.
    """
    info = importlib.import_module("nemo.package_info")  # imports nothing else of NeMo
    return str(getattr(info, "__shortversion__", None) or info.__version__)


def _is_on(variable: str, environment: Mapping[str, str]) -> bool:
    value = environment.get(variable, "")
    if value not in ("", "0", "1"):
        raise SettingsError(
            f"{variable}={value!r} is not allowed; allowed: '1' (on), '0' (off)"
        )
    return value == "1"
