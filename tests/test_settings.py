"""Settings: a keyword wins over a variable, and a bad value is refused with its name and what is allowed."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest

from nemo_patches.sync.settings import Settings, SettingsError, resolve

pytestmark = pytest.mark.wheel


def test_defaults() -> None:
    assert resolve(environment={}) == Settings("bounded", timedelta(seconds=10), "fallback", timedelta(seconds=60))


def test_a_keyword_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    environment = {
        "NEMO_PATCHES_SYNC": "overlapped",
        "NEMO_PATCHES_TIMEOUT": "2.5",
        "NEMO_PATCHES_ON_TIMEOUT": "raise",
        "NEMO_PATCHES_CALL_TIMEOUT": "0",
    }
    seconds = timedelta(seconds=1)
    assert resolve(environment=environment) == Settings("overlapped", 2.5 * seconds, "raise", 0 * seconds)
    assert resolve("local", 4, "fallback", 7, environment) == Settings("local", 4 * seconds, "fallback", 7 * seconds)
    assert resolve(environment={"NEMO_PATCHES_TIMEOUT": ""}) == Settings()


@pytest.mark.parametrize(
    ("keyword", "value", "allowed"),
    [
        ("sync", "blocking", "'bounded', 'overlapped', 'local'"),
        ("sync", "", "'bounded'"),
        ("on_timeout", "abort", "'fallback', 'raise'"),
        ("timeout", 0, "0.001 to 86400"),
        ("timeout", -1, "seconds"),
        ("call_timeout", -1, "0.001 to 86400, or 0 (never)"),
        ("timeout", math.nan, "seconds"),
        ("timeout", math.inf, "seconds"),
        ("timeout", "soon", "seconds"),
        ("timeout", True, "seconds"),
        ("timeout", 0.0005, "0.001"),  # c10d would take it as no limit at all
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(keyword: str, value: object, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(**{keyword: value}, environment={})  # type: ignore[arg-type]
    assert f"{keyword}={value!r}" in str(caught.value)
    assert allowed in str(caught.value)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(SettingsError, match=r"NEMO_PATCHES_TIMEOUT='ten'.*seconds"):
        resolve(environment={"NEMO_PATCHES_TIMEOUT": "ten"})
