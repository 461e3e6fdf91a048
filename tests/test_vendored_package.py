"""The __init__.py of our package in a vendored NeMo: with stall/, without it, and with one that does not work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import CHECKOUT, environment, run

from nemo_patches.vendoring import parts

PACKAGE = CHECKOUT / "nemo_patches"
SUBSCRIBER = "SETTINGS = ()\n\ndef subscribe():\n    print('subscribed')\n\ndef stalls():\n    return ('a stall',)\n"
PROGRAM = (
    "import sys\n"
    "missing = ('nemo_patches', 'nemo', 'wrapt', 'typer', 'rich', 'lightning')\n"
    "sys.modules.update(dict.fromkeys(missing))\n"
    "import vendored\n"
    "from vendored import LengthSyncTimeout, bounded_length_sync, counters, stalls\n"
    "print(vendored.__version__, issubclass(LengthSyncTimeout, RuntimeError), counters(), stalls())\n"
)

pytestmark = pytest.mark.one_nemo


@pytest.fixture
def vendored(tmp_path: Path) -> Path:
    """The package under another name, with the core alone."""
    folder = tmp_path / "vendored"
    for path, content in parts.own_files(parts.Part.SYNC).items():
        file = folder / Path(path).relative_to(parts.FOLDER)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def imported(vendored: Path) -> subprocess.CompletedProcess[str]:
    done = run([sys.executable, "-c", PROGRAM], environment(), cwd=vendored.parent)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("left", ["nothing", "Python's cache"])
def test_without_stall_it_tells_no_stalls_and_says_nothing(left: str, vendored: Path) -> None:
    if left != "nothing":
        (vendored / "stall" / "__pycache__").mkdir(parents=True)
    done = imported(vendored)
    assert (done.stdout, done.stderr) == ("0.1.0 True () ()\n", "")


def test_with_stall_it_subscribes_once_and_tells_its_stalls(vendored: Path) -> None:
    (vendored / "stall").mkdir()
    (vendored / "stall" / "__init__.py").write_text("")
    (vendored / "stall" / "subscriber.py").write_text(SUBSCRIBER)
    done = imported(vendored)
    assert (done.stdout, done.stderr) == ("subscribed\n0.1.0 True () ('a stall',)\n", "")


@pytest.mark.parametrize(
    ("subscriber", "problem"),
    [
        (None, "ImportError: cannot import name 'subscriber'"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (SUBSCRIBER.replace("print('subscribed')", "raise OSError('two\\nlines')"), "OSError: two"),
    ],
    ids=["incomplete", "not importable", "not to be subscribed"],
)
def test_a_stall_that_does_not_work_is_said_once_and_breaks_nothing(
    subscriber: str | None, problem: str, vendored: Path
) -> None:
    (vendored / "stall").mkdir()
    (vendored / "stall" / "__init__.py").write_text("")
    if subscriber is not None:
        (vendored / "stall" / "subscriber.py").write_text(subscriber)
    done = imported(vendored)
    assert done.stdout == "0.1.0 True () ()\n"
    assert len(done.stderr.splitlines()) == 1
    assert f"no stall reports: {problem}" in done.stderr and "the length sync works without them" in done.stderr


@pytest.mark.parametrize("has_stall", [False, True], ids=["sync", "sync+stall"])
def test_a_variable_that_has_no_effect_there_is_said_once(has_stall: bool, vendored: Path) -> None:
    if has_stall:
        shutil.copytree(PACKAGE / "stall", vendored / "stall", ignore=shutil.ignore_patterns("__pycache__"))
    names = ("NEMO_PATCHES_TIMEOUT", "NEMO_PATCHES_TIMEOUTS", "NEMO_PATCHES_TRACE", "NEMO_PATCHES_STALL_TIMEOUT")
    variables = dict.fromkeys(names, "3") | {"RANK": "5"}
    program = PROGRAM.replace("'nemo_patches', ", "")
    done = run([sys.executable, "-c", program], environment(**variables), cwd=vendored.parent)
    settings = "SYNC, TIMEOUT, ON_TIMEOUT, CHECKPOINTS" + (", STALL_TIMEOUT, STALL_EXIT, ON_STALL" * has_stall)
    sentences = [
        "NEMO_PATCHES_TIMEOUTS is not a setting, and has no effect; did you mean NEMO_PATCHES_TIMEOUT?",
        f"NEMO_PATCHES_TRACE is not a setting, and has no effect; settings, after NEMO_PATCHES_: {settings}",
    ]
    if not has_stall:  # stall/ alone has that setting
        sentences.insert(
            0, "NEMO_PATCHES_STALL_TIMEOUT is not a setting, and has no effect; did you mean NEMO_PATCHES_TIMEOUT?"
        )
    lines = done.stderr.splitlines()
    assert [line.partition("] ")[2] for line in lines] == sentences
    assert all(" nemo_patches WARNING [rank 5/" in line for line in lines)
