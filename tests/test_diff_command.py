"""`nemo-patches diff` on real checkouts, with real git: what it prints, checks and refuses. It
writes nothing.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transcripts
from diff_checkouts import (
    CONFORMER,
    CONV,
    OWN_DIFF,
    SERIES,
    assert_refused,
    change,
    commit,
    contents,
    copied_nemo,
    diff,
    git,
)
from interpreters import CHECKOUT, as_ordinary_user, environment, run

from nemo_patches.vendoring import checkouts

one_nemo = pytest.mark.one_nemo
weekly = functools.partial(pytest.param, marks=pytest.mark.weekly)
CLASS = "class ConformerEncoder("
REDUCED = "            seq_length = global_max_len.int().item()\n"
ATTENTION = "nemo/collections/asr/parts/submodules/multi_head_attention.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copied_nemo(tmp_path / "checkout")


def outside(checkout: Path) -> None:
    pass


def root(checkout: Path) -> None:
    commit(checkout)


def ignored(checkout: Path) -> None:
    """As an environment's site-packages is in a project's repository."""
    (checkout.parent / ".gitignore").write_text("checkout/\n")
    commit(checkout.parent)


@pytest.mark.parametrize("place", [outside, root, ignored])
def test_wherever_a_released_nemo_is_it_prints_the_committed_diff(
    place: Callable[[Path], None], checkout: Path
) -> None:
    place(checkout)
    before = contents(checkout)
    done = diff(checkout)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert done.stdout_bytes == OWN_DIFF.read_bytes()
    done = diff(checkout, "--check")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert (
        done.stdout == f"nemo-{SERIES}.diff applies cleanly to NeMo"
        f" {checkouts.read(checkout).version}\n"
    )
    assert contents(checkout) == before


NEAR = [
    (CLASS, f"# ours\n{CLASS}"),
    ("        # Find global max audio length across all nodes\n", "        # ours\n"),
    (REDUCED, f"            # ours\n{REDUCED}"),
]


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_a_fork_gets_its_own_diff_which_git_applies_and_takes_back(
    ends: str, checkout: Path, tmp_path: Path
) -> None:
    for old, new in NEAR:
        change(checkout / CONFORMER, old, new)
    for path in (CONFORMER, CONV, ATTENTION):
        (checkout / path).write_bytes(
            (checkout / path).read_bytes().replace(b"\n", ends.encode())
        )
    before = contents(checkout)
    planned = {edit.path: edit.after for edit in checkouts.read(checkout).edits()}
    assert_refused(
        checkout,
        "--check",
        f"nemo-{SERIES}.diff does not apply (git apply: error: patch failed: ",
        f"`nemo-patches diff --nemo {checkout}` makes one for it",
        code=1,
    )
    file = tmp_path / "own.diff"
    file.write_bytes(diff(checkout).stdout_bytes)
    git(checkout, "apply", "--whitespace=nowarn", file)
    assert contents(checkout) == {**before, **planned}
    assert (b"\r\n" in planned[CONFORMER]) == (ends == "\r\n")
    git(checkout, "apply", "-R", "--whitespace=nowarn", file)
    assert contents(checkout) == before


TABLES = {
    "registered otherwise": (
        ATTENTION,
        "'pe', pe, persistent=False",
        "'pe', pe",
        "def create_pe(",
    ),
    "read otherwise": (
        ATTENTION,
        "pos_emb = self.pe[:, start_pos:end_pos]",
        "pos_emb = self.pe[:, a:b]",
        "def forward(",
    ),
    "of a class that is gone": (
        ATTENTION,
        "class RelPositionalEncoding(",
        "class Relative(",
        "",
    ),
    "one more": (
        CONFORMER,
        "        self.max_audio_length = max_audio_length\n",
        (
            "        self.max_audio_length = max_audio_length\n       "
            " self.register_buffer('x', y, persistent=False)\n"
        ),
        "self.register_buffer('x'",
    ),
}


@one_nemo
@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_would_stay_a_buffer_is_refused_with_its_place(
    name: str, checkout: Path
) -> None:
    path, old, new, at = TABLES[name]
    change(checkout / path, old, new)
    line = int(diff(checkout).stderr.split(f"{path}:")[1].split(":")[0])
    assert at in (checkout / path).read_text().splitlines()[line - 1]
    assert_refused(checkout, "", f"nemo-patches diff: {path}:{line}: ")


@one_nemo
def test_an_encoder_without_the_file_of_its_tables_is_refused(checkout: Path) -> None:
    (checkout / ATTENTION).unlink()
    assert_refused(
        checkout,
        "",
        f"{CONFORMER} reads the table in {ATTENTION}, which is not here: it would stay"
        " a buffer",
    )


@one_nemo
def test_an_encoder_that_a_fork_has_moved_is_said_to_keep_its_reduce(
    checkout: Path,
) -> None:
    (checkout / CONFORMER).rename((checkout / CONFORMER).with_name("our_encoder.py"))
    done = diff(checkout)
    assert done.exit_code == 0 and CONV in done.stdout
    assert done.stderr.startswith(
        f"nemo-patches diff: {checkout}: not here, although NeMo "
    )
    assert f" has it: {CONFORMER}; if it was moved, its reduce stays\n" in done.stderr


OVERRIDES = {
    "in the same file": (CONFORMER, "", "all_reduce"),
    "in another file": ("nemo/collections/asr/modules/ours.py", "", "all_reduce"),
    "in another folder of the repository": ("ours/encoder.py", "", "all_reduce"),
    "of a class that inherits from an heir": (
        "nemo/ours.py",
        "class Ours(Heir):\n    pass\n",
        "all_gather_object",
    ),
    "by a helper": (
        "nemo/ours.py",
        "def all_longest(length):\n    dist.barrier()\n",
        "all_longest",
    ),
}
OVERRIDE = """

{before}

class OurEncoder(ConformerEncoder):
    def update_max_seq_length(self, seq_length: int, device):
        super().update_max_seq_length(seq_length, device)
        {call}(seq_length)
"""


@one_nemo
@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("options", [(), weekly(("--check",))])
def test_an_override_that_still_waits_is_named_with_its_place(
    name: str, options: tuple[str, ...], checkout: Path
) -> None:
    path, before, call = OVERRIDES[name]
    commit(checkout)
    file = checkout / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as text:
        text.write(OVERRIDE.format(before=before, call=call))
    done = diff(checkout, *options)
    assert done.exit_code == 0 and done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"nemo-patches diff: {checkout}: not bounded: {path}:")
    number = int(line.split(f"{path}:")[1].split(" ")[0])
    source = diff(checkout).stdout if path == CONFORMER else file.read_text()
    if path != CONFORMER:
        assert ("dist.barrier" if before.startswith("def") else f"{call}(") in (
            source.splitlines()[number - 1]
        )


@one_nemo
def test_a_carried_commit_that_leaves_a_new_encoder_is_told(checkout: Path) -> None:
    """As after a rebase onto a series that has one encoder more."""
    commit(checkout)
    stock = (checkout / CONV).read_bytes()
    git(checkout, "apply", "--whitespace=nowarn", OWN_DIFF)
    (checkout / CONV).write_bytes(stock)
    line = [b"all_reduce(" in one for one in stock.splitlines()].index(True) + 1
    place = f"{CONV}:{line} (all_reduce in ConvASREncoder.update_max_sequence_length)"
    for options in ("", "--check"):
        assert_refused(
            checkout, options, "the edit is here already", f"not bounded: {place}"
        )


@one_nemo
def test_check_says_why_the_committed_one_does_not_fit(checkout: Path) -> None:
    change(checkout / CONFORMER, REDUCED, f"{REDUCED}            device = None\n")
    own = (
        f"nemo-{SERIES}.diff does not apply (git apply: error: patch failed:"
        f" {CONFORMER}:"
    )
    assert_refused(
        checkout,
        "--check",
        own,
        f"`nemo-patches diff` makes none for it: {CONFORMER}:",
        code=1,
    )


@one_nemo
def test_check_tells_a_diff_that_applies_but_misses_an_encoder(checkout: Path) -> None:
    other = "nemo/collections/asr/modules/squeezeformer_encoder.py"
    text = (
        (checkout / CONFORMER)
        .read_text()
        .replace("ConformerEncoder", "SqueezeformerEncoder")
    )
    (checkout / other).write_text(text)
    assert_refused(
        checkout,
        "--check",
        "would apply; `nemo-patches diff` makes none for it: " + other,
        code=1,
    )


@one_nemo
def test_another_series_is_told_to_make_its_own(checkout: Path) -> None:
    info = checkout / "nemo" / "package_info.py"
    info.write_text("MAJOR = 9\nMINOR = 1\nPATCH = 0\nPRE_RELEASE = 'rc0'\n")
    said = (
        f"no diff of patches/ is for NeMo 9.1; `nemo-patches diff --nemo {checkout}`"
        " makes one for it"
    )
    assert_refused(checkout, "--check", said, code=1)
    assert "Made for NeMo 9.1, by nemo_patches.\n---\n" in diff(checkout).stdout


@one_nemo
@pytest.mark.parametrize("options", ["", "--check"])
def test_what_cannot_be_read_is_named(
    options: str, checkout: Path, tmp_path: Path
) -> None:
    (checkout / CONV).chmod(0)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "nemo_patches",
        "diff",
        "--nemo",
        checkout,
        *options.split(),
    ]
    done = run(as_ordinary_user(command), environment(CHECKOUT), cwd=checkout)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr == f"nemo-patches diff: {checkout / CONV}: Permission denied\n"
    (tmp_path / "empty").mkdir()
    said = "no NeMo here", "needed is the folder that has nemo/package_info.py"
    assert_refused(tmp_path / "empty", options, *said)


@one_nemo
def test_a_conflict_that_is_not_resolved_is_named(checkout: Path) -> None:
    change(checkout / CONFORMER, CLASS, f"<<<<<<< HEAD\n{CLASS}")
    assert_refused(checkout, "", f"{CONFORMER}:", "invalid syntax")


@one_nemo
def test_without_git_it_says_so(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert_refused(checkout, "", "git init: ", "No such file or directory: 'git'")


@one_nemo
def test_a_copy_without_committed_diffs_says_so(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(
        CHECKOUT / "nemo_patches",
        tmp_path / "nemo_patches",
        ignore=shutil.ignore_patterns("patches"),
    )
    command = [sys.executable, "-m", "nemo_patches", "diff", "--nemo", checkout]
    done = run(command, environment(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "nemo-patches diff: this copy of nemo_patches has no patches/ with it"
    )


@one_nemo
def test_the_wheel_has_the_committed_diffs_and_the_demos_model(tmp_path: Path) -> None:
    assert checkouts.DIFFS.resolve() == CHECKOUT / "patches"
    source = tmp_path / "source"
    for name in ("nemo_patches", "patches", "examples"):
        shutil.copytree(
            CHECKOUT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    done = run([sys.executable, "-c", build], environment(), cwd=source)
    assert done.returncode == 0, done.stderr
    shutil.unpack_archive(next(source.glob("*.whl")), tmp_path / "wheel", "zip")
    found, committed = (
        {
            file.relative_to(folder): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }
        for folder in (
            tmp_path / "wheel" / "nemo_patches" / "patches",
            CHECKOUT / "patches",
        )
    )
    assert found == committed
    model = tmp_path / "wheel" / "nemo_patches" / "tools" / "demo" / "nest.yaml"
    assert (
        model.read_bytes()
        == (CHECKOUT / "examples" / "nest" / "nest.yaml").read_bytes()
    )


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
@pytest.mark.parametrize(
    "source",
    [
        *("variables", "home"),
        *map(weekly, ("XDG_CONFIG_HOME", "core.attributesFile", "a template")),
    ],
)
def test_nobodys_git_changes_what_is_printed(
    source: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = diff(checkout).stdout_bytes
    assert expected.count(b"\ndiff --git ") > 5
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    attributes = "*.py binary\n"
    for folder in (
        tmp_path / ".config" / "git",
        tmp_path / "xdg" / "git",
        tmp_path / "template" / "info",
    ):
        folder.mkdir(parents=True)
    if source == "variables":
        for name, value in HOSTILE.items():
            monkeypatch.setenv(name, value)
    elif source == "home":
        (tmp_path / ".config" / "git" / "attributes").write_text(attributes)
        (tmp_path / ".gitconfig").write_text(
            "[diff]\n  context = 9\n  algorithm = patience\n  mnemonicPrefix = true\n"
        )
    elif source == "XDG_CONFIG_HOME":
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
        (tmp_path / "xdg" / "git" / "attributes").write_text(attributes)
    elif source == "core.attributesFile":
        (tmp_path / "attributes").write_text(attributes)
        (tmp_path / ".gitconfig").write_text(
            f"[core]\n  attributesFile = {tmp_path / 'attributes'}\n"
        )
    else:
        (tmp_path / "template" / "info" / "attributes").write_text(attributes)
        monkeypatch.setenv("GIT_TEMPLATE_DIR", str(tmp_path / "template"))
        (tmp_path / ".gitconfig").write_text(
            f"[init]\n  templateDir = {tmp_path / 'template'}\n"
        )
    assert diff(checkout).stdout_bytes == expected
    assert diff(checkout, "--check").exit_code == 0


@one_nemo
def test_the_words_of_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the diff itself, which is in patches/."""
    monkeypatch.chdir(tmp_path)

    def stock(folder: str) -> None:
        copied_nemo(Path(folder))

    def edit(folder: str, file: str, old: str, new: str) -> None:
        change(Path(folder, file), old, new)

    def apply(folder: str) -> None:
        git(Path(folder).absolute(), "apply", "--whitespace=nowarn", OWN_DIFF)

    names = {"stock": stock, "edit": edit, "apply": apply}
    paths = {"CONFORMER": CONFORMER, "CONV": CONV, "ATTENTION": ATTENTION}
    transcripts.compare("diff", tmp_path, names | paths)
