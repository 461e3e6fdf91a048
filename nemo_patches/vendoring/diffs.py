"""The diffs as text: generated for a checkout, and those that are part of nemo_patches, in patches/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nemo_patches.sync import __version__
from nemo_patches.vendoring import git, parts
from nemo_patches.vendoring.checkouts import Checkout
from nemo_patches.vendoring.errors import DiffError
from nemo_patches.vendoring.parts import FOLDER, Part, Parts

COMMITTED = Path(__file__).parent.parent / "patches"  # a checkout of nemo_patches has a link there to its patches/
_LAST_UPDATE = "2026-11-22"  # of what the diffs do to NeMo; a date of today would not be reproducible
_ABOUT = {
    Part.NEMO: """\
 nemo: each encoder file of NeMo gets an import and a class decorator, and loses its all-reduce. It needs
 sync (runtime-sync.diff).
""",
    Part.SYNC: f"""\
 sync: {FOLDER}/: sync/, channel/, growth.py and text.py, which NeMo's edited files call: torch and the
 standard library only.
 Settings: NEMO_PATCHES_SYNC, NEMO_PATCHES_TIMEOUT, NEMO_PATCHES_ON_TIMEOUT, NEMO_PATCHES_CHECKPOINTS.
""",
    Part.STALL: f"""\
 stall: {FOLDER}/stall/, optional: every rank's log says who is missing from a stalled
 call or job, and what that rank does. It needs sync (runtime-sync.diff).
 Settings: NEMO_PATCHES_STALL_TIMEOUT, _STALL_EXIT, _ON_STALL.
""",
}


@dataclass(frozen=True)
class Committed:
    """One of the diffs that come with nemo_patches."""

    name: str
    series: str  # of NeMo, as in 2.7; empty where it is the same for all
    text: bytes


def text(checkout: Checkout, chosen: Parts) -> bytes:
    """The diff that applies these parts to a checkout. Raises DiffError."""
    edits = checkout.edits(chosen)
    before = {edit.path: edit.before for edit in edits if edit.before is not None}
    return _header(checkout.version, chosen).encode() + git.diff(before, {edit.path: edit.after for edit in edits})


def committed(part: Part, version: str) -> list[Committed]:
    """The committed diffs for a part, that of the NeMo version's series first. Raises DiffError if there are none."""
    pattern = "nemo-*.diff" if part is Part.NEMO else f"runtime-{part.value}.diff"
    found = []
    for file in COMMITTED.glob(pattern):
        series = file.stem.removeprefix("nemo-") if part is Part.NEMO else ""
        found.append(Committed(file.name, series, file.read_bytes()))
    if not found:
        raise DiffError(
            "this copy of nemo_patches has no committed diffs with it; a checkout of it has them in patches/"
        )
    return sorted(found, key=lambda diff: (diff.series == series_of(version), _numbers(diff.series)), reverse=True)


def left_out(checkout: Checkout) -> str:
    """Which of NeMo's files that the diff of its series edits are not in a checkout, in a sentence; else empty."""
    series = series_of(checkout.version)
    file = COMMITTED / f"nemo-{series}.diff"
    edited = re.findall(r"^\+\+\+ b/(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if file.is_file() else ()
    missing = [path for path in edited if path not in checkout.files]
    if not missing:
        return ""
    return f"not here, although NeMo {series} has it: {', '.join(missing)}; if it was moved, its reduce stays"


def series_of(version: str) -> str:
    """As in 2.7."""
    return ".".join(map(str, _numbers(version)[:2]))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _header(version: str, chosen: Parts) -> str:
    """What a reader sees first: DEP-3 fields (dep-team.debian.net/deps/dep3), and how to apply it and take it back."""
    edit = Part.NEMO in chosen
    names = ",".join(part.value for part in Part if part in chosen)
    return f"""\
Description: the encoders' length sync, bounded in time: {parts.named(chosen)}
 Training on several ranks hangs in an all-reduce of one number, without a time limit, that waits for a rank which is
 late or gone. With this, a rank waits for it at most NEMO_PATCHES_TIMEOUT seconds (10), goes on with its own length and
 says so. No number that a model computes changes.
 .
{"".join(about for part, about in _ABOUT.items() if part in chosen)} .
 Apply: git apply FILE, or patch -p1 < FILE; -R takes it out. An installed NeMo: patch, in the site-packages folder.
Origin: other, nemo_patches {__version__}, by `nemo-patches diff --parts {names}`{f" from NeMo {version}" * edit}
Forwarded: no
Last-Update: {_LAST_UPDATE}
Applies-To: NeMo {series_of(version) if edit else "of every series"}
---
"""
