"""The diffs as text: made for a checkout, and those that are part of nemo_patches, in patches/."""

from __future__ import annotations

import re

from nemo_patches.vendoring import git
from nemo_patches.vendoring.checkouts import DIFFS, Checkout
from nemo_patches.vendoring.errors import DiffError

# As `git am` takes it. A date of today, or a hash, would not be the same when it is made again.
_MAIL = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: nemo-patches authors <nemo-patches@users.noreply.example>
Date: Wed, 25 Nov 2026 12:00:00 +0000
Subject: [PATCH] ASR: a time limit for the all-reduce of the input length

The encoders reduce one number over all ranks in every forward, and wait for it
without a limit: a rank that is late or dead, or has one batch fewer, leaves the
others waiting until the process group's timeout.

Now a rank waits at most NEMO_LENGTH_SYNC_TIMEOUT seconds (default 10), goes on
with its own length, and logs which ranks are missing. If no encoder is called
for NEMO_ENCODER_WATCH_S seconds (default 60), each rank logs which ranks made
fewer calls. 0 switches either off. No number that a model computes changes.

The tables that grow with the length are plain attributes: as buffers, DDP would
broadcast them with another length on each rank. State dicts never had them.

Made for NeMo {version}, by nemo_patches.
---
"""


def text(checkout: Checkout) -> bytes:
    """The diff for a checkout, as a mail. Raises DiffError."""
    edits = checkout.edits()
    before = {edit.path: edit.before for edit in edits if edit.before is not None}
    after = {edit.path: edit.after for edit in edits}
    return _MAIL.format(version=_series(checkout.version)).encode() + git.diff(
        before, after
    )


def check(checkout: Checkout) -> tuple[bool, str]:
    """Whether the diff of its series in patches/ applies and gives what `text` gives; and a
    sentence about it.

    Raises DiffError if it cannot be told.
    """
    folder, version, series = (
        checkout.folder,
        checkout.version,
        _series(checkout.version),
    )
    checkout.require_stock()
    planned: dict[str, bytes] = {}
    otherwise = f"`nemo-patches diff --nemo {folder}` makes one for it"
    try:
        planned = {edit.path: edit.after for edit in checkout.edits()}
    except DiffError as error:
        otherwise = f"`nemo-patches diff` makes none for it: {error}"
    committed = _committed(series)
    if committed is None:
        return False, f"{folder}: no diff of patches/ is for NeMo {series}; {otherwise}"
    name = f"nemo-{series}.diff"
    try:
        after = git.apply(committed, checkout.files)
    except DiffError as error:
        return False, f"{folder}: {name} does not apply ({error}); {otherwise}"
    if after == planned:
        return True, f"{name} applies cleanly to NeMo {version}"
    other = ", but gives something else than this NeMo needs" if planned else ""
    return False, f"{folder}: {name} would apply{other}; {otherwise}"


def notes(checkout: Checkout) -> list[str]:
    """Sentences: which files that the diff of its series edits are not in a checkout, and where a
    length sync stays as it is.
    """
    try:
        left = checkout.left({edit.path: edit.after for edit in checkout.edits()})
    except DiffError:  # the answer says it
        left = []
    series = _series(checkout.version)
    diff = (_committed(series) or b"").decode()
    missing = [
        path
        for path in re.findall(r"^--- a/(.+)$", diff, re.MULTILINE)
        if path not in checkout.files
    ]
    if missing:
        text = f"not here, although NeMo {series} has it: {', '.join(missing)}"
        left.insert(0, f"{text}; if it was moved, its reduce stays")
    return left


def _committed(series: str) -> bytes | None:
    file = DIFFS / f"nemo-{series}.diff"
    return file.read_bytes() if file.is_file() else None


def _series(version: str) -> str:
    """As in 2.7."""
    return ".".join(re.findall(r"\d+", version)[:2])
