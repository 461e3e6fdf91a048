"""`nemo-patches diff --parts`: each part by itself, what needs what, and what an earlier nemo_patches put in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from diff_checkouts import (
    CONFORMER,
    OWN_DIFF,
    RUNTIME,
    assert_refused,
    change,
    commit,
    contents,
    copied_nemo,
    diff,
    git,
    tree,
)
from interpreters import CHECKOUT

from nemo_patches.vendoring import checkouts, diffs
from nemo_patches.vendoring.parts import ALL, Part, parse

pytestmark = pytest.mark.one_nemo
PATCHES = CHECKOUT / "patches"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copied_nemo(tmp_path / "checkout")


def with_parts(checkout: Path, parts: str) -> dict[str, bytes]:
    """What the stock checkout's files become with these parts."""
    edits = checkouts.read(checkout).edits(parse(parts))
    return {**contents(tree(checkout)), **{edit.path: edit.after for edit in edits}}


def test_the_core_alone_then_stall_and_both_out_again_one_by_one(checkout: Path) -> None:
    stock = tree(checkout)
    core, full = with_parts(checkout, "nemo,sync"), with_parts(checkout, "nemo,sync,stall")
    done = diff(checkout, "--apply", "--parts", "sync,nemo")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert f"; put sync into {RUNTIME}" in done.stdout
    assert contents(tree(checkout)) == core
    in_already = "in: nemo and sync, of nemo_patches 0.1.0; not in: stall"
    assert_refused(checkout, "--apply --parts nemo,sync", in_already, code=1)
    assert_refused(checkout, "--reverse --parts stall", in_already, "nothing to take back", code=1)

    done = diff(checkout, "--apply")
    assert (done.exit_code, done.stdout) == (0, f"{checkout}: put stall into {RUNTIME}\n"), done.output
    assert contents(tree(checkout)) == full
    assert_refused(checkout, "--apply --parts stall", "patched already, by nemo_patches 0.1.0", code=1)

    done = diff(checkout, "--reverse", "--parts", "stall")
    assert (done.exit_code, done.stdout) == (0, f"{checkout}: taken out: stall\n"), done.output
    assert contents(tree(checkout)) == core
    assert not (checkout / RUNTIME / "stall").exists()

    done = diff(checkout, "--reverse", "--parts", "nemo")
    assert f"taken out: nemo; its files are as {OWN_DIFF} reversed" in done.stdout, done.output
    assert diff(checkout, "--reverse", "--parts", "sync").exit_code == 0
    assert tree(checkout) == stock
    assert not (checkout / RUNTIME).exists()


def test_our_folders_may_be_there_before_nemo_is_edited(checkout: Path) -> None:
    stock, full = tree(checkout), with_parts(checkout, "nemo,sync,stall")
    assert diff(checkout, "--apply", "--parts", "sync,stall").exit_code == 0
    said = "in: sync and stall, of nemo_patches 0.1.0; not in: nemo"
    assert_refused(checkout, "--apply --parts sync", said, code=1)
    assert diff(checkout, "--apply", "--parts", "nemo").exit_code == 0
    assert contents(tree(checkout)) == full
    assert diff(checkout, "--reverse").exit_code == 0
    assert tree(checkout) == stock


@pytest.mark.parametrize("parts", ["nemo", "stall", "nemo,stall"])
def test_a_part_is_not_put_in_without_what_it_needs(parts: str, checkout: Path) -> None:
    last = parts.split(",")[0]
    said = f"--parts {parts} would leave {last} in without sync, which it needs; allowed is --parts {parts},sync"
    assert_refused(checkout, f"--apply --parts {parts}", said)


@pytest.mark.parametrize("left", ["nemo", "stall"])
def test_what_a_part_needs_is_not_taken_out_under_it(left: str, checkout: Path) -> None:
    assert diff(checkout, "--apply", "--parts", f"sync,{left}").exit_code == 0
    said = f"--parts sync would leave {left} in without sync, which it needs; allowed is --parts sync,{left}"
    assert_refused(checkout, "--reverse --parts sync", said)
    assert diff(checkout, "--reverse", "--parts", f"sync,{left}").exit_code == 0


@pytest.mark.parametrize("parts", ["core", "", "nemo,", "Sync", "nemo sync"])
def test_a_part_that_there_is_not_is_named(parts: str, checkout: Path) -> None:
    word = parts.split(",")[-1]
    done = diff(checkout, f"--parts={parts}")
    said = f"--parts: found {word!r}; allowed are nemo, sync and stall, several of them with commas"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"nemo-patches diff: {said}\n")


def test_the_printed_parts_are_the_printed_whole(checkout: Path, tmp_path: Path) -> None:
    def changes(*options: str) -> list[bytes]:
        """By file; above them is the header."""
        return diff(checkout, *options).stdout_bytes.split(b"\ndiff --git ")[1:]

    each = [change.rstrip(b"\n") for part in Part for change in changes("--parts", part.value)]
    assert sorted(each) == sorted(change.rstrip(b"\n") for change in changes())
    assert all(len(changes("--parts", part.value)) > 1 for part in Part)
    assert diff(checkout, "--apply", "--parts", "nemo,sync").exit_code == 0
    left = changes()  # what is not in yet
    assert left and all(change.startswith(f"a/{RUNTIME}/stall/".encode()) for change in left)


def test_the_header_says_which_parts_it_is_and_what_they_need(checkout: Path) -> None:
    header = diff(checkout, "--parts", "nemo").stdout.partition("\n---\n")[0]
    assert "bounded in time: nemo\n" in header and "sync (runtime-sync.diff)" in header
    header = diff(checkout).stdout.partition("\n---\n")[0]
    assert "bounded in time: nemo, sync and stall\n" in header


def test_the_committed_diffs_are_recognised_whichever_git_applied(checkout: Path) -> None:
    commit(checkout)
    stock, full = tree(checkout), with_parts(checkout, "nemo,sync,stall")
    git(checkout, "apply", "--whitespace=nowarn", str(PATCHES / "runtime-sync.diff"), str(PATCHES / OWN_DIFF))
    assert diff(checkout, "--apply", "--parts", "stall").exit_code == 0
    assert contents(tree(checkout)) == full
    git(checkout, "apply", "-R", str(PATCHES / "runtime-stall.diff"))
    done = diff(checkout, "--reverse")
    assert "as in the last commit" in done.stdout, done.output
    assert tree(checkout) == stock


def test_check_speaks_of_each_part_that_is_not_in(checkout: Path) -> None:
    version = checkouts.read(checkout).version
    says = f"applies to this NeMo {version}, and gives what `nemo-patches diff` gives\n"
    names = (OWN_DIFF, "runtime-sync.diff", "runtime-stall.diff")
    assert diff(checkout, "--check").stdout == "".join(f"{name} {says}" for name in names)
    assert diff(checkout, "--check", "--parts", "stall,nemo").stdout == f"{names[0]} {says}{names[2]} {says}"
    assert diff(checkout, "--apply", "--parts", "nemo,sync").exit_code == 0
    assert diff(checkout, "--check").stdout == f"{names[2]} {says}"
    assert_refused(checkout, "--check --parts sync", "in: nemo and sync", "--reverse takes it out, to files", code=1)


def test_check_tells_a_committed_part_of_another_nemo_patches(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(PATCHES, tmp_path / "patches")
    change(tmp_path / "patches" / "runtime-sync.diff", '\n+__version__ = "0.1.0"', '\n+__version__ = "0.0.9"')
    monkeypatch.setattr(diffs, "COMMITTED", tmp_path / "patches")
    said = "runtime-sync.diff would apply, but gives something else; `nemo-patches diff "
    assert_refused(checkout, "--check", said, code=1)
    (tmp_path / "patches" / "runtime-sync.diff").unlink()
    assert_refused(checkout, "--check", "this copy of nemo_patches has no committed diffs with it")


def test_what_an_earlier_nemo_patches_put_in_is_said_and_left(checkout: Path) -> None:
    """Its files lay in our folder itself, and NeMo's files imported them from there."""
    for edit in checkouts.read(checkout).edits(ALL - {Part.STALL}):
        place = checkout / RUNTIME / Path(edit.path).name if edit.path.startswith(RUNTIME) else checkout / edit.path
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(edit.after.replace(b"nemo_patches import", b"nemo_patches.encoder_methods import"))
    (checkout / RUNTIME / "__init__.py").write_text('__version__ = "0.1.0"\n')
    said = (
        f"patched by an earlier nemo_patches, 0.1.0, which had all its files in {RUNTIME} itself",
        "; take it out with the diff that was applied: git apply -R FILE",
    )
    for options in ("", "--apply", "--apply --parts sync", "--parts stall", "--reverse"):
        assert_refused(checkout, options, *said)
    assert_refused(checkout, "--check", *said, "--reverse would refuse", code=1)


def test_stall_without_sync_is_partly_in(checkout: Path) -> None:
    stock = tree(checkout)
    git(checkout, "apply", "--whitespace=nowarn", str(PATCHES / "runtime-stall.diff"))
    for options in ("", "--apply", "--apply --parts sync"):
        assert_refused(checkout, options, f"partly patched: {RUNTIME}/stall have it, {CONFORMER}, ", "/sync lack it")
    assert diff(checkout, "--reverse").exit_code == 0
    assert tree(checkout) == stock


def test_a_part_that_fails_half_way_is_put_back(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert diff(checkout, "--apply", "--parts", "nemo,sync").exit_code == 0
    before, replace, names = tree(checkout), Path.replace, list[str]()

    def failing(self: Path, target: Any) -> Path:
        names.append(self.name)
        if len(names) == 3:
            raise OSError(5, "Input/output error")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", failing)
        done = diff(checkout, "--apply")
    assert done.stderr == f"nemo-patches diff: {checkout}: Input/output error; nothing was changed\n"
    assert tree(checkout) == before
    assert not (checkout / RUNTIME / "stall").exists()


def test_a_link_for_one_of_our_folders_is_refused(checkout: Path, tmp_path: Path) -> None:
    assert diff(checkout, "--apply", "--parts", "nemo,sync").exit_code == 0
    (tmp_path / "elsewhere").mkdir()
    (checkout / RUNTIME / "stall").symlink_to(tmp_path / "elsewhere")
    assert_refused(checkout, "--apply", f"{checkout / RUNTIME / 'stall'} is a symbolic link to {tmp_path}")
    assert list((tmp_path / "elsewhere").iterdir()) == []
