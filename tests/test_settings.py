"""Settings: a keyword wins over a variable; a bad value and a misspelt variable are named with what
is allowed.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nemo_patches.patching import admission
from nemo_patches.sync.settings import ALL_SETTINGS, Setting, Settings, SettingsError
from nemo_patches.tools.refusals import refusals

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]


def test_defaults() -> None:
    second = timedelta(seconds=1)
    assert Settings.resolve(environment={}) == Settings(
        sync="bounded",
        timeout=10 * second,
        on_timeout="fallback",
        stall_timeout=60 * second,
        stall_exit=0 * second,
        on_stall="",
        trace=None,
        trace_checks=(),
        metrics="stock",
        stop_together=(),
        checkpoints="agreed",
    )


def test_a_keyword_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    environment = {
        "NEMO_PATCHES_SYNC": "local",
        "NEMO_PATCHES_TIMEOUT": "2.5",
        "NEMO_PATCHES_ON_TIMEOUT": "raise",
        "NEMO_PATCHES_STALL_TIMEOUT": "0",
    }
    seconds = timedelta(seconds=1)
    by_variables = Settings.resolve(environment=environment)
    assert by_variables == Settings("local", 2.5 * seconds, "raise", 0 * seconds)
    given: dict[str, Any] = {"sync": "bounded", "timeout": 4, "on_timeout": "fallback"}
    assert Settings.resolve(given, environment) == Settings(
        "bounded", 4 * seconds, "fallback", 0 * seconds
    )
    given |= {"stall_timeout": 8, "stall_exit": 9, "on_stall": "page --me"}
    by_keywords = Settings.resolve(given, environment)
    assert by_keywords == Settings(
        "bounded", 4 * seconds, "fallback", 8 * seconds, 9 * seconds, "page --me"
    )
    assert Settings.resolve(environment={"NEMO_PATCHES_TIMEOUT": ""}) == Settings()


@pytest.mark.parametrize(
    ("keyword", "value", "allowed"),
    [
        ("sync", "blocking", "'bounded', 'local'"),
        ("sync", "", "'bounded'"),
        ("on_timeout", "abort", "'fallback', 'raise'"),
        ("timeout", 0, "0.001 to 86400"),
        ("timeout", -1, "seconds"),
        ("stall_timeout", 0.0001, "0.001 to 86400, or 0 (never)"),
        ("stall_exit", "an hour", "seconds"),
        ("on_stall", "page 'me", "a command line whose quotes match"),
        ("timeout", math.nan, "seconds"),
        ("timeout", math.inf, "seconds"),
        ("timeout", "soon", "seconds"),
        ("timeout", True, "seconds"),
        ("timeout", 0.0005, "0.001"),  # c10d would take it as no limit at all
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(
    keyword: str, value: object, allowed: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.resolve({keyword: value}, {})
    assert f"{keyword}={value!r}" in str(caught.value)
    assert allowed in str(caught.value)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(SettingsError, match=r"NEMO_PATCHES_TIMEOUT='ten'.*seconds"):
        Settings.resolve(environment={"NEMO_PATCHES_TIMEOUT": "ten"})


def test_the_fields_are_the_table_in_its_order() -> None:
    assert list(Settings().items()) == [
        (setting, setting.default) for setting in ALL_SETTINGS
    ]
    assert [setting.name for setting in ALL_SETTINGS] == [
        one.name for one in fields(Settings)
    ]


def test_the_text_has_the_layer_the_trace_and_the_options() -> None:
    by_default = "sync=bounded, timeout=2.5 s, on_timeout=fallback, stall_timeout=60 s"
    settings = Settings(timeout=timedelta(seconds=2.5))
    assert str(settings) == by_default
    assert settings.short() == "sync=bounded, timeout=2.5 s"
    settings = replace(
        settings,
        on_stall="page me",
        trace=Path("/a"),
        metrics="deferred",
        stop_together=("training", "evaluation"),
    )
    options = "metrics=deferred, stop_together=training,evaluation"
    assert str(settings) == f"{by_default}, on_stall='page me'; trace=/a; {options}"
    assert settings.alike() == f"{by_default}, on_stall='page me'; {options}"
    assert (
        settings.short()
        == f"sync=bounded, timeout=2.5 s, on_stall='page me', trace=/a, {options}"
    )
    assert str(settings.of_layer()) == f"{by_default}, on_stall='page me'"


def test_each_value_that_is_refused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_PATCHES_TIMEOUT", "ten")
    monkeypatch.setenv("NEMO_PATCHES_METRICS", "none")
    assert [
        "TIMEOUT='ten'" in text or "METRICS='none'" in text
        for text in map(str, refusals())
    ] == [True, True]
    assert not list(refusals({"timeout": 10, "metrics": "stock"}))
    (text,) = map(
        str,
        refusals(
            {"timeout": 10, "metrics": "stock", "stall_timeout": 0, "stall_exit": 5}
        ),
    )
    assert text.startswith("stall_exit=5 is not allowed with stall_timeout=0")


@pytest.mark.parametrize("given", [{"stall_exit": 5}, {"on_stall": "page"}])
def test_what_needs_a_stall_timeout_is_not_allowed_without_one(
    given: dict[str, Any],
) -> None:
    with pytest.raises(
        SettingsError,
        match=rf"{next(iter(given))}=.* is not allowed with stall_timeout=0",
    ):
        Settings.resolve({"stall_timeout": 0, **given}, {})


@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=lambda setting: setting.name)
def test_the_text_of_a_value_is_read_as_that_value(setting: Setting) -> None:
    others = {
        "sync": "local",
        "on_timeout": "raise",
        "on_stall": "page 'me now'",
        "trace": "/a",
        "trace_checks": "cuda",
        "metrics": "deferred",
        "stop_together": "training,evaluation",
        "checkpoints": "stock",
    }
    value = setting.value(None, {setting.variable: others.get(setting.name, "3.5")})
    assert value != setting.default
    assert setting.value(setting.text(value), {}) == value


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("NEMO_PATCHES_TIMEOUTS", "did you mean NEMO_PATCHES_TIMEOUT?"),
        ("NEMO_PATCHES_ONTIMEOUT", "did you mean NEMO_PATCHES_ON_TIMEOUT?"),
        ("NEMO_PATCHES_TRACE_CHECK", "did you mean NEMO_PATCHES_TRACE_CHECKS?"),
        ("NEMO_PATCHES_DISABLED", "did you mean NEMO_PATCHES_DISABLE?"),
        (
            "NEMO_PATCHES_LOG_LEVEL",
            "settings, after NEMO_PATCHES_: SYNC, TIMEOUT, ON_TIMEOUT, STALL_TIMEOUT, STALL_EXIT, ",
        ),
    ],
)
def test_a_misspelt_variable_is_named_with_the_near_miss_or_all_settings(
    variable: str, hint: str
) -> None:
    (sentence,) = admission.misspelt(
        {variable: "1", "NEMO_PATCHES_SYNC": "local", "NEMO_PATCHES_DISABLE": "1"}
    )
    assert sentence.startswith(
        f"{variable} is not a setting, and has no effect; {hint}"
    )


def test_only_what_is_set_and_begins_like_a_setting_is_misspelt() -> None:
    known = {setting.variable: "x" for setting in ALL_SETTINGS}
    others = {
        "NEMO_PATCHES_TIMEOUTS": "",
        "NEMO_PATCHES": "1",
        "MY_NEMO_PATCHES_TIMEOUTS": "1",
        "PATH": "/",
    }
    assert admission.misspelt({**known, **others}) == []


@pytest.mark.installed
def test_until_settings_are_in_force_the_environments_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from ranks import Said

    from nemo_patches.sync.length_sync import ProcessSync
    from nemo_patches.sync.rank_log import logger

    said = Said()
    process = ProcessSync()
    monkeypatch.setenv("NEMO_PATCHES_TIMEOUT", "3")
    assert process.current().timeout == timedelta(seconds=3)
    monkeypatch.setenv("NEMO_PATCHES_TIMEOUT", "soon")
    assert [process.current(), process.current()] == [Settings(), Settings()]
    (line,) = said.lines
    assert "NEMO_PATCHES_TIMEOUT='soon' is not allowed" in line
    assert line.endswith(f"; using {Settings()}")
    assert not process.has_settings()
    process.use(Settings(sync="local"))
    assert process.has_settings()
    assert process.current() == Settings(sync="local")
    logger.removeHandler(said)
