"""`nemo-patches run`: the command's environment, exit code, signals and terminal are its own."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import LAUNCHER, environment, run

import nemo_patches

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

COMMAND = [sys.executable, "-m", "nemo_patches", "run"]
SHOW = [
    sys.executable,
    "-c",
    "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv, sys.path]))",
]


def shown(
    *arguments: str, path: tuple[Path, ...] = (), **variables: str
) -> tuple[dict[str, str], list[str], list[str]]:
    done = run([*COMMAND, *arguments], environment(*path, **variables))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: tuple[dict[str, str], list[str], list[str]] = tuple(json.loads(done.stdout))
    return found


def test_the_settings_and_our_folder_are_in_the_environment_and_nothing_else_changes() -> (
    None
):
    variables, _, path = shown(
        "--sync", "local", "--timeout", "5", "--on-timeout", "raise", "--", *SHOW
    )
    plain = json.loads(run(SHOW, environment()).stdout)[0]
    assert variables == {
        **plain,
        "NEMO_PATCHES_SYNC": "local",
        "NEMO_PATCHES_TIMEOUT": "5",
        "NEMO_PATCHES_ON_TIMEOUT": "raise",
        "PYTHONPATH": str(LAUNCHER),
    }
    assert path[1] == str(LAUNCHER)


def test_the_users_own_variables_hold_where_no_option_is_given() -> None:
    variables, _, _ = shown(
        "--timeout",
        "5",
        "--",
        *SHOW,
        NEMO_PATCHES_TIMEOUT="7",
        NEMO_PATCHES_SYNC="local",
    )
    assert (variables["NEMO_PATCHES_TIMEOUT"], variables["NEMO_PATCHES_SYNC"]) == (
        "5",
        "local",
    )


def test_the_users_pythonpath_comes_after_ours_as_it_was(tmp_path: Path) -> None:
    variables, _, _ = shown("--", *SHOW, path=(tmp_path / "a", tmp_path / "b"))
    assert variables["PYTHONPATH"].split(os.pathsep) == [
        str(LAUNCHER),
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]
    variables, _, _ = shown("--", *SHOW, PYTHONPATH="")
    assert variables["PYTHONPATH"] == str(LAUNCHER)


def test_every_setting_is_an_option() -> None:
    words = {"sync": "local", "on_timeout": "raise"}
    words |= {"trace": "here", "trace_checks": "cuda"}
    words |= {
        "metrics": "deferred",
        "stop_together": "evaluation",
        "checkpoints": "stock",
    }
    options = {
        name: words.get(name, "7")
        for name in inspect.signature(nemo_patches.apply).parameters
    }
    arguments = [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", value)
    ]
    variables, _, _ = shown(*arguments, "--", *SHOW)
    assert {
        name: variables[f"NEMO_PATCHES_{name.upper()}"] for name in options
    } == options


def test_a_misspelt_variable_is_said_and_the_command_runs() -> None:
    done = run([*COMMAND, "--", "echo", "runs"], environment(NEMO_PATCHES_TIMEOUTS="3"))
    assert (done.stdout, done.stderr) == (
        "runs\n",
        (
            "nemo-patches run: NEMO_PATCHES_TIMEOUTS is not a setting, and has no"
            " effect; did you mean NEMO_PATCHES_TIMEOUT?\n"
        ),
    )


@pytest.mark.parametrize("dashes", [["--"], []])
def test_the_commands_own_options_are_its_own(dashes: list[str]) -> None:
    _, arguments, _ = shown(*dashes, *SHOW, "--sync", "a b", "--help", "--", "-x")
    assert arguments == ["-c", "--sync", "a b", "--help", "--", "-x"]


@pytest.mark.parametrize("code", [0, 1, 2, 77])
def test_the_exit_code_is_the_commands(code: int) -> None:
    assert (
        run([*COMMAND, "--", "sh", "-c", f"exit {code}"], environment()).returncode
        == code
    )


def test_signals_reach_the_command_and_its_end_by_one_is_seen() -> None:
    program = (
        "trap 'echo got it; exit 9' TERM; echo ready; while :; do sleep 0.01; done"
    )
    process = subprocess.Popen(
        [*COMMAND, "--", "sh", "-c", program],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20)[0] == "got it\n"
        assert process.returncode == 9
    finally:
        process.kill()
        process.wait()
    assert (
        run([*COMMAND, "--", "sh", "-c", "kill -KILL $$"], environment()).returncode
        == -signal.SIGKILL
    )


def test_the_command_has_the_signal_dispositions_that_it_would_have_without_us() -> (
    None
):
    show = ["grep", "^SigIgn", "/proc/self/status"]
    assert (
        run([*COMMAND, "--", *show], environment()).stdout
        == run(show, environment()).stdout
    )


def test_disabled_it_says_that_nothing_will_be_patched() -> None:
    done = run([*COMMAND, "--", "echo", "runs"], environment(NEMO_PATCHES_DISABLE="1"))
    assert (done.stdout, done.stderr) == (
        "runs\n",
        "nemo-patches run: NEMO_PATCHES_DISABLE=1: nothing will be patched\n",
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["--", "no-such-command"],
            127,
            "nemo-patches run: no-such-command: No such file",
        ),
        (
            ["--", "", "train.py"],
            127,
            "nemo-patches run: : an empty name is no command",
        ),
        (
            ["--", "/etc/passwd"],
            126,
            "nemo-patches run: /etc/passwd: Permission denied",
        ),
        (
            ["--sync", "quick", "--", "true"],
            2,
            "sync='quick' is not allowed; allowed: 'bounded'",
        ),
        (
            ["--timeout", "soon", "--", "true"],
            2,
            "timeout='soon' is not allowed; allowed: a number of seconds",
        ),
        (
            ["--on-timeout", "x", "--", "true"],
            2,
            "on_timeout='x' is not allowed; allowed: 'fallback', 'raise'",
        ),
        (["--"], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_run_says_why(
    arguments: list[str], code: int, said: str
) -> None:
    done = run([*COMMAND, *arguments], environment())
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_a_checkout_without_the_commands_requirements_says_what_to_install(
    module: str,
) -> None:
    program = (
        f"import runpy, sys; sys.modules[{module!r}] = None;"
        " runpy.run_module('nemo_patches', run_name='__main__')"
    )
    done = run([sys.executable, "-c", program], environment())
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "; the commands need: pip install typer rich" in line
