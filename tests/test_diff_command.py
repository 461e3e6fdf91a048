"""`nemo-patches diff` on real checkouts, with real git: what it prints, checks, applies, reverses, and refuses."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transcripts
from diff_checkouts import (
    CONFORMER,
    CONV,
    OWN_DIFF,
    RUNTIME,
    SITE,
    assert_refused,
    change,
    commit,
    contents,
    copied_nemo,
    diff,
    git,
    tree,
)
from interpreters import CHECKOUT, as_ordinary_user, environment, run

from nemo_patches.patching.targets import TARGETS
from nemo_patches.vendoring import checkouts, diffs, parts
from nemo_patches.vendoring.edit import path_of

one_nemo = pytest.mark.one_nemo
CLASS = "class ConformerEncoder("
REDUCED = "            seq_length = global_max_len.int().item()\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copied_nemo(tmp_path / "checkout")


def outside(checkout: Path) -> None:
    pass


def root(checkout: Path) -> None:
    commit(checkout)


def below(checkout: Path) -> None:
    commit(checkout.parent)


def ignored(checkout: Path) -> None:
    """As an environment's site-packages is in a project's repository."""
    (checkout.parent / ".gitignore").write_text("checkout/\n")
    commit(checkout.parent)


PLACES = [outside, root, below, ignored]


@pytest.mark.parametrize("place", PLACES)
def test_in_every_kind_of_place_it_is_checked_applied_and_reversed_to_the_identical_tree(
    place: Callable[[Path], None], checkout: Path
) -> None:
    (checkout / CONFORMER).chmod(0o640)
    (checkout / CONV).chmod(0o755)
    place(checkout)
    stock = tree(checkout)

    done = diff(checkout, "--check")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert done.stdout.startswith(f"{OWN_DIFF} applies to this NeMo ")
    assert diff(checkout).exit_code == 0
    assert_refused(checkout, "--reverse", "not patched, so there is nothing to take back", code=1)
    planned = {edit.path: edit.after for edit in checkouts.read(checkout).edits()}
    assert tree(checkout) == stock

    done = diff(checkout, "--apply")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert CONFORMER in done.stdout and RUNTIME in done.stdout
    patched = tree(checkout)
    assert contents(patched) == {**contents(stock), **planned}
    assert {path: patched[path][0] for path in stock} == {path: mode for path, (mode, _) in stock.items()}

    said = "patched already, by nemo_patches 0.1.0"
    assert_refused(checkout, "", said)
    assert_refused(checkout, "--apply", said, code=1)
    assert_refused(checkout, "--check", said, "--reverse takes it out", code=1)

    (checkout / RUNTIME / "__pycache__").mkdir()
    (checkout / RUNTIME / "__pycache__" / "settings.cpython-311.pyc").write_bytes(b"")
    done = diff(checkout, "--reverse")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert ("as in the last commit" if place in (root, below) else f"as {OWN_DIFF} reversed") in done.stdout
    assert tree(checkout) == stock
    assert not (checkout / RUNTIME).exists()


def test_what_git_applied_is_reversed_and_the_other_way_round(checkout: Path, tmp_path: Path) -> None:
    commit(checkout)
    stock = tree(checkout)
    file = tmp_path / "own.diff"
    file.write_bytes(diff(checkout).stdout_bytes)
    git(checkout, "apply", "--whitespace=nowarn", str(file))
    assert diff(checkout, "--reverse").exit_code == 0
    assert tree(checkout) == stock
    assert diff(checkout, "--apply").exit_code == 0
    git(checkout, "apply", "-R", str(file))
    assert tree(checkout) == stock


@one_nemo
def test_a_cache_that_git_left_behind_is_no_patch(checkout: Path) -> None:
    cache = checkout / RUNTIME / "__pycache__"
    cache.mkdir(parents=True)
    (cache / "settings.cpython-311.pyc").write_bytes(b"")
    for options in ([], ["--check"], ["--apply"], ["--reverse"]):
        assert diff(checkout, *options).exit_code == 0
    assert not (checkout / RUNTIME).exists()


@one_nemo
def test_what_somebody_else_put_in_the_folder_stays(checkout: Path) -> None:
    assert diff(checkout, "--apply").exit_code == 0
    (checkout / RUNTIME / "notes.txt").write_text("mine")
    assert diff(checkout, "--reverse").exit_code == 0
    assert [path.name for path in (checkout / RUNTIME).iterdir()] == ["notes.txt"]


@one_nemo
@pytest.mark.parametrize("place", [root, below])
def test_uncommitted_changes_are_said_and_kept(
    place: Callable[[Path], None], checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(checkout)
    (checkout / "nemo" / "package_info.py").open("a").write("# not a file of the diff\n")
    assert diff(checkout, "--check").stderr == ""
    change(checkout / CONFORMER, "\nimport math\n", "\nimport math\nimport cmath\n")
    change(checkout / CONV, CLASS.replace("ConformerEncoder", "ConvASREncoder"), "\nclass ConvASREncoder(")
    git(checkout, "add", CONV)
    dirty = tree(checkout)
    assert_refused(checkout, "--reverse", "nothing to take back", code=1)  # and no more is said
    # As in a hook of another repository.
    (tmp_path / "another").mkdir()
    commit_less = git(tmp_path / "another", "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another" / ".git") + commit_less)
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    for options in ([], ["--check"], ["--apply"]):
        index = (checkout if place is root else checkout.parent) / ".git" / "index"
        written = index.stat().st_mtime_ns
        done = diff(checkout, *options)
        assert done.exit_code == (options == ["--check"]), done.output  # its lines are no longer where they were
        assert f"uncommitted changes in {CONFORMER}, {CONV}\n" in done.stderr
        assert index.stat().st_mtime_ns == written
    done = diff(checkout, "--reverse")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert tree(checkout) == dirty


@one_nemo
def test_a_repository_that_git_will_not_read_is_said(checkout: Path) -> None:
    commit(checkout)
    (checkout / ".git" / "index").write_bytes(b"no index")
    done = diff(checkout, "--check")
    assert done.exit_code == 0, done.output
    assert "uncommitted changes cannot be told: " in done.stderr and len(done.stderr.splitlines()) == 1


@one_nemo
@pytest.mark.parametrize("place", [outside, root])
def test_carriage_returns_stay(place: Callable[[Path], None], checkout: Path) -> None:
    for path in (CONFORMER, CONV):
        (checkout / path).write_bytes((checkout / path).read_bytes().replace(b"\n", b"\r\n"))
    place(checkout)
    stock = tree(checkout)
    assert_refused(checkout, "--check", f"{OWN_DIFF} does not apply", "makes one for it", code=1)
    assert diff(checkout, "--apply").exit_code == 0
    assert diff(checkout, "--reverse").exit_code == 0
    assert tree(checkout) == stock


@one_nemo
def test_carriage_returns_that_git_put_there_come_back_too(checkout: Path) -> None:
    commit(checkout)
    git(checkout, "config", "core.autocrlf", "true")
    git(checkout, "rm", "-q", "--cached", "-r", ".")
    git(checkout, "reset", "-q", "--hard")
    stock = tree(checkout)
    assert b"\r\n" in stock[CONFORMER][1]
    assert diff(checkout, "--apply").exit_code == 0
    done = diff(checkout, "--reverse")
    assert "as in the last commit" in done.stdout, done.output
    assert tree(checkout) == stock


@one_nemo
def test_the_other_name_of_a_hard_link_keeps_its_content(checkout: Path, tmp_path: Path) -> None:
    """As uv installs: the other name is in a cache that every environment shares."""
    cached = {path: tmp_path / Path(path).name for path in (CONFORMER, CONV)}
    for path, cache in cached.items():
        cache.hardlink_to(checkout / path)
    stock = tree(checkout)
    for option in ("--apply", "--reverse"):
        assert diff(checkout, option).exit_code == 0
        for path, cache in cached.items():
            assert cache.read_bytes() == stock[path][1]
            assert cache.stat().st_nlink == 1
    assert tree(checkout) == stock


@one_nemo
@pytest.mark.parametrize("part", [CONFORMER, "nemo/collections/asr/modules", "nemo"])
def test_nothing_is_written_through_a_symbolic_link(part: str, checkout: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    said = f"{checkout / part} is a symbolic link to {elsewhere}"

    def linked() -> None:
        (checkout / part).rename(elsewhere)
        (checkout / part).symlink_to(elsewhere)

    linked()
    assert_refused(checkout, "--check", said, code=1)
    kept = (SITE / CONFORMER).read_bytes()
    assert_refused(checkout, "--apply", said)
    assert (checkout / CONFORMER).read_bytes() == kept and not (checkout / RUNTIME).exists()
    (checkout / part).unlink()
    elsewhere.rename(checkout / part)
    assert diff(checkout, "--apply").exit_code == 0
    linked()
    kept = (checkout / CONFORMER).read_bytes()
    assert_refused(checkout, "--reverse", said)
    assert (checkout / CONFORMER).read_bytes() == kept and (checkout / RUNTIME / "sync" / "settings.py").exists()


@one_nemo
def test_a_link_for_the_runtimes_folder_is_refused(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (checkout / RUNTIME).symlink_to(tmp_path / "elsewhere")
    assert_refused(checkout, "--apply", f"{checkout / RUNTIME} is a symbolic link to {tmp_path / 'elsewhere'}")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@one_nemo
def test_a_checkout_may_be_reached_by_a_symbolic_link(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(checkout)
    stock = tree(checkout)
    assert diff(tmp_path / "link", "--apply").exit_code == 0
    assert diff(tmp_path / "link", "--reverse").exit_code == 0
    assert tree(checkout) == stock


def diff_of_ordinary_user(checkout: Path, option: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, "-m", "nemo_patches", "diff", "--nemo", checkout]
    return run(as_ordinary_user([*command, *filter(None, [option])]), environment(CHECKOUT), cwd=checkout)


@one_nemo
@pytest.mark.parametrize("option", ["--apply", "--reverse"])
@pytest.mark.parametrize("part", [CONV, str(Path(CONV).parent), RUNTIME])
def test_where_it_may_not_write_nothing_is_changed(part: str, option: str, checkout: Path) -> None:
    if option == "--reverse":
        assert diff(checkout, "--apply").exit_code == 0
    (checkout / part).mkdir() if not (checkout / part).exists() else None
    before = tree(checkout)
    mode = (checkout / part).stat().st_mode
    (checkout / part).chmod(0o444 if part == CONV else 0o555)
    try:
        done = diff_of_ordinary_user(checkout, option)
    finally:
        (checkout / part).chmod(mode)  # the folder is as it was, though empty
    assert done.returncode == 2, done
    problem = rf"{Path(part).name}\S*( is read-only|: Permission denied); nothing was changed"
    assert re.search(rf"^nemo-patches diff: \S*{problem}$", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert tree(checkout) == before


@one_nemo
@pytest.mark.parametrize("option", ["", "--check", "--apply", "--reverse"])
def test_what_cannot_be_read_is_named(option: str, checkout: Path) -> None:
    (checkout / CONV).chmod(0)
    done = diff_of_ordinary_user(checkout, option)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr == f"nemo-patches diff: {checkout / CONV}: Permission denied\n"


@one_nemo
@pytest.mark.parametrize(
    ("option", "step", "nth"),
    [("--apply", "replace", 0), ("--apply", "replace", 10), ("--reverse", "replace", 1), ("--reverse", "unlink", 4)],
)
@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=type)
def test_what_fails_half_way_is_put_back(
    option: str, step: str, nth: int, failure: BaseException, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if option == "--reverse":
        assert diff(checkout, "--apply").exit_code == 0
    before = tree(checkout)
    real, calls = getattr(Path, step), []

    def failing(self: Path, *arguments: Any) -> Any:
        calls.append(self)
        if len(calls) == nth + 1:
            raise failure
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Path, step, lambda self, *a, **k: real(self, *a, **k) if k else failing(self, *a))
        done = diff(checkout, option)
    assert len(calls) > nth
    assert done.exit_code == (2 if isinstance(failure, OSError) else 130), done.output
    if isinstance(failure, OSError):
        assert done.stderr == f"nemo-patches diff: {checkout}: Input/output error; nothing was changed\n"
    assert tree(checkout) == before
    assert (checkout / RUNTIME).exists() == (option == "--reverse")


@one_nemo
@pytest.mark.parametrize("place", [outside, root])
def test_what_is_killed_half_way_is_repaired_without_a_trace_of_it(
    place: Callable[[Path], None], checkout: Path
) -> None:
    """Under a umask that would keep NeMo from all others. What a process of another host has there stays."""
    place(checkout)
    elsewhere = (checkout / RUNTIME).parent / f".a.py.nemo_patches-elsewhere-{1 << 30}"
    elsewhere.touch()
    before = tree(checkout)
    program = (
        "import itertools, os, pathlib, sys\n"
        "from nemo_patches import cli\n"
        "os.umask(0o077)\n"
        "real, calls = pathlib.Path.replace, itertools.count()\n"
        "pathlib.Path.replace = lambda *a: os.kill(os.getpid(), 9) if next(calls) == 5 else real(*a)\n"
        "sys.argv = ['nemo-patches', 'diff', '--apply', '--nemo', sys.argv[1]]\n"
        "cli.main()\n"
    )
    assert run([sys.executable, "-c", program, checkout], environment(CHECKOUT)).returncode == -9
    assert len(left_in(checkout)) > 30 and "partly patched" in diff(checkout, "--check").stderr
    assert diff(checkout, "--reverse").exit_code == 0
    assert tree(checkout) == before and not (checkout / RUNTIME).exists()
    elsewhere.unlink()

    assert (
        run([sys.executable, "-c", program.replace("== 5", "== 500"), checkout], environment(CHECKOUT)).returncode == 0
    )
    place_of_ours = checkout / RUNTIME
    modes = {stat.S_IMODE(path.stat().st_mode) for path in place_of_ours.rglob("*.py")}
    assert modes == {stat.S_IMODE((checkout / "nemo/package_info.py").stat().st_mode)}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (place_of_ours, *place_of_ours.glob("s*/"))}
    assert modes == {stat.S_IMODE(place_of_ours.parent.stat().st_mode)}
    assert left_in(checkout) == []


def left_in(checkout: Path) -> list[Path]:
    """Files that were to take another's name."""
    return list(checkout.rglob(".*.nemo_patches-*"))


@one_nemo
def test_a_full_disk_leaves_nothing_half_written(checkout: Path) -> None:
    before = tree(checkout)
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from nemo_patches.vendoring import checkouts, errors, replacement\n"
        "checkout = Path(sys.argv[1])\n"
        "found = checkouts.read(checkout)\n"
        "before, after = found.files, {edit.path: edit.after for edit in found.edits()}\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "try:\n"
        "    replacement.replace(checkout, before, after)\n"
        "except errors.DiffError as error:\n"
        "    print(error)\n"
    )
    done = run([sys.executable, "-c", program, checkout], environment(CHECKOUT))
    assert done.stdout == f"{checkout}: File too large; nothing was changed\n", done
    assert tree(checkout) == before


@one_nemo
@pytest.mark.parametrize("place", [outside, root])
@pytest.mark.parametrize("part", ["a part of the runtime", "an encoder more", "only the encoders"])
def test_a_patch_that_is_partly_in_is_recognised_and_taken_back(
    part: str, place: Callable[[Path], None], checkout: Path
) -> None:
    """As after a kill between two files."""
    place(checkout)
    stock = tree(checkout)
    edits = checkouts.read(checkout).edits()
    encoders = [edit for edit in edits if edit.before is not None]
    runtime = [edit for edit in edits if edit.before is None]
    chosen = {
        "a part of the runtime": runtime[2:5],
        "an encoder more": [*runtime, encoders[1]],
        "only the encoders": encoders,
    }[part]
    for edit in chosen:
        (checkout / edit.path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / edit.path).write_bytes(edit.after)
    having = RUNTIME if part != "only the encoders" else CONFORMER
    lacking = CONFORMER if part != "only the encoders" else RUNTIME
    said = re.escape("partly patched: ") + f".*{having}.* have it, .*{lacking}.* lack it"
    for option, code in (("", 2), ("--apply", 2), ("--check", 1)):
        assert_refused(checkout, option, "partly patched", code=code)
        assert re.search(said, diff(checkout, option).stderr)
    done = diff(checkout, "--reverse")
    assert done.exit_code == 0, done.output
    assert tree(checkout) == stock
    assert not (checkout / RUNTIME).exists()


def changed_by_hand(checkout: Path) -> None:
    change(checkout / RUNTIME / "sync" / "settings.py", "SYNC_MODES =", "# mine\nSYNC_MODES =")


def another_version(checkout: Path) -> None:
    change(checkout / RUNTIME / "sync" / "__init__.py", '__version__ = "0.1.0"', '__version__ = "0.0.9"')
    (checkout / RUNTIME / "sync" / "settings.py").unlink()


def a_file_more(checkout: Path) -> None:
    (checkout / RUNTIME / "settings_of_mine.py").write_text("")


@one_nemo
@pytest.mark.parametrize(
    ("changed", "names"),
    [
        (changed_by_hand, "0.1.0's: sync/settings.py"),
        (another_version, "0.1.0's: sync/__init__.py, sync/settings.py"),
        (a_file_more, "0.1.0's: settings_of_mine.py"),
    ],
)
def test_a_runtime_that_is_not_this_ones_is_named_and_left(
    changed: Callable[[Path], None], names: str, checkout: Path
) -> None:
    commit(checkout)
    assert diff(checkout, "--apply").exit_code == 0
    changed(checkout)
    by = "0.0.9" if changed is another_version else "0.1.0"
    said = (f"patched already, by nemo_patches {by}; ", names)
    assert_refused(checkout, "", *said)
    assert_refused(checkout, "--apply", *said)
    assert_refused(checkout, "--check", *said, "--reverse would refuse", code=1)
    assert_refused(checkout, "--reverse", *said, "git apply -R FILE")


IMPORT = "from nemo.collections.asr.parts.submodules.causal_convs import"
NEAR = [
    (CLASS, f"# ours\n{CLASS}"),
    (IMPORT, f"# ours\n{IMPORT}"),
    ("        # Find global max audio length across all nodes\n", "        # ours\n"),
]


@pytest.mark.parametrize("place", PLACES)
def test_changes_beside_the_length_sync_come_back_with_it(place: Callable[[Path], None], checkout: Path) -> None:
    place(checkout)
    for old, new in NEAR:
        change(checkout / CONFORMER, old, new)
    changed = tree(checkout)
    assert diff(checkout, "--apply").exit_code == 0
    assert diff(checkout, "--reverse").exit_code == 0
    assert tree(checkout) == changed


@one_nemo
def test_changes_within_the_reduce_come_back_only_from_a_commit(checkout: Path) -> None:
    change(checkout / CONFORMER, REDUCED, f"            # ours\n{REDUCED}")
    said = "as nemo-", "reversed gives them, without what is in", CONFORMER, "now; keep it, and apply it with git"
    assert_refused(checkout, "--apply", *said)
    commit(checkout)
    changed = tree(checkout)
    assert diff(checkout, "--apply").exit_code == 0
    assert "as in the last commit" in diff(checkout, "--reverse").stdout
    assert tree(checkout) == changed
    change(checkout / CONFORMER, "            # ours\n", "            # ours, and not committed\n")
    before = tree(checkout)
    done = diff(checkout, "--apply")
    assert done.exit_code == 2
    assert "--reverse would give its files as in the last commit, without what is in" in done.stderr
    assert tree(checkout) == before


@one_nemo
def test_an_encoder_that_a_fork_has_moved_is_said_to_keep_its_reduce(checkout: Path) -> None:
    (checkout / CONFORMER).rename((checkout / CONFORMER).with_name("our_encoder.py"))
    for option in ("", "--apply"):
        done = diff(checkout, option)
        assert done.exit_code == 0 and CONV in done.stdout
        assert done.stderr.startswith(f"nemo-patches diff: {checkout}: not here, although NeMo ")
        assert f" has it: {CONFORMER}; if it was moved, its reduce stays\n" in done.stderr


@one_nemo
def test_a_change_after_it_was_applied_stays(checkout: Path) -> None:
    commit(checkout)
    assert diff(checkout, "--apply").exit_code == 0
    change(checkout / CONFORMER, "\n@bounded_length_sync(", "\n# ours\n@bounded_length_sync(")
    for old, new in NEAR[1:]:
        change(checkout / CONFORMER, old, new)
    done = diff(checkout, "--reverse")
    assert done.exit_code == 0, done.output
    assert f"as {OWN_DIFF} reversed" in done.stdout
    text = (checkout / CONFORMER).read_text()
    assert text.count("# ours") == 3 and "bounded_length_sync" not in text
    assert contents(tree(checkout))[CONV] == (SITE / CONV).read_bytes()


@one_nemo
def test_a_reduce_that_came_back_is_not_taken_for_the_patch(checkout: Path) -> None:
    """As a merge may do it."""
    assert diff(checkout, "--apply").exit_code == 0
    stock = (SITE / CONFORMER).read_text()
    first = stock.index("        if self.sync_max_audio_length and torch.dist")
    reduce = stock[first : stock.index(REDUCED) + len(REDUCED)]
    comment = "        # nemo_patches: it is the largest"
    change(checkout / CONFORMER, comment, f"{reduce}{comment}")
    said = "neither the last commit nor a committed diff reversed gives files that become these"
    assert_refused(checkout, "--check", said, code=1)
    assert_refused(checkout, "--reverse", said)


@one_nemo
def test_check_says_why_none_applies_and_whether_one_can_be_made(checkout: Path) -> None:
    change(checkout / CONFORMER, *NEAR[0])
    own = f"{OWN_DIFF} does not apply (git apply: error: patch failed: {CONFORMER}:"
    assert_refused(checkout, "--check", own, f"`nemo-patches diff --nemo {checkout}` makes one for it", code=1)
    change(checkout / CONFORMER, REDUCED, f"{REDUCED}            device = None\n")
    assert_refused(checkout, "--check", own, f"makes none for it: {CONFORMER}:", code=1)


@one_nemo
def test_check_tells_a_diff_that_applies_but_misses_an_encoder(checkout: Path) -> None:
    other = next(target for target in TARGETS if not (checkout / path_of(target)).exists())
    text = (checkout / CONFORMER).read_text().replace("ConformerEncoder", other.owner)
    (checkout / path_of(other)).parent.mkdir(parents=True, exist_ok=True)
    (checkout / path_of(other)).write_text(text)
    assert_refused(checkout, "--check", f"{OWN_DIFF} would apply, but gives something else; ", "makes one", code=1)
    text = text.replace(REDUCED, f"{REDUCED}            device = None\n")
    (checkout / path_of(other)).write_text(text)
    assert_refused(checkout, "--check", f"{OWN_DIFF} would apply; ", "makes none for it", code=1)


@one_nemo
def test_another_series_has_the_committed_diff_of_its_code(checkout: Path) -> None:
    info = checkout / "nemo" / "package_info.py"
    info.write_text("MAJOR = 9\nMINOR = 1\nPATCH = 0\nPRE_RELEASE = 'rc0'\n")
    done = diff(checkout, "--check")
    assert (done.exit_code, done.stdout.split(", ")[0]) == (0, f"{OWN_DIFF} applies to this NeMo 9.1.0rc0"), done.output
    change(checkout / CONFORMER, *NEAR[0])
    assert_refused(checkout, "--check", "no committed diff is for NeMo 9.1, and none of the others applies", code=1)


@one_nemo
def test_the_own_series_comes_first_then_the_newest() -> None:
    """Several may apply alike, and the one that is named is the one that a reader looks for."""
    names = [found.name for found in diffs.committed(parts.Part.NEMO, "2.5.1rc0")]
    assert names[:2] == ["nemo-2.5.diff", "nemo-3.0.diff"] and names[-1] == "nemo-1.23.diff"


@one_nemo
def test_no_nemo_and_options_that_exclude_each_other(checkout: Path, tmp_path: Path) -> None:
    for option in ("", "--check", "--apply", "--reverse"):
        assert_refused(tmp_path, option, "no NeMo here", "needed is the folder that has nemo/package_info.py")
    done = diff(checkout, "--apply", "--reverse")
    assert (done.exit_code, done.stdout) == (2, "")
    said = "found --apply and --reverse; allowed is one of them, or none to print the diff"
    assert done.stderr == f"nemo-patches diff: {said}\n"


@one_nemo
def test_a_conflict_that_is_not_resolved_is_named(checkout: Path) -> None:
    change(checkout / CONFORMER, CLASS, f"<<<<<<< HEAD\n{CLASS}")
    for option in ("", "--check", "--apply", "--reverse"):
        assert_refused(checkout, option, f"{CONFORMER}:", "invalid syntax")


@one_nemo
def test_without_git_it_says_so(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for option in ("", "--check", "--apply"):
        assert_refused(checkout, option, "git status: ", "No such file or directory: 'git'")


@one_nemo
def test_a_copy_without_committed_diffs_says_so(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(CHECKOUT / "nemo_patches", tmp_path / "nemo_patches", ignore=shutil.ignore_patterns("patches"))
    command = [sys.executable, "-m", "nemo_patches", "diff", "--nemo", checkout, "--check"]
    done = run(command, environment(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("nemo-patches diff: this copy of nemo_patches has no committed diffs with it")


@one_nemo
def test_the_wheel_has_the_committed_diffs_and_the_demos_model(tmp_path: Path) -> None:
    assert diffs.COMMITTED.resolve() == CHECKOUT / "patches"
    source = tmp_path / "source"
    for name in ("nemo_patches", "patches", "examples"):
        shutil.copytree(CHECKOUT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    done = run([sys.executable, "-c", build], environment(), cwd=source)
    assert done.returncode == 0, done.stderr
    shutil.unpack_archive(next(source.glob("*.whl")), tmp_path / "wheel", "zip")
    found, committed = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (tmp_path / "wheel" / "nemo_patches" / "patches", CHECKOUT / "patches")
    )
    assert found == committed
    model = tmp_path / "wheel" / "nemo_patches" / "tools" / "demo" / "nest.yaml"
    assert model.read_bytes() == (CHECKOUT / "examples" / "nest" / "nest.yaml").read_bytes()


HOSTILE = {
    "GIT_DIFF_OPTS": "--unified=0",
    "GIT_EXTERNAL_DIFF": "false",
    "GIT_INDEX_FILE": "/nonexistent/index",
    "GIT_WORK_TREE": "/nonexistent",
    "GIT_OBJECT_DIRECTORY": "/nonexistent",
    "GIT_DEFAULT_HASH": "sha256",
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "diff.noprefix",
    "GIT_CONFIG_VALUE_0": "true",
}


@one_nemo
@pytest.mark.parametrize("source", ["variables", "home", "XDG_CONFIG_HOME", "core.attributesFile", "a template"])
def test_nobodys_git_changes_what_is_printed(
    source: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = diff(checkout).stdout_bytes
    assert expected.count(b"\ndiff --git ") > 9
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    attributes = "*.py binary\n"
    for folder in (tmp_path / ".config" / "git", tmp_path / "xdg" / "git", tmp_path / "template" / "info"):
        folder.mkdir(parents=True)
    if source == "variables":
        for name, value in HOSTILE.items():
            monkeypatch.setenv(name, value)
    elif source == "home":
        (tmp_path / ".config" / "git" / "attributes").write_text(attributes)
        (tmp_path / ".gitconfig").write_text("[diff]\n  context = 9\n  algorithm = patience\n  mnemonicPrefix = true\n")
    elif source == "XDG_CONFIG_HOME":
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
        (tmp_path / "xdg" / "git" / "attributes").write_text(attributes)
    elif source == "core.attributesFile":
        (tmp_path / "attributes").write_text(attributes)
        (tmp_path / ".gitconfig").write_text(f"[core]\n  attributesFile = {tmp_path / 'attributes'}\n")
    else:
        (tmp_path / "template" / "info" / "attributes").write_text(attributes)
        monkeypatch.setenv("GIT_TEMPLATE_DIR", str(tmp_path / "template"))
        (tmp_path / ".gitconfig").write_text(f"[init]\n  templateDir = {tmp_path / 'template'}\n")
    assert diff(checkout).stdout_bytes == expected
    assert diff(checkout, "--apply").exit_code == 0
    assert diff(checkout, "--reverse").exit_code == 0


@one_nemo
def test_the_words_of_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the diff itself, which is in patches/."""
    monkeypatch.chdir(tmp_path)

    def stock(folder: str, in_git: bool = False) -> None:
        copied_nemo(Path(folder))
        if in_git:
            commit(Path(folder))

    def edit(folder: str, file: str, old: str, new: str) -> None:
        change(Path(folder, file), old, new)

    transcripts.compare("diff", tmp_path, {"stock": stock, "edit": edit, "CONFORMER": CONFORMER, "CONV": CONV})
