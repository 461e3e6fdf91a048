"""The diffs: that the committed ones carry our folders as they are today, apply and go back, and are told apart."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreters import CHECKOUT, environment, run

from nemo_patches.patching.admission import DIFFS_ONLY, SUPPORTED_SERIES
from nemo_patches.patching.targets import TARGETS
from nemo_patches.vendoring import checkouts, parts

COMMITTED = sorted((CHECKOUT / "patches").glob("*.diff"))
OF_NEMO = [file for file in COMMITTED if file.name.startswith("nemo-")]
OF_OURS = [CHECKOUT / "patches" / f"runtime-{name}.diff" for name in ("sync", "stall")]
PACKAGE = CHECKOUT / "nemo_patches"
WAYS = {
    "git apply": ["git", "apply", "--whitespace=nowarn"],
    "patch -p1": ["patch", "-p1", "--fuzz=0", "--force", "--quiet"],
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the installed NeMo, as a checkout has it."""
    spec = importlib.util.find_spec("nemo")
    assert spec is not None and spec.origin is not None
    folder = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(spec.origin).parent, folder / "nemo", ignore=ignored)
    yield folder
    shutil.rmtree(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def printed(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nemo_patches", "diff", "--nemo", checkout, *options]
    return run(command, environment(), cwd=CHECKOUT)


def apply(way: str, diff: Path, folder: Path, *options: str | Path) -> None:
    # In a repository around it, git would take the paths from that one's root.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    with diff.open("rb") as text:
        subprocess.run([*WAYS[way], *options], cwd=folder, stdin=text, env=outside, check=True, timeout=60)


def test_there_is_one_for_each_series_and_one_for_each_of_our_folders() -> None:
    assert [file.name for file in OF_NEMO] == [f"nemo-{name}.diff" for name in (*DIFFS_ONLY, *SUPPORTED_SERIES)]
    assert set(COMMITTED) == {*OF_NEMO, *OF_OURS}


def test_the_committed_diffs_carry_our_folders_byte_for_byte(tmp_path: Path) -> None:
    alone = {"__init__.py": "vendoring/vendored_package.py", "growth.py": "growth.py", "text.py": "text.py"}
    expected = {name: (PACKAGE / file).read_bytes() for name, file in alone.items()}
    for diff, folders in zip(OF_OURS, parts.FOLDERS.values(), strict=True):
        apply("git apply", diff, tmp_path)
        for folder in folders:
            expected |= {f"{folder}/{path.name}": path.read_bytes() for path in (PACKAGE / folder).glob("*.py")}
        assert files(tmp_path / parts.FOLDER) == expected


@pytest.mark.parametrize("diff", COMMITTED, ids=lambda diff: diff.stem)
def test_a_committed_diff_says_what_it_is_and_touches_only_the_encoders_files(diff: Path) -> None:
    text = diff.read_text()
    above, _, rest = text.partition("\n---\n")
    for field in (
        "Description:",
        "Origin: other, nemo_patches ",
        "Forwarded: no",
        "Last-Update: 20",
        "Applies-To: NeMo ",
    ):
        assert f"\n{field}" in f"\n{above}", field
    series = diff.stem.removeprefix("nemo-") if diff in OF_NEMO else "of every series"
    assert f"Applies-To: NeMo {series}\n" in above + "\n"
    touched = {line.split(" b/")[1] for line in rest.splitlines() if line.startswith("diff --git ")}
    encoders = {target.module.replace(".", "/") + ".py" for target in TARGETS}
    if diff in OF_NEMO:
        assert touched <= encoders
        assert "nemo/collections/asr/modules/conformer_encoder.py" in touched
    else:
        assert all(path.startswith(f"{parts.FOLDER}/") for path in touched)


@pytest.mark.parametrize("stall", [(), (OF_OURS[1],)], ids=["the core alone", "with stall"])
def test_one_git_apply_takes_the_committed_diffs_together_and_out_again(
    stall: tuple[Path, ...], checkout: Path
) -> None:
    before = files(checkout)
    series = ".".join(checkouts.read(checkout).version.split(".")[:2])
    first, *others = (OF_OURS[0], CHECKOUT / "patches" / f"nemo-{series}.diff", *stall)
    chosen = parts.ALL if stall else parts.ALL - {parts.Part.STALL}
    expected = {edit.path: edit.after for edit in checkouts.read(checkout).edits(chosen)}
    apply("git apply", first, checkout, "-", *others)
    try:
        assert files(checkout) == {**before, **expected}
    finally:
        apply("git apply", first, checkout, "-R", "-", *others)
    assert files(checkout) == before


@pytest.mark.parametrize("way", WAYS)
def test_the_printed_diff_applies_and_goes_back_to_the_identical_tree(way: str, checkout: Path, tmp_path: Path) -> None:
    before = files(checkout)
    diff = tmp_path / "nemo.diff"
    diff.write_text(printed(checkout).stdout, newline="")
    expected = {edit.path: edit.after for edit in checkouts.read(checkout).edits()}
    apply(way, diff, checkout)
    try:
        after = files(checkout)
        assert after == {**before, **expected}
        for path in expected:
            compile(after[path], path, "exec")
    finally:
        apply(way, diff, checkout, "-R")
    assert files(checkout) == before


@pytest.fixture
def vendored(checkout: Path, tmp_path: Path) -> Path:
    """The same with the diff applied."""
    folder = tmp_path / "vendored"
    shutil.copytree(checkout, folder)
    for edit in checkouts.read(checkout).edits():
        (folder / edit.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / edit.path).write_bytes(edit.after)
    return folder


def test_a_tree_that_has_it_is_recognised(vendored: Path, tmp_path: Path) -> None:
    done = printed(vendored)
    assert (done.returncode, done.stdout) == (2, "")
    assert "patched already, by nemo_patches 0.1.0" in done.stderr
    done = run([sys.executable, "-m", "nemo_patches", "status"], environment(vendored), cwd=CHECKOUT)
    assert done.returncode == 0, done
    assert "ConformerEncoder.update_max_seq_length: built in by a diff" in done.stdout
    variables = {**environment(vendored), "NEMO_PATCHES_TIMEOUT": "soon"}  # there, the default stands in for it
    done = run([sys.executable, "-m", "nemo_patches", "status"], variables, cwd=CHECKOUT)
    assert done.returncode == 1, done
    on, reason, *_ = done.stdout.splitlines()
    assert on.startswith("on: a diff has built it into this NeMo")
    assert reason.startswith("  NEMO_PATCHES_TIMEOUT='soon' is not allowed; allowed: ")
    assert reason.endswith("; this value is not used")
    done = printed(tmp_path)
    assert done.returncode == 2
    assert "needed is the folder that has nemo/package_info.py" in done.stderr


APPLY = (
    "import {first}\n"
    "import nemo_patches\n"
    "{second}\n"
    "from nemo.collections.asr.modules import ConformerEncoder\n"
    "status = nemo_patches.status()\n"
    "method = ConformerEncoder.update_max_seq_length\n"
    "print([method.__module__, method.__nemo_patches__, hasattr(method.__wrapped__, '__wrapped__')])\n"
    "print(status.patched, {{skipped.reason for skipped in status.skipped}})\n"
)


@pytest.mark.one_nemo
def test_what_is_built_in_asks_for_no_version(vendored: Path) -> None:
    info = vendored / "nemo" / "package_info.py"
    info.write_text(info.read_text() + '__shortversion__ = "2.0.0"\n')
    done = run([sys.executable, "-m", "nemo_patches", "status"], environment(vendored), cwd=CHECKOUT)
    assert done.returncode == 0, done
    program = APPLY.format(first="sys", second="nemo_patches.apply()")
    done = run([sys.executable, "-c", program], environment(vendored), cwd=vendored)
    assert done.returncode == 0, done.stderr
    assert "built in" in done.stdout.splitlines()[-1]


@pytest.mark.one_nemo
@pytest.mark.parametrize("way", ["apply", "auto-apply"])
def test_beside_a_nemo_that_has_it_apply_and_auto_apply_do_nothing_twice_and_say_so(way: str, vendored: Path) -> None:
    by_hand = way == "apply"
    program = APPLY.format(first="sys" if by_hand else "nemo.collections.asr", second="nemo_patches.apply()" * by_hand)
    path = (vendored,) if by_hand else (CHECKOUT, vendored)
    trace = {"NEMO_PATCHES_TRACE": str(vendored / "trace"), "NEMO_PATCHES_METRICS": "deferred"}
    done = run([sys.executable, "-c", program], environment(*path, **trace), cwd=vendored)
    method, status = done.stdout.splitlines()[-2:]
    assert method == "['nemo.collections.asr.modules.conformer_encoder', '0.1.0', False]"
    assert status.startswith("() {'this NeMo has nemo_patches 0.1.0 built in")
    own = [line for line in done.stderr.splitlines() if " nemo_patches " in line]
    assert len(own) == 1 and "nothing to patch: this NeMo has nemo_patches 0.1.0 built in" in own[0]
    assert own[0].endswith(f"; trace={vendored / 'trace'}, metrics=deferred: not available there")
