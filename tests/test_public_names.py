"""The names of `nemo_patches` itself: imported at their first use, and known to type checkers."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from interpreters import CHECKOUT, run
from interpreters import environment as clean_environment

import nemo_patches
from nemo_patches.sync.settings import ALL_SETTINGS

pytestmark = pytest.mark.one_nemo

LAZY = (
    "DriftError",
    "LengthSyncTimeout",
    "MissingRank",
    "SettingsError",
    "Status",
    "StopTogetherError",
    "UnsupportedNeMo",
    "stop_together",
)


@pytest.mark.parametrize("name", LAZY)
def test_a_class_is_there_by_its_name(name: str) -> None:
    assert getattr(nemo_patches, name).__name__ == name
    assert name in dir(nemo_patches)
    assert name in nemo_patches.__all__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(
        AttributeError,
        match="module 'nemo_patches' has no attribute 'LengthSyncTimeouts'",
    ):
        nemo_patches.LengthSyncTimeouts  # noqa: B018
    assert {"apply", "__version__", *LAZY} <= set(dir(nemo_patches))


def test_importing_the_package_imports_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); import nemo_patches;"
        " print(sorted(set(sys.modules) - before))"
    )
    done = run([sys.executable, "-c", program], clean_environment(), cwd=CHECKOUT)
    assert done.stdout == "['nemo_patches']\n", done.stderr


def test_the_keywords_of_apply_are_the_settings() -> None:
    parameters = inspect.signature(nemo_patches.apply).parameters
    assert list(parameters) == [setting.name for setting in ALL_SETTINGS]
    for setting in ALL_SETTINGS:
        assert f"{setting.name}: " in (nemo_patches.apply.__doc__ or "")
        if setting.words and not setting.several:
            words = ", ".join(map(repr, setting.words))
            assert parameters[setting.name].annotation == f"Literal[{words}] | None"


PROGRAM = """
import nemo_patches

try:
    nemo_patches.apply(timeout=3)
except nemo_patches.LengthSyncTimeout as error:
    raised: RuntimeError = error
except (nemo_patches.DriftError, nemo_patches.SettingsError, nemo_patches.UnsupportedNeMo) as refusal:
    reveal_type(refusal)
status: nemo_patches.Status = nemo_patches.status()
ranks: list[nemo_patches.MissingRank] = []
nemo_patches.LengthSyncTimeouts
"""
# What others' packages have is not at issue, and reading torch would take a minute.
CONFIGURATION = """
[mypy]
strict = true
[mypy-torch.*,wrapt.*,msgspec.*,numpy.*]
follow_imports = skip
[mypy-nemo_patches.*]
ignore_errors = true
"""


def test_a_type_checker_knows_the_names_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--no-error-summary",
        "script.py",
    ]
    done = run(
        command,
        clean_environment(CHECKOUT, MYPYPATH=str(CHECKOUT)),
        limit=280,
        cwd=tmp_path,
    )
    refusal, unknown = done.stdout.splitlines()
    assert all(
        name in refusal for name in ("DriftError", "SettingsError", "UnsupportedNeMo")
    )
    assert 'Module has no attribute "LengthSyncTimeouts"' in unknown
