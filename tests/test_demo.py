"""`nemo-patches demo`, run as a person runs it: one real demo, one that is interrupted, and bad
input.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import wait_until

import nemo_patches
from nemo_patches.tools.demo import data
from nemo_patches.tools.diagnose.collect.samples import py_spy

pytestmark = pytest.mark.one_nemo  # `make demo` has one

LIMIT = 600  # seconds, for what takes 30 to 50 on a machine with nothing else to do
DEMO = [sys.executable, "-m", "nemo_patches", "demo"]


def start(
    *arguments: str, temporary: Path, **environment: str
) -> subprocess.Popen[str]:
    """The command in a process group of its own, so that what it leaves behind can be seen."""
    return subprocess.Popen(
        [*DEMO, *arguments],
        env={**os.environ, "TMPDIR": str(temporary), "COLUMNS": "160", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def left_behind(process: subprocess.Popen[str]) -> bool:
    """Whether a process that the ended command started is still there once init had the time to
    reap what has ended.
    """
    for _ in range(150):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True


def refused(*arguments: str, temporary: Path, **environment: str) -> str:
    """The error of a demo that must not start: one line, exit code 2."""
    process = start(*arguments, temporary=temporary, **environment)
    try:
        output, error = process.communicate(timeout=60)
    finally:
        end(process)
    assert (process.returncode, output) == (2, ""), error
    assert error.count("\n") == 1, error
    assert not list(temporary.glob("nemo-patches-demo-*"))
    return error


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a whole demo prints."""
    temporary = tmp_path_factory.mktemp("demo")
    process = start(
        "--seconds", "6", "--record", str(temporary / "demo.svg"), temporary=temporary
    )
    try:
        output, error = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, output + error
        assert error == ""
        assert not left_behind(process)
        assert not list(temporary.glob("nemo-patches-demo-*"))
        picture = (temporary / "demo.svg").read_text()
        assert picture.startswith("<svg ")
        assert "@font-face" not in picture  # nothing is loaded
        assert "Missing: rank 1 of 2" in picture.replace("&#160;", " ")
        yield output
    finally:
        end(process)


def cells(output: str, number: int) -> tuple[str, str]:
    """What the table says of stock and of nemo_patches in a run; a cell goes on in the next lines."""
    (row,) = (row for row in output.split("├") if re.search(rf"│ {number}\. ", row))
    lines = [line.split("│")[2:4] for line in row.splitlines() if line.startswith("│")]
    stock, patched = (
        " ".join(" ".join(column).split()) for column in zip(*lines, strict=True)
    )
    return stock, patched


def logged(output: str, number: int) -> str:
    """What nemo_patches logged in a run, in one line."""
    return " ".join(output.partition(f"nemo_patches logged in {number}: ")[2].split())


def test_it_says_first_what_will_be_seen_and_last_what_to_do_next(output: str) -> None:
    assert output.startswith("Real NeMo on 2 CPU ranks of this machine")
    assert output.index("stock is ended after 6 s") < output.index("importing NeMo")
    assert re.search(
        r"(?s)Next, for your own job:\n.*nemo-patches doctor .*nemo-patches run ",
        output,
    )


def test_stock_waits_for_a_rank_that_stays_away_until_the_demo_ends_it(
    output: str,
) -> None:
    stock, patched = cells(output, 1)
    assert re.fullmatch(
        r"2 of 6 batches; .*; still waiting after 6 s, ended by the demo", stock
    )
    assert re.fullmatch(
        r"6 of 6 batches; longest encoder call \d+\.\d s; completed", patched
    )
    said = logged(output, 1)
    assert re.search(
        r"evaluation call 3: not every rank's length came within [2-9]\.\d\d s", said
    )
    assert "Missing: rank 1 of 2" in said
    assert "read_a_file_that_never_comes (demo/rank.py:" in said


def test_diagnose_names_the_rank_that_stays_away_while_stock_hangs(output: str) -> None:
    said = " ".join(
        output.partition("while stock hung in 1: ")[2]
        .partition("Training losses")[0]
        .split()
    )
    if not py_spy():
        assert "py-spy is not installed" in said
    elif "ptrace" not in said:  # it may not be allowed here
        assert said.startswith(
            "Rank 1: it is in read_a_file_that_never_comes (rank.py:"
        )
        assert (
            "It has not entered all_reduce of the length sync (conformer_encoder.py:"
            in said
        )
        assert "which rank 0 has waited in for " in said


def test_stock_dies_after_the_uneven_validation_and_nemo_patches_completes(
    output: str,
) -> None:
    stock, patched = cells(output, 2)
    longest = re.fullmatch(
        r"3 of 6 steps; longest encoder call ([\d.]+) s; (rank \d died: .*|still"
        r" waiting .*)",
        stock,
    )
    assert longest
    assert float(longest[1]) > 5.5  # that of the stall
    longest = re.fullmatch(
        r"6 of 6 steps; longest encoder call ([\d.]+) s; completed", patched
    )
    assert longest
    assert 1.9 < float(longest[1]) < 5.5
    assert "Training losses that both have: 6 of 6 the same, to the last bit." in output
    assert "training call 2: not every rank's length came" in logged(output, 2)


def test_positional_rows_are_wrong_only_in_stock(output: str) -> None:
    stock, patched = cells(output, 3)
    rows = re.match(r"(\d+) of 1799 positional rows wrong; ", stock)
    assert rows
    assert int(rows[1]) > 900
    assert re.match(r"0 of 1799 positional rows wrong; .*completed$", patched)


def away(temporary: Path) -> bool:
    """Whether a rank of stock is away from the evaluation, and the other hangs."""
    files = temporary.glob("nemo-patches-demo-*/evaluation-stock-rank1.json")
    return any('"is_away": true' in file.read_text() for file in files)


def interrupted(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """To all: Ctrl-C and timeout(1) send it so."""
    assert process.poll() is None
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error == "nemo-patches demo: interrupted; every rank was ended\n"
    assert not left_behind(process)


def test_a_termination_while_nemo_is_imported_leaves_nothing(tmp_path: Path) -> None:
    process = start(temporary=tmp_path)
    try:
        assert process.stdout is not None
        while "importing NeMo" not in process.stdout.readline():
            assert process.poll() is None
        interrupted(process, signal.SIGTERM)
        assert not list(tmp_path.glob("nemo-patches-demo-*"))
    finally:
        end(process)


def test_a_manifest_is_trained_on_and_an_interrupt_ends_every_rank(
    tmp_path: Path,
) -> None:
    soundfile = pytest.importorskip("soundfile")
    numpy = pytest.importorskip("numpy")
    (tmp_path / "audio").mkdir()
    soundfile.write(
        tmp_path / "audio" / "speech.wav",
        numpy.random.default_rng(0).standard_normal(32000) / 10,
        16000,
    )
    manifest = tmp_path / "manifest.json"
    entry = {"audio_filepath": "audio/speech.wav", "duration": 2.0}
    manifest.write_text(
        json.dumps(entry)
        + "\n\n"
        + json.dumps({**entry, "offset": 0.5, "duration": 1.0})
        + "\n"
    )
    process = start("--manifest", str(manifest), "--seconds", "100", temporary=tmp_path)
    try:
        wait_until(lambda: away(tmp_path), LIMIT)
        interrupted(process, signal.SIGINT)
        assert not list(tmp_path.glob("nemo-patches-demo-*"))
    finally:
        end(process)


def manifest_of(durations: list[float], folder: Path) -> Path:
    manifest = folder / "manifest.json"
    lines = [
        json.dumps({"audio_filepath": manifest.name, "duration": duration})
        for duration in durations
    ]
    manifest.write_text("\n".join(lines))
    return manifest


def test_entries_that_are_too_short_are_left_out(tmp_path: Path) -> None:
    entries = data.from_manifest(
        manifest_of([2, 0.4, 0.5, 0, float("nan"), 11], tmp_path)
    )
    assert [entry.duration for entry in entries] == [2, 0.5, 11]


@pytest.mark.parametrize("devices", [2, 5])
def test_entries_are_dealt_out_in_turn_and_cut(devices: int, tmp_path: Path) -> None:
    count = data.BATCH_SIZE * (
        devices * (data.TRAINING_STEPS + data.VALIDATION_BATCHES) + 1
    )
    durations = [1 + number / 100 for number in range(count - 1)] + [11.0]
    data.write_shards(
        data.from_manifest(manifest_of(durations, tmp_path)), devices, tmp_path
    )
    shards = [
        path.read_text()
        for name in ("train", "validation")
        for path in tmp_path.glob(f"{name}-*.json")
    ]
    dealt = [
        json.loads(line)["duration"] for shard in shards for line in shard.splitlines()
    ]
    assert sorted(dealt) == sorted([*durations[:-1], data.LONGEST_AUDIO_S])


def test_a_variable_that_is_not_allowed_is_said_before_anything_starts(
    tmp_path: Path,
) -> None:
    error = refused(temporary=tmp_path, NEMO_PATCHES_STALL_TIMEOUT="soon")
    assert (
        "NEMO_PATCHES_STALL_TIMEOUT='soon' is not allowed; allowed: a number of seconds"
        in error
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--devices", "1"),
            "--devices=1 is not allowed; allowed: a whole number, 2 to 8",
        ),
        (("--seconds", "0"), "--seconds=0 is not allowed; allowed: 3 to 120"),
        (("--seconds", "nan"), "--seconds=nan is not allowed; allowed: 3 to 120"),
    ],
)
def test_settings_that_are_not_allowed(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    assert said in refused(*arguments, temporary=tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "FileNotFoundError: "),
        ("", "no entry of 0.5 s or longer"),
        ("\n{oops}\n", "line 2: JSONDecodeError: "),
        ("[1]", "line 1: TypeError: "),
        (
            '{"duration": 2}',
            (
                "line 1: KeyError: 'audio_filepath'; allowed: a NeMo manifest, a line"
                " for each file: "
            ),
        ),
        (
            '{"audio_filepath": "not/there.wav", "duration": 2}',
            "line 1: FileNotFoundError: ",
        ),
        ('{"audio_filepath": "manifest.json"}', "line 1: KeyError: 'duration'"),
        (
            '{"audio_filepath": "manifest.json", "duration": "long"}',
            "line 1: ValueError: ",
        ),
        (
            '{"audio_filepath": "manifest.json", "duration": 0.1}',
            "no entry of 0.5 s or longer",
        ),
    ],
)
def test_manifests_that_cannot_be_used(
    text: str | None, said: str, tmp_path: Path
) -> None:
    manifest = tmp_path / "manifest.json"
    if text is not None:
        manifest.write_text(text)
    error = refused("--manifest", str(manifest), temporary=tmp_path)
    assert f"--manifest={manifest}" in error
    assert said in error


def test_without_nemo(tmp_path: Path) -> None:
    installed, packages = Path(sysconfig.get_path("purelib")), tmp_path / "packages"
    packages.mkdir()
    for package in [*installed.iterdir(), Path(nemo_patches.__file__).parent]:
        if package.name != "nemo" and not (packages / package.name).exists():
            (packages / package.name).symlink_to(package)
    done = subprocess.run(
        [sys.executable, "-S", *DEMO[1:]],  # -S: only what PYTHONPATH has
        env={**os.environ, "PYTHONPATH": str(packages)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "nemo-patches demo: NeMo is not installed; the demo needs it: pip install"
        " 'nemo_toolkit[asr]'\n"
    )


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys, nemo_patches.cli; sys.exit(bool({'torch', 'nemo', 'numpy'} &"
        " set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
