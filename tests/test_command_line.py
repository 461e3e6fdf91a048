"""The commands as they are typed: every --help, the version, and what is typed wrong."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from interpreters import as_ordinary_user, environment, run

import nemo_patches
from nemo_patches.sync.settings import ALL_SETTINGS
from nemo_patches.tools.console import terminal

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

COMMANDS = ("demo", "run", "status", "diff", "doctor", "diagnose", "stacks")


def typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[object, str, str]:
    """Exit code, standard output and standard error of a command line."""
    monkeypatch.setattr(sys, "argv", ["nemo-patches", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("nemo_patches", run_name="__main__")
    output, error = capsys.readouterr()
    assert "Traceback" not in error
    return ended.value.code, output, error


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_help_says_the_defaults_and_the_choices(
    command: str,
    option: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, output, _ = typed(capsys, monkeypatch, command, option)
    assert code == 0
    # An option that takes a value has it in the first line, before the text.
    options = [
        " ".join(text.split())
        for text in re.split(r"\n  (?=-)", output.partition("Options:")[2])[1:]
    ]
    with_value = [
        text for text in options if re.match(r"--[a-z-]+ (<|\[|[A-Z]+(\.svg)? )", text)
    ]
    assert [
        text
        for text in with_value
        if "[default: " not in text and "[required]" not in text
    ] == []
    counts = {
        "demo": 4,
        "run": len(ALL_SETTINGS),
        "status": 0,
        "diff": 1,
        "doctor": 6,
        "diagnose": 2,
        "stacks": 1,
    }
    assert len(with_value) == counts[command]
    assert "<" not in output  # a type of Python's, such as <list[Path]>


def test_the_choices_of_a_setting_are_in_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, output, _ = typed(capsys, monkeypatch, "run", "-h")
    assert "--sync [bounded|local]" in output
    assert "[default: (10" in output


def test_the_help_has_each_command_in_one_line_and_last_what_to_do_in_a_hang(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, output, _ = typed(capsys, monkeypatch, "--help")
    listed = re.findall(
        r"^  (\w+) +(.*)$", output.partition("Commands:")[2], re.MULTILINE
    )
    summaries = dict(listed[: len(COMMANDS)])
    assert set(summaries) == set(COMMANDS)
    assert [
        text for text in summaries.values() if len(text) > 60 or "..." in text
    ] == []
    assert (
        output.rstrip().splitlines()[-1].strip() == "Job hangs? nemo-patches diagnose"
    )
    assert "--install-completion" in output


def test_the_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"nemo-patches {nemo_patches.__version__}\n"
    assert typed(capsys, monkeypatch, "--version") == (0, said, "")


def bad_inputs(folder: Path) -> dict[str, tuple[str, ...]]:
    """Command lines, each with the words that its one line of error has."""
    empty, binary, missing = folder / "empty", folder / "binary", folder / "missing"
    empty.write_bytes(b"")
    binary.write_bytes(bytes(range(256)) * 8)
    (folder / "nothing").mkdir()
    inputs = {
        "statsu": ("statsu", "status"),
        "--versoin": ("--versoin", "--version"),
        "status --jsn": ("--jsn", "--json"),
        "status more": ("more",),
        "demo --device 2": ("--device", "--devices"),
        "demo --devices two": ("--devices=two", "2 to 8"),
        "demo --devices 2.5": ("--devices=2.5", "2 to 8"),
        "demo --seconds long": ("--seconds=long", "3 to 120"),
        f"demo --record {folder}": (f"--record={folder} is not allowed", ".svg"),
        f"demo --record {missing}/demo.svg": (
            f"--record={missing}/demo.svg is not allowed",
            "folder",
        ),
        "demo --record demo.png": ("--record=demo.png", ".svg"),
        "run": ("COMMAND",),
        "run --sync x -- true": ("sync='x'", "'bounded', 'local'"),
        "run --tiemout 3 -- true": ("--tiemout", "--timeout"),
        "run --trace-checks all -- true": ("trace_checks='all'", "'inputs'"),
        "diff": ("--nemo",),
        "doctor --severity high": ("--severity", "'high'", "note, warning, error"),
        "doctor --output-format xml": ("--output-format", "'xml'", "sarif"),
        "doctor --explain NP999": ("NP999",),
        "doctor --select NP9": ("NP9",),
        "diagnose --job . --pids 1": ("give files", "--job DIR"),
        "diagnose --plot x.png": ("--plot any more", "--html=FILE"),
        "diagnose --pids 1,x": ("--pids=1,x", "with commas"),
        f"diagnose --html {missing}/x.html": (f"--html={missing}/x.html", "folder"),
    }
    for command in ("doctor", "diagnose", "diff --nemo", "demo --manifest"):
        for path in (empty, binary, missing, folder / "nothing", empty / "below"):
            # There it is a log that tells nothing: a report.
            if command != "diagnose" or path not in (empty, binary):
                inputs[f"{command} {path}"] = (str(path),)
    return inputs


def test_what_is_typed_wrong_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = []
    for line, said in bad_inputs(tmp_path).items():
        code, _, error = typed(capsys, monkeypatch, *line.split())
        if (
            code != 2
            or error.count("\n") != 1
            or not all(words in error for words in said)
        ):
            wrong.append(f"{line} -> {code}: {error}")
    assert not wrong, "\n".join(wrong)


def test_a_package_that_is_missing_or_cannot_be_loaded_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object')"
    )
    place = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    command = [sys.executable, "-m", "nemo_patches", "doctor", "--ranks"]
    done = run(
        command,
        environment(tmp_path, Path(nemo_patches.__file__).parent.parent, **place),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr.count("\n")) == (
        2,
        1,
    ) and "libcudart" in done.stderr, done
    for module in ("omegaconf", "msgspec", "numpy", "yaml"):
        for name in [
            name for name in sys.modules if name.startswith("nemo_patches.tools.d")
        ]:
            monkeypatch.delitem(sys.modules, name)
        with monkeypatch.context() as without:
            without.setitem(sys.modules, module, None)
            for command in (("doctor", "missing.yaml"), ("diagnose", "missing")):
                code, _, error = typed(capsys, monkeypatch, *command)
                assert (code, error.count("\n")) == (2, 1), error


def test_output_that_cannot_be_written_is_no_answer_and_no_traceback(
    tmp_path: Path,
) -> None:
    """A full disk, a name that the terminal's encoding has no letters for or is no text, a closed
    output, no width.
    """

    def typed_to(
        line: str, encoding: str, **more: Any
    ) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "nemo_patches", *line.split()]
        variables = {**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "0"}
        return subprocess.run(
            command,
            env=variables,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            timeout=60,
            **more,
        )

    with open("/dev/full", "wb") as full:
        done = typed_to("doctor --list-rules", "utf-8", stdout=full)
    assert (done.returncode, done.stderr) == (
        2,
        b"nemo-patches: standard output: [Errno 28] No space left on device\n",
    )

    text = (
        "model:\n  train_ds: {use_lhotse: true, manifest_filepath: x, batch_size: 8,"
        " shard_seed: 0}\n"
    )
    text += "trainer:  # 多少\n  devices: 4\n"
    for name, encoding in (
        ("配置.yaml", "ascii"),
        (os.fsdecode(b"\xff.yaml"), "utf-8"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        change = " trainer:  # 多少\n+  use_distributed_sampler: false\n   devices: 4\n"
        for option, said in (("--quiet", "NP103"), ("--fix", change)):
            done = typed_to(f"doctor {option} {name}", encoding, stdout=subprocess.PIPE)
            assert (done.returncode, done.stderr) == (1, b"")
            assert said.encode() in done.stdout
    done = typed_to(f"doctor --fix {name}", "ascii", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (1, b"")

    (tmp_path / "train.log").write_text("srun: error: gpu-12: task 3: Out Of Memory\n")
    terminal, end = os.openpty()
    os.set_blocking(terminal, False)
    done = typed_to("diagnose train.log", "utf-8", stdout=end)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"gpu-12: task 3" in os.read(terminal, 1 << 16)
    os.close(terminal)
    os.close(end)


def test_what_may_not_be_read_or_written_is_said(tmp_path: Path) -> None:
    config = (
        "model:\n  train_ds: {use_lhotse: true, manifest_filepath: x, batch_size: 8,"
        " shard_seed: 0}\n"
    )
    config += "trainer:\n  devices: 4\n"
    for name in ("closed.yaml", "kept.yaml"):
        (tmp_path / name).write_text(config)
    (tmp_path / "logs" / "closed").mkdir(parents=True)
    (tmp_path / "logs" / "rank-0.log").write_text("[rank0]: KeyError: 'audio'\n")
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "rank-00000.1T0.7.jsonl").write_text("{}\n")
    modes = {"closed.yaml": 0, "kept.yaml": 0o444, "logs/closed": 0, "traces": 0o444}
    for name, mode in modes.items():
        (tmp_path / name).chmod(mode)
    for line, code, said in (
        ("doctor closed.yaml", 2, "closed.yaml: Permission denied"),
        ("diagnose logs", 1, "not read, or in part: logs/closed: Permission denied"),
        (
            "diagnose traces",
            2,
            "traces/rank-00000.1T0.7.jsonl: Permission denied",
        ),
    ):
        command = as_ordinary_user(
            [sys.executable, "-m", "nemo_patches", *line.split()]
        )
        done = run(
            command,
            environment(Path(nemo_patches.__file__).parent.parent),
            cwd=tmp_path,
        )
        assert done.returncode == code and said in done.stdout + done.stderr, done
    assert (tmp_path / "kept.yaml").read_text() == config
    for name in modes:
        (tmp_path / name).chmod(0o755)


def test_a_shell_completes_commands_and_options() -> None:
    """By what --install-completion writes into the shell's start-up file."""
    for line, last, expected in (
        ("nemo-patches di", 1, ["diff", "diagnose"]),
        ("nemo-patches run --stall", 2, ["--stall-timeout", "--stall-exit"]),
    ):
        asked = {
            "_NEMO_PATCHES_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(last),
        }
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; sys.argv = ['nemo-patches']; from nemo_patches.cli import main; main()",
            ],
            env={**os.environ, **asked},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.split() == expected, done


def test_no_color_leaves_no_style_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    styled = "[bold]a[/] [dim]b[/] [red]c[/]"
    for no_color, expected in (("1", "a b c\n"), ("", None)):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", "xterm-256color")
        written = io.StringIO()
        terminal(80, file=written, force_terminal=True).print(styled)
        assert ("\x1b[" not in written.getvalue()) == bool(expected)
        assert expected is None or written.getvalue() == expected
