"""`nemo-patches doctor` as a command: what it prints, its exit codes, --fix, and that it is quick."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from interpreters import CHECKOUT, python

from nemo_patches.tools.doctor import command, examination, report
from nemo_patches.tools.doctor.ranks import Ranks
from nemo_patches.tools.doctor.refused import DoctorError
from nemo_patches.tools.doctor.request import Request
from nemo_patches.tools.doctor.rules import all_rules

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

# What NeMo's own NEST config has of this, comments and uneven spaces included; the switch decides
# about NP102.
STOCK = """\
# NEST pre-training
name: nest

model:
  train_ds:
    manifest_filepath: ???   # yours
    batch_size: 8
    num_workers: 8
    max_duration: 60.0
  preprocessor:
    _target_: nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor
  encoder:
    _target_: nemo.collections.asr.modules.ConformerEncoder
    pos_emb_max_len:  5000    # frames
    n_layers: 17
    sync_max_audio_length: ???

trainer:
    # all of them
    devices: 4
    strategy: ddp  # as upstream
"""
CLEAN = STOCK.replace("60.0", "40.0")


def write(folder: Path, text: str, name: str = "nest.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def doctor(
    capfd: pytest.CaptureFixture[str], *arguments: object, **options: Any
) -> tuple[int, str, str]:
    """In this process: the command without its option parser."""
    code = command.carry_out(Request(list(map(str, arguments)), **options))
    return code, *capfd.readouterr()


# --- as a process


def test_it_says_what_where_why_and_what_instead(tmp_path: Path) -> None:
    path = write(tmp_path, STOCK)
    done = python(
        "-m", "nemo_patches", "doctor", str(path), path=(CHECKOUT,), NO_COLOR="1"
    )
    assert done.returncode == 1, done
    assert done.stderr == ""
    head, found, *why, synced, last = done.stdout.splitlines()
    assert head.startswith(f"{path}: ")
    assert found.startswith(f"{path}:16: NP102 warning: ")
    assert [line.partition(": ")[0].strip() for line in why] == [
        "read",
        "instead",
        "why",
    ]
    assert synced.startswith(f"{path}:13: NP101 note: ")
    assert last == f"{path}: 1 warning, 1 note"


def test_as_stock_the_length_sync_is_printed_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is this project's own hang, and the command that mends it is in its lines."""
    text = CLEAN.replace("    sync_max_audio_length: ???\n", "")
    code, out, _ = doctor(capfd, write(tmp_path, text))
    assert code == 0
    (at,) = (
        number for number, line in enumerate(out.splitlines()) if "NP101 note: " in line
    )
    read, instead, why = out.splitlines()[at + 1 : at + 4]
    assert read.startswith("    read: ")
    assert instead.startswith("    instead: `nemo-patches run -- COMMAND`")
    assert why.startswith("    why: ")


def test_severity_is_the_lowest_that_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, STOCK)
    by_default, note, warning = (
        doctor(capfd, path, severity=each)[1] for each in (None, "note", "warning")
    )
    assert by_default == note
    assert "NP101 note" in note
    assert "NP101" not in warning


def test_an_override_may_be_longer_than_the_name_of_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, CLEAN)
    for text in (f"+model.prompt={'x' * 5000}", f"+model.prompt={'a/' * 3000}"):
        code, out, err = doctor(capfd, path, text)
        assert (code, err) == (0, ""), err
        assert out.startswith(f"{path}: judged")
    code, _, err = doctor(capfd, "x" * 5000)
    assert code == 2
    assert err.count("\n") == 1


def test_overrides_and_several_configs(tmp_path: Path) -> None:
    stock, clean = write(tmp_path, STOCK), write(tmp_path, CLEAN, "clean.yaml")
    done = python(
        "-m",
        "nemo_patches",
        "doctor",
        str(clean),
        str(stock),
        "trainer.devices=1",
        path=(CHECKOUT,),
    )
    assert done.returncode == 0, done
    done = python(
        "-m",
        "nemo_patches",
        "doctor",
        str(clean),
        str(tmp_path / "no.yaml"),
        str(stock),
        path=(CHECKOUT,),
    )
    assert done.returncode == 2
    assert str(tmp_path / "no.yaml") in done.stderr
    assert f"{stock}:16: NP102" in done.stdout


def test_it_imports_neither_torch_nor_nemo_and_is_quick(tmp_path: Path) -> None:
    path = write(tmp_path, STOCK)
    program = (
        "import sys\nfrom nemo_patches.tools.doctor import command\nfrom"
        " nemo_patches.tools.doctor.request import Request\ncode ="
        f" command.carry_out(Request(({str(path)!r},)))\nprint(code, [name for name in"
        " ('torch', 'nemo', 'lightning', 'hydra') if name in sys.modules])"
    )
    before = os.times()
    assert python("-c", program, path=(CHECKOUT,)).stdout.endswith("1 []\n")
    after = os.times()  # of the CPU: a busy machine's other work does not count
    took = (
        after.children_user
        + after.children_system
        - before.children_user
        - before.children_system
    )
    assert took < 2 * 3  # 0.3 s
    large = "\n".join(f"    token{number}: {number}" for number in range(45_000))
    path = write(tmp_path, f"model:\n  vocabulary:\n{large}\n")
    before = os.times()
    done = python("-m", "nemo_patches", "doctor", str(path), path=(CHECKOUT,))
    after = os.times()
    assert done.returncode == 0, done
    assert (
        after.children_user
        + after.children_system
        - before.children_user
        - before.children_system
        < 2 * 3 * 2
    )


def test_without_a_config_it_examines_the_variables_of_nccl_and_torch() -> None:
    program = (
        "import sys\nfrom nemo_patches.tools.doctor import command, machine\nfrom"
        " nemo_patches.tools.doctor.request import Request\ncode ="
        " command.carry_out(Request(json=True))\nprint(code,"
        " dict(machine.gather().environment), 'torch' in sys.modules, file=sys.stderr)"
    )
    variables = {"NCCL_ASYNC_ERROR_HANDLING": "0", "SECRET": "not kept"}
    done = python("-c", program, path=(CHECKOUT,), **variables)
    (report_,) = json.loads(done.stdout)
    assert report_["config"] == socket.gethostname()
    assert [(each["rule"], each["severity"]) for each in report_["findings"]] == [
        ("NP208", "error")
    ]
    assert done.stderr == "1 {'NCCL_ASYNC_ERROR_HANDLING': '0'} False\n"


def test_colour_only_on_a_terminal_that_wants_it(tmp_path: Path) -> None:
    path = write(tmp_path, STOCK)
    command_line = [sys.executable, "-m", "nemo_patches", "doctor", str(path)]
    for no_color, coloured in (("", True), ("1", False)):
        ours, theirs = os.openpty()
        variables = {
            **os.environ,
            "PYTHONPATH": str(CHECKOUT),
            "TERM": "xterm",
            "NO_COLOR": no_color,
        }
        process = subprocess.Popen(
            command_line, stdout=theirs, stderr=theirs, env=variables
        )
        os.close(theirs)
        written = b""
        try:
            while chunk := os.read(ours, 65536):
                written += chunk
        except OSError:  # Linux says so when the other end is closed
            pass
        os.close(ours)
        assert process.wait(timeout=60) == 1
        assert (b"\x1b[33mNP102" in written) is coloured, written


def test_a_config_cannot_steer_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = STOCK.replace("strategy: ddp", 'strategy: "ddp\\e[2J\\a\\r"')
    _, out, _ = doctor(capfd, write(tmp_path, text))
    assert "ddp\\x1b[2J\\x07\\r" in out
    assert "\x1b" not in out
    _, _, err = doctor(capfd, tmp_path / "a\x1b[2Jb")
    assert "\x1b" not in err


# --- options


def test_rules_are_listed_and_explained(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = doctor(capfd, list_rules=True)
    assert code == 0
    assert len(out.splitlines()) == len(all_rules())
    assert doctor(capfd, explain="np102")[0] == 0
    assert doctor(capfd, explain="NP1")[0] == 2


def test_rules_are_selected_and_ignored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, STOCK)
    _, out, _ = doctor(capfd, path, select=("NP101",), severity="note")
    assert "NP101" in out
    assert "NP102" not in out
    code, out, _ = doctor(capfd, path, select=("NP1",), ignore=("NP102,np119",))
    assert code == 0
    assert "NP102" not in out


def test_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, STOCK + "b: ${a}\na: ???\n")
    code, out, err = doctor(capfd, path, tmp_path / "no.yaml", json=True)
    assert code == 2
    read, unreadable = json.loads(out)
    assert unreadable["error"] in err
    assert read["config"] == str(path)
    assert read["error"] is None
    finding = read["findings"][0]
    assert (
        finding["rule"],
        finding["severity"],
        finding["line"],
    ) == (
        "NP102",
        "warning",
        16,
    )
    room = {
        "key": "model.encoder.pos_emb_max_len",
        "value": 5000,
        "known": True,
        "origin": "line 14",
    }
    assert room in finding["read"]


def test_json_has_no_infinity(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = STOCK.replace("max_duration: 60.0", "use_lhotse: true")
    off = "model.encoder.sync_max_audio_length=false"
    _, out, _ = doctor(capfd, write(tmp_path, text), off, json=True)
    values = [
        value
        for finding in json.loads(out, parse_constant=pytest.fail)[0]["findings"]
        for value in finding["read"]
    ]
    assert "inf" in [value["value"] for value in values]


def test_a_rule_that_crashes_is_a_finding_and_not_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from nemo_patches.tools.doctor.rules.config import np101_length_sync

    def crash(job: object) -> None:
        raise ZeroDivisionError("as a test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np101_length_sync, "check", crash)
        code, out, _ = doctor(capfd, write(tmp_path, STOCK))
    assert code == 1
    assert "NP001 warning: NP101" in out
    assert "NP102 warning" in out


# --- what is worth a person's time


def test_a_file_that_cannot_be_judged_is_a_line_and_not_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    broken = write(tmp_path, "def f(:\n", "broken.py")
    gone = tmp_path / "gone.py"
    failing = write(tmp_path, hangs, "failing.py")
    good = write(tmp_path, hangs, "good.py")
    read = examination.code.read

    def failing_once(path: Path) -> object:
        if path == failing:
            raise ZeroDivisionError("of the doctor's own")
        return read(path)

    monkeypatch.setattr(examination.code, "read", failing_once)
    paths = [str(each) for each in (broken, gone, failing, good)]
    assert command.carry_out(Request(arguments=paths, quiet=True)) == 2
    said = capfd.readouterr()
    assert "good.py:3: NP401" in said.out
    lines = [line.partition(": ")[2] for line in said.err.splitlines()]
    assert [
        line.startswith(path) for line, path in zip(lines, paths, strict=False)
    ] == [True] * 3
    assert "not Python" in lines[0]
    assert lines[2] == (
        f"{failing}: the doctor failed on it: ZeroDivisionError: of the doctor's own;"
        " please report it, with the file"
    )


def test_severity_is_what_is_shown_and_what_counts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, STOCK)
    code, out, _ = doctor(capfd, path, severity="note")
    assert code == 1
    assert f"{path}:13: NP101 note: " in out
    assert "nearly every config" not in out
    code, out, _ = doctor(capfd, path, severity="warning")
    assert code == 1
    assert "NP101" not in out
    code, out, _ = doctor(capfd, path, severity="error")
    assert code == 0
    assert out.endswith(": nothing\n")


def test_quiet_is_a_line_for_each_finding_and_why_is_said_once_for_a_rule(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [write(tmp_path, STOCK, name) for name in ("a.yaml", "b.yaml")]
    code, out, _ = doctor(capfd, *paths)
    assert code == 1
    assert out.count("    why: ") == 1
    assert "2 warnings, 2 notes" in out
    code, out, _ = doctor(capfd, *paths, quiet=True)
    said = [line.split(": ")[:2] for line in out.splitlines()]
    assert said == [
        [f"{path}:{rule}", word]
        for path in paths
        for rule, word in ((16, "NP102 warning"), (13, "NP101 note"))
    ]
    # What cannot be read is no finding.
    assert doctor(capfd, *paths, tmp_path / "none.yaml", exit_zero=True)[0] == 2
    assert doctor(capfd, *paths, exit_zero=True)[0] == 0


def test_annotations_of_github_and_sarif(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, STOCK, "100%,a.yaml")
    code, out, _ = doctor(capfd, path, tmp_path / "no.yaml", output_format="github")
    assert code == 2
    name = str(path).replace("%", "%25").replace(",", "%2C")
    first, second, third = out.splitlines()
    assert first.startswith(f"::warning file={name},line=16,title=NP102::")
    assert second.startswith(f"::notice file={name},line=13,title=NP101::")
    assert third.startswith(f"::error file={tmp_path / 'no.yaml'}::")
    _, out, _ = doctor(capfd, path, tmp_path / "no.yaml", output_format="sarif")
    (run,) = json.loads(out)["runs"]
    result = run["results"][0]
    assert (result["ruleId"], result["level"]) == ("NP102", "warning")
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 16}
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert set(rules) == {rule.identifier for rule in all_rules()}
    assert (
        rules["NP102"]["helpUri"] == "https://github.com/NVIDIA-NeMo/Speech/pull/3304"
    )
    assert all(
        rule.get("helpUri", "https://").startswith("https://")
        for rule in rules.values()
    )
    # Which has no address.
    assert rules["NP005"]["help"]["text"].endswith(" docs/doctor.md")


def test_each_rule_on_configs_has_an_example_that_it_finds_and_one_mended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rules = [rule for rule in all_rules() if rule.about == "config"]
    assert {rule.identifier for rule in rules if not rule.bad} == {
        "NP001",
    }
    for rule in rules:
        for text, expected in (
            ((rule.bad, True), (rule.good, False)) if rule.bad else ()
        ):
            report_ = examination.examine(write(tmp_path, text), (), rules)
            assert not report_.error, rule.identifier
            said = {
                found.identifier
                for found, finding in report_.findings
                if expected or finding.severity
            }
            assert (rule.identifier in said) is expected, rule.identifier
            # What is mended has no other finding.
            assert expected or not said, rule.identifier
            assert text.splitlines()[0] in doctor(capfd, explain=rule.identifier)[1]


def test_each_rule_on_code_has_an_example_that_it_finds_and_one_mended(
    tmp_path: Path,
) -> None:
    rules = [rule for rule in all_rules() if rule.about == "code"]
    for rule in rules:
        for text, expected in ((rule.bad, True), (rule.good, False)):
            done = examination.examine_code(write(tmp_path, text, "code.py"), rules)
            said = {found.identifier for found, _ in done.findings}
            assert said == (
                {rule.identifier}
                if expected and rule.identifier not in done.unchecked
                else set()
            ), rule


def test_a_check_that_needs_nemo_is_none_without_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "x = 1\n", "code.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, _ = doctor(capfd, path)
    assert code == 0
    assert (
        out.splitlines()[-1]
        == f"{path}: nothing, not checked without NeMo: NP403 and NP408"
    )
    assert json.loads(doctor(capfd, path, json=True)[1])[0]["unchecked"] == [
        "NP403",
        "NP408",
    ]


def test_a_config_against_nemos_own_and_against_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, CLEAN)
    code, out, _ = doctor(capfd, path, against="nest", json=True)
    assert code == 0
    differences = {
        each["key"]: (each["value"], each["there"])
        for each in json.loads(out)[0]["differences"]
    }
    assert differences["model.train_ds.max_duration"] == (40.0, 60.0)
    assert differences["trainer.sync_batchnorm"] == (None, True)
    assert differences["model.encoder.dropout_emb"] == (None, 0.0)
    assert "model.encoder.pos_emb_max_len" not in differences  # is the same
    # Is Lightning's default there.
    assert "trainer.accumulate_grad_batches" not in differences
    assert "model.train_ds.manifest_filepath" not in differences  # does not matter
    _, out, _ = doctor(
        capfd, path, "+trainer.accumulate_grad_batches=4", against="nest", json=True
    )
    expected = {"key": "trainer.accumulate_grad_batches", "value": 4, "there": 1}
    assert expected in json.loads(out)[0]["differences"]
    stock = write(tmp_path, STOCK, "stock.yaml")
    _, out, _ = doctor(capfd, path, against=str(stock), json=True)
    (read,) = json.loads(out)
    assert read["differences"] == [
        {"key": "model.train_ds.max_duration", "value": 40.0, "there": 60.0}
    ]
    for others, options in (((), {}), ((path,), {"ranks": True})):
        assert doctor(capfd, *others, against="nest", **options)[0] == 2


# --- --fix


def fix(
    capfd: pytest.CaptureFixture[str], *arguments: object, write: bool = False
) -> tuple[int, str, str]:
    """write: apply the diff, as `patch` does."""
    code, out, err = doctor(capfd, *arguments, fix=True)
    if write and out:
        path = str(arguments[0])
        command_line = ["patch", "--binary", "--quiet", "--follow-symlinks", path]
        subprocess.run(command_line, input=out.encode(), check=True)
    return code, out, err


def test_fix_prints_a_diff_which_mends_the_config(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, STOCK)
    path.chmod(0o640)
    code, out, _ = fix(capfd, path)
    assert code == 1
    changed = [
        line
        for line in out.splitlines()
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert changed == [
        "-    pos_emb_max_len:  5000    # frames",
        "+    pos_emb_max_len:  6016    # frames",
    ]
    assert path.read_text() == STOCK
    assert fix(capfd, path, write=True)[1] == out
    assert path.read_text() == STOCK.replace("5000", "6016")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["nest.yaml"]
    assert fix(capfd, path)[:2] == (0, "")  # no safe change is left


def test_the_hook_of_pre_commit_runs_as_it_says(tmp_path: Path) -> None:
    import yaml

    (hook,) = yaml.safe_load((CHECKOUT / ".pre-commit-hooks.yaml").read_text())
    name, *options = hook["entry"].split()
    assert (name, hook["language"], hook["additional_dependencies"]) == (
        "nemo-patches",
        "python",
        [".[tools]"],
    )
    path = write(tmp_path, STOCK)
    done = python("-m", "nemo_patches", *options, str(path), path=(CHECKOUT,))
    assert (done.returncode, done.stdout.count("\n")) == (1, 1), done
    assert f"id: {hook['id']}" in (CHECKOUT / "docs" / "doctor.md").read_text()


LHOTSE = """\
model:
  train_ds: {use_lhotse: true, manifest_filepath: ???, shard_seed: 0}
trainer:
    # how many
    devices: 2
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_what_is_not_there_is_put_in_with_the_sections_own_indentation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], newline: str
) -> None:
    text = LHOTSE.replace("manifest_filepath: ???", "manifest_filepath: x")
    path = write(tmp_path, text.replace("\n", newline))
    fix(capfd, path, write=True)
    expected = text.replace(
        "    devices", "    use_distributed_sampler: false\n    devices"
    ).replace("\n", newline)
    assert path.read_bytes().decode() == expected


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (
            STOCK,
            ("model.encoder.pos_emb_max_len=5001",),
            "its value is that of an override",
        ),
        (
            STOCK.replace(" 5000 ", " &room 5000 ") + "other: *room\n",
            (),
            "the text cannot be read after it",
        ),
        (
            (
                "model: {train_ds: {use_lhotse: true, manifest_filepath: x, batch_size:"
                " 8, shard_seed: 0}}\ntrainer: {devices: 4}\n"
            ),
            (),
            "its section is not written line by line",
        ),
    ],
)
def test_a_change_that_would_do_more_than_it_says_is_not_made(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    text: str,
    overrides: tuple[str, ...],
    said: str,
) -> None:
    path = write(tmp_path, text)
    _, out, err = fix(capfd, path, *overrides)
    assert said in err
    assert "write it yourself" in err
    if "pos_emb_max_len" in err:
        assert out == ""


def test_what_two_sections_share_is_not_changed_for_one_of_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = STOCK.replace("  encoder:\n", "  encoder: &shared\n").replace(
        "trainer:", "  teacher: *shared\n\ntrainer:"
    )
    path = write(tmp_path, text)
    _, out, err = fix(capfd, path)
    assert out == ""
    assert err.count("it would change other values, too") == 2


def test_a_section_that_only_an_override_makes_cannot_be_changed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, LHOTSE.partition("trainer:")[0].replace("???", "x"))
    _, out, err = fix(capfd, path, "+trainer.devices=2")
    assert out == ""
    assert "there is no section for it" in err


def test_a_file_without_a_last_newline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path,
        STOCK.replace("    pos_emb_max_len:  5000    # frames\n", "") + "#\n#\n#end",
    )
    _, out, _ = fix(capfd, path)
    assert "+    pos_emb_max_len: 6016\n     _target_" in out
    on = "trainer:\n  devices: 2\n  use_distributed_sampler: "
    lhotse = LHOTSE.partition("trainer:")[0].replace("???", "x") + on
    path = write(tmp_path, f"{lhotse}true")
    _, out, _ = fix(capfd, path, write=True)
    no_newline = "\\ No newline at end of file\n"
    assert out.endswith(
        f"-  use_distributed_sampler: true\n{no_newline}"
        f"+  use_distributed_sampler: false\n{no_newline}"
    )
    assert path.read_text() == f"{lhotse}false"


def test_every_rule_has_its_own_file_of_tests_and_a_complete_docstring() -> None:
    rules = all_rules()
    assert len({rule.identifier for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.finds.endswith("."), rule
        assert rule.why.endswith("."), rule
        assert rule.link.startswith(("https://", "docs/")), rule
        tested = CHECKOUT / "tests" / "doctor" / f"test_{rule.identifier.lower()}.py"
        assert tested.exists() or rule.identifier == "NP001", rule


def test_a_rule_is_in_the_folder_of_what_it_is_about() -> None:
    # The names' third character.
    numbers = {"config": "01", "machine": "2", "ranks": "3", "code": "4"}
    for rule in all_rules():
        assert rule.identifier[2] in numbers[rule.about], (
            f"{rule.identifier} is in {rule.about}/"
        )


def test_json_has_the_fields_of_its_table_and_no_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trainer: {gpus: 4}\nmodel: {}\n")
    printed = json.loads(doctor(capfd, path, json=True, against="nest")[1])[0]
    (finding,) = printed["findings"]
    assert printed["format"] == report.JSON_FORMAT
    ranks = Ranks(1, timedelta(), {}).as_json()
    table = (CHECKOUT / "docs" / "doctor.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, flags=re.MULTILINE))
    assert rows.keys() == printed.keys() | finding.keys() | ranks.keys()
    assert set(re.findall(r"`(\w+)`", rows["read"])) == finding["read"][0].keys()
    (*_, difference) = printed["differences"]
    assert set(re.findall(r"`(\w+)`", rows["differences"])) == difference.keys()
    assert f"| {report.JSON_FORMAT};" in table


def test_an_unknown_rule_is_refused_in_sentences() -> None:
    with pytest.raises(DoctorError, match=r"^no rule 'NP999'.*\.$"):
        examination.named("NP999")
