"""`nemo-patches demo`, run as a person runs it: one real demo, one that is interrupted, and bad input."""

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

import nemo_patches
from nemo_patches.tools.demo import data
from nemo_patches.tools.diagnose.collect.samples import py_spy

pytestmark = pytest.mark.one_nemo  # `make demo` has one

LIMIT = 600  # seconds, for what takes 30 to 50 on a machine with nothing else to do
DEMO = [sys.executable, "-m", "nemo_patches", "demo"]


def start(*arguments: str, temporary: Path, **environment: str) -> subprocess.Popen[str]:
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
    """Whether a process that the ended command started is still there once init had the time to reap what has ended."""
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
    process = start("--seconds", "6", "--record", str(temporary / "demo.svg"), temporary=temporary)
    try:
        output, error = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, output + error
        assert error == ""
        assert not left_behind(process)
        assert not list(temporary.glob("nemo-patches-demo-*"))
        picture = (temporary / "demo.svg").read_text()
        assert picture.startswith("<svg ")
        assert "@font-face" not in picture  # nothing is loaded
        words = picture.replace("&#160;", " ")
        assert "went on with its own length" in words
        for how_far in ("hung after 2 of 6 batches", "completed all 6 batches", "completed all 6 steps"):
            assert how_far in words
        yield output
    finally:
        end(process)


def cells(output: str, name: str) -> list[tuple[str, str]]:
    """The stock and nemo_patches cells of every table row of that name; a cell may go on in the next lines."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    joined: list[list[str]] = []
    for row in rows:
        if row[0] or not joined:
            joined.append(row)
        else:
            joined[-1] = [f"{cell} {more}".strip() for cell, more in zip(joined[-1], row, strict=True)]
    return [(stock, patched) for row, stock, patched in joined if row == name]


def test_it_says_first_what_will_be_seen_and_last_what_to_do_next(output: str) -> None:
    assert output.startswith("What you will see: real NeMo on 2 CPU ranks")
    assert output.index("the demo ends it after 6 s") < output.index("importing NeMo")
    assert re.search(
        r"(?s)Next, for your own job:\n.*nemo-patches doctor .*nemo-patches run .*nemo-patches status", output
    )


def test_stock_waits_for_a_rank_that_stays_away_until_the_demo_ends_it(output: str) -> None:
    away, stayed = cells(output, "rank 0")[0], cells(output, "rank 1")[0]
    assert away == ("2 of 6 batches; still waiting after 6 s, killed", "6 of 6 batches; completed")
    assert stayed == ("2 of 6 batches; stayed away",) * 2
    assert re.search(r"evaluation call 3: rank 0 waited at most \d+\.\d s for rank 1, then went on", output)
    assert "rank 1 (" in output
    assert "read_a_file_that_never_comes (demo/evaluation.py:" in output


def test_diagnose_names_the_rank_that_stays_away_while_stock_hangs(output: str) -> None:
    said = " ".join(output.partition("while it hung:")[2].partition("\n\n")[0].split())
    if not py_spy():
        assert "py-spy is not installed" in said
    elif "ptrace" not in said:  # it may not be allowed here
        assert said.startswith("Rank 1 has not entered all_reduce of the length sync (conformer_encoder.py:")
        assert "which rank 0 has waited in for " in said
        assert "it is in read_a_file_that_never_comes (evaluation.py:" in said


def test_stock_dies_after_the_uneven_validation_and_nemo_patches_completes(output: str) -> None:
    (stock, patched), (other, other_patched) = cells(output, "rank 0")[1], cells(output, "rank 1")[1]
    assert stock.startswith(
        ("3 of 6 steps, 3 of 6 evaluated; died: ", "3 of 6 steps, 3 of 6 evaluated; still waiting ")
    )
    assert other.startswith(
        ("3 of 6 steps, 2 of 4 evaluated; died: ", "3 of 6 steps, 2 of 4 evaluated; still waiting ")
    )
    assert patched == "6 of 6 steps, 6 of 6 evaluated; completed"
    assert other_patched == "6 of 6 steps, 4 of 4 evaluated; completed"


def test_bars_of_one_length_say_how_far_each_run_came(output: str) -> None:
    section = output.partition("How far each came:\n")[2].partition("\n\n")[0]
    rows = [re.split(r" {2,}", line.strip().removeprefix("1. evaluation").strip()) for line in section.splitlines()]
    (*_, stock_away, how_stock_waited), (*_, away, how_away), (*_, stock, how_stock_trained), (*_, whole, how) = rows
    assert (how_stock_waited, how_away) == ("hung after 2 of 6 batches", "completed all 6 batches")
    assert how_stock_trained in ("died after 3 of 6 steps", "hung after 3 of 6 steps")
    assert how == "completed all 6 steps"
    assert away == whole == "━" * len(whole)
    assert abs(len(stock_away) - len(whole) / 3) <= 1
    assert abs(len(stock) - len(whole) / 2) <= 1
    stock_time, patched_time = cells(output, "time")[0]
    assert re.fullmatch(r"\d+ s, (died|hung) after 3 of 6 steps", stock_time)
    assert re.fullmatch(r"\d+ s, completed all 6 steps", patched_time)


def test_losses_equal_stocks(output: str) -> None:
    assert cells(output, "training losses") == [("6", "6 of stock's 6 the same, to the last bit")]


def test_the_encoder_waits_for_a_stalled_rank_only_so_long(output: str) -> None:
    ((stock, patched),) = cells(output, "longest encoder call")
    assert float(stock.removesuffix(" s")) > 5.5
    assert 1.9 < float(patched.removesuffix(" s")) < 5.5
    assert re.search(r"training call 2: rank 0 waited at most \d+\.\d s for rank 1, then went on", output)


def test_positional_rows_are_wrong_only_in_stock(output: str) -> None:
    (rows,) = cells(output, "wrong positional rows, rank 1")
    stock = re.fullmatch(r"(\d+) of 1799", rows[0])
    assert stock
    assert int(stock[1]) > 900
    assert rows[1] == "0 of 1799"


def test_the_summary_is_a_sentence_each(output: str) -> None:
    zeroth, first, second = (line for line in output.splitlines() if line.startswith(("1. ", "2. ", "3. ")))
    assert (
        "stock was still waiting after 6 s, when the demo ended it; with nemo_patches every other rank evaluated on"
        in zeroth
    )
    assert "stock lost the whole job after training step 3; with nemo_patches every rank completed all 6" in first
    assert re.search(r"stock silently has \d+ wrong positional rows; nemo_patches has none", second)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])  # to all: Ctrl-C and timeout(1) send it so
def test_a_manifest_is_trained_on_and_an_interrupt_ends_every_rank(number: signal.Signals, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    numpy = pytest.importorskip("numpy")
    (tmp_path / "audio").mkdir()
    soundfile.write(tmp_path / "audio" / "speech.wav", numpy.random.default_rng(0).standard_normal(32000) / 10, 16000)
    manifest = tmp_path / "manifest.json"
    entry = {"audio_filepath": "audio/speech.wav", "duration": 2.0}
    manifest.write_text(json.dumps(entry) + "\n\n" + json.dumps({**entry, "offset": 0.5, "duration": 1.0}) + "\n")
    process = start("--manifest", str(manifest), "--seconds", "100", temporary=tmp_path)
    try:
        assert process.stdout is not None
        assert (
            process.stdout.readline()
            == f"--manifest={manifest}: the demo needs 34 entries, so it repeats the 2 it has\n"
        )
        for line in process.stdout:  # pytest-timeout bounds this
            if "rank 1 stays away" in line:
                break
        assert process.poll() is None
        os.killpg(process.pid, number)
        _, error = process.communicate(timeout=30)
        assert process.returncode == 130
        assert error == "nemo-patches demo: interrupted; every rank was ended\n"
        assert not left_behind(process)
        assert not list(tmp_path.glob("nemo-patches-demo-*"))
    finally:
        end(process)


def manifest_of(durations: list[float], folder: Path) -> Path:
    manifest = folder / "manifest.json"
    lines = [json.dumps({"audio_filepath": manifest.name, "duration": duration}) for duration in durations]
    manifest.write_text("\n".join(lines))
    return manifest


@pytest.mark.parametrize(
    ("durations", "used", "changes"),
    [
        ([0.5, 2, 10, 2], 4, []),
        ([2, 0.4, 3, 0, 4, 5], 4, ["2 of 6 entries skipped, shorter than 0.5 s"]),
        ([2, 3, 4, 5, 6, 11], 4, ["2 of 6 entries not used, the demo needs only 4"]),
        ([2], 1, ["the demo needs 4 entries, so it repeats the 1 it has"]),
        (
            [11, 0.1, 12, 2],
            3,
            [
                "1 of 4 entries skipped, shorter than 0.5 s",
                "the demo needs 4 entries, so it repeats the 3 it has",
                "2 of 3 entries used only in part, the first 10 s",
            ],
        ),
    ],
)
def test_what_is_not_used_as_the_manifest_has_it_is_said(
    durations: list[float], used: int, changes: list[str], tmp_path: Path
) -> None:
    entries, said = data.from_manifest(manifest_of(durations, tmp_path), needed=4)
    assert (len(entries), said) == (used, changes)


@pytest.mark.parametrize("devices", [2, 5])
def test_every_entry_needed_is_dealt_out_once(devices: int, tmp_path: Path) -> None:
    needed = data.entries_needed(devices)
    entries, _ = data.from_manifest(manifest_of([1 + number / 100 for number in range(needed)], tmp_path), needed)
    data.write_shards(entries, devices, tmp_path)
    shards = [path.read_text() for name in ("train", "validation") for path in tmp_path.glob(f"{name}-*.json")]
    dealt = [json.loads(line)["duration"] for shard in shards for line in shard.splitlines()]
    assert sorted(dealt) == [entry.duration for entry in entries]


def test_a_variable_that_is_not_allowed_is_said_before_anything_starts(tmp_path: Path) -> None:
    error = refused(temporary=tmp_path, NEMO_PATCHES_CALL_TIMEOUT="soon")
    assert "NEMO_PATCHES_CALL_TIMEOUT='soon' is not allowed; allowed: a number of seconds" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--devices", "1"), "--devices=1 is not allowed; allowed: a whole number, 2 to 8"),
        (("--seconds", "0"), "--seconds=0 is not allowed; allowed: 3 to 120"),
        (("--seconds", "nan"), "--seconds=nan is not allowed; allowed: 3 to 120"),
    ],
)
def test_settings_that_are_not_allowed(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in refused(*arguments, temporary=tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory; allowed: a NeMo manifest, one JSON object per line"),
        ("", "no entry of 0.5 s or longer"),
        ("\n{oops}\n", "line 2 is not JSON"),
        ("[1]", "line 1: no audio_filepath"),
        ('{"audio_filepath": "not/there.wav", "duration": 2}', "audio_filepath='not/there.wav': there is no file"),
        ('{"audio_filepath": "manifest.json", "duration": "2"}', "duration='2' is not allowed; allowed: a number of"),
        ('{"audio_filepath": "manifest.json"}', "duration=None is not allowed; allowed: a number of seconds"),
        ('{"audio_filepath": "manifest.json", "duration": 0.1}', "no entry of 0.5 s or longer"),
    ],
)
def test_manifests_that_cannot_be_used(text: str | None, said: str, tmp_path: Path) -> None:
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
        done.stderr == "nemo-patches demo: NeMo is not installed; the demo needs it: pip install 'nemo_toolkit[asr]'\n"
    )


def test_the_command_starts_without_torch() -> None:
    code = "import sys, nemo_patches.cli; sys.exit(bool({'torch', 'nemo', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
