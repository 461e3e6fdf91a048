"""The committed diffs: what they touch, that each tool applies them and takes them back, how a tree
is recognised.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from diff_checkouts import CONFORMER, OWN_DIFF, SITE, commit, contents, copied_nemo, git
from interpreters import CHECKOUT, environment, run

from nemo_patches.patching.admission import DIFFS_ONLY, SUPPORTED_SERIES
from nemo_patches.vendoring import checkouts
from nemo_patches.vendoring.checkouts import NEW_FILE, PATHS

COMMITTED = sorted((CHECKOUT / "patches").glob("*.diff"))
WAYS = {
    "git apply": ["git", "apply", "--whitespace=nowarn"],
    "patch -p1": ["patch", "-p1", "--fuzz=0", "--force", "--quiet", "-i"],
}
UPSTREAM = [
    path
    for name in ("encoders/000[134]*", "conv-asr/*")
    for path in sorted((CHECKOUT / "patches" / "upstream").glob(name))
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copied_nemo(tmp_path / "checkout")


def test_there_is_one_for_each_series() -> None:
    assert {file.name for file in COMMITTED} == {
        f"nemo-{name}.diff" for name in (*DIFFS_ONLY, *SUPPORTED_SERIES)
    }


@pytest.mark.one_nemo
@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_it_is_a_mail_about_the_encoders_and_their_tables_and_brings_one_file(
    file: Path,
) -> None:
    message, _, rest = file.read_text().partition("\n---\n")
    for header in ("From 0000", "From: ", "Date: ", "Subject: [PATCH] "):
        assert f"\n{header}" in f"\n{message}", header
    assert (
        f"\nMade for NeMo {file.stem.removeprefix('nemo-')}, by nemo_patches."
        in message
    )
    touched = {
        line.split(" b/")[1]
        for line in rest.splitlines()
        if line.startswith("diff --git ")
    }
    assert {CONFORMER, NEW_FILE} <= touched <= set(PATHS)
    assert re.findall(r"^--- /dev/null\n\+\+\+ b/(.*)$", rest, re.MULTILINE) == [
        NEW_FILE
    ]
    own = (CHECKOUT / "patches" / "bounded_length_sync.py").read_text().splitlines()
    assert "\n".join(f"+{line}" for line in own) in rest
    reduces = re.findall(r"^-.*\ball_reduce\(", rest, re.MULTILINE)
    assert (
        len(reduces)
        == rest.count("import max_length_in_time\n")
        == rest.count("= max_length_in_time(self, ")
        > 2
    )


@pytest.mark.parametrize("way", WAYS)
def test_each_tool_applies_it_and_takes_it_back(way: str, checkout: Path) -> None:
    before = contents(checkout)
    planned = {edit.path: edit.after for edit in checkouts.read(checkout).edits()}
    # In a repository around it, git would take the paths from that one's root.
    outside = environment(GIT_CEILING_DIRECTORIES=str(checkout.parent))
    for option, expected in (([], {**before, **planned}), (["-R"], before)):
        command = [WAYS[way][0], *WAYS[way][1:2], *option, *WAYS[way][2:], OWN_DIFF]
        done = run(command, outside, cwd=checkout)
        assert done.returncode == 0, done
        assert contents(checkout) == expected
    for path, content in planned.items():
        compile(content, path, "exec")


def test_git_am_commits_it_with_its_message(checkout: Path) -> None:
    commit(checkout)
    before = contents(checkout)
    planned = {edit.path: edit.after for edit in checkouts.read(checkout).edits()}
    git(checkout, "am", "-q", OWN_DIFF)
    assert contents(checkout) == {**before, **planned}
    message = git(checkout, "log", "-1", "--format=%an%n%s%n%b")
    assert message.startswith(
        "nemo-patches authors\nASR: a time limit for the all-reduce of the input"
        " length\n"
    )
    assert "NEMO_LENGTH_SYNC_TIMEOUT" in message and "diff --git" not in message
    git(checkout, "revert", "--no-edit", "HEAD")
    assert contents(checkout) == before


@pytest.mark.one_nemo
def test_its_tables_are_those_of_the_change_for_nemo_itself(checkout: Path) -> None:
    """One text for both, so that what upstream's own tests hold holds for the diffs."""
    path = "nemo/collections/asr/parts/submodules/multi_head_attention.py"
    (edit,) = (edit for edit in checkouts.read(checkout).edits() if edit.path == path)
    git(checkout, "apply", f"--include={path}", UPSTREAM[0])
    assert contents(checkout)[path] == edit.after


@pytest.fixture
def nemo(tmp_path: Path) -> Path:
    """All of the installed NeMo, for Python to import."""
    shutil.copytree(
        SITE / "nemo",
        tmp_path / "site" / "nemo",
    )  # with what is compiled, which holds for files of the same time
    return tmp_path / "site"


IMPORTED = """
import {first}
import nemo_patches
{second}
from nemo.collections.asr.modules import ConformerEncoder, ConvASREncoder
status = nemo_patches.status()
from nemo_patches.watch import subscriber
print([kind.__dict__[name].__module__ for kind, name in (
    (ConformerEncoder, "update_max_seq_length"), (ConvASREncoder, "update_max_sequence_length"))])
print(status.state, status.why, {{skipped.reason for skipped in status.skipped}}, subscriber.monitor is not None)
"""


@pytest.mark.one_nemo
@pytest.mark.parametrize(
    ("way", "patches", "reason"),
    [
        ("apply", [OWN_DIFF], "a diff of patches/ has bounded it in this NeMo"),
        ("auto-apply", UPSTREAM, "no reduce here: nothing to bound"),
    ],
)
def test_a_nemo_without_the_reduce_is_recognised_left_and_watched(
    way: str, patches: list[Path], reason: str, nemo: Path
) -> None:
    git(nemo, "apply", "--whitespace=nowarn", "--include=nemo/*", *patches)
    done = run(
        [sys.executable, "-m", "nemo_patches", "status"],
        environment(nemo),
        cwd=CHECKOUT,
    )
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"on: {reason}")
    assert f"ConformerEncoder.update_max_seq_length: {reason}\n" in done.stdout

    by_hand = way == "apply"
    program = IMPORTED.format(
        first="sys" if by_hand else "nemo.collections.asr",
        second="nemo_patches.apply()" if by_hand else "",
    )
    done = run(
        [sys.executable, "-c", program],
        environment(*([] if by_hand else [CHECKOUT]), nemo),
        cwd=nemo,
    )
    assert done.returncode == 0, done.stderr
    modules, status = done.stdout.splitlines()[-2:]
    encoders = [
        f"nemo.collections.asr.modules.{name}"
        for name in ("conformer_encoder", "conv_asr")
    ]
    assert modules == str(encoders)
    assert status.startswith(f"on {reason}; the stall monitor is on {{")
    own = [line for line in done.stderr.splitlines() if " nemo_patches " in line]
    (line,) = own
    assert (
        f"left as it is: ConformerEncoder, TransformerEncoder, ConvASREncoder: {reason}"
        in line
    )
    assert line.endswith("; stall reports watch the job")


@pytest.mark.one_nemo
def test_what_has_the_diff_is_not_printed_again(checkout: Path) -> None:
    git(checkout, "apply", "--whitespace=nowarn", OWN_DIFF)
    done = run(
        [sys.executable, "-m", "nemo_patches", "diff", "--nemo", checkout],
        environment(),
        cwd=CHECKOUT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(
        f"the edit is here already ({NEW_FILE}); take it out as it was put in: git"
        " apply -R FILE\n"
    )
