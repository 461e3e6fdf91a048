"""A missing rank, and how a log line describes the missing ranks."""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

# No `from __future__ import annotations`: read_facts.py reads the fields' types.

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from ..text import named
from .kinds import (
    ALL_RANKS_OF,
    ANSWERS_NOTHING,
    APART,
    ELSEWHERE,
    EVALUATED,
    FLAG_IS_OFF,
    GONE,
    KINDS,
    LATE,
    LEFT,
    PERHAPS,
    SILENT,
    UNANNOUNCED,
    UNREACHED,
    is_guess,
)

NOT_ANNOUNCED = (
    "not patched, or not started, or it cannot connect: `nemo-patches status` there says"
    " why; if not patched, the job may hang or reduce wrong numbers"
)
REACHED_BY_NONE = "is patched, and cannot be reached"
DETAILED = 4  # missing ranks for which a report says where they are; the others are only listed
_LONG_TEXT = 180  # characters
# All functions of a place but the first four.
_CALLERS = re.compile(
    r"((?: < \S+ \([^()|]*\)){3})(?: < (?:\d+ more|\S+ \([^()|]*\)))+"
)


def process_text(host: str, pid: int) -> str:
    """(node8, pid 4711), with the space; empty if neither is known."""
    where = " in its container" if pid == 1 else ""  # a host's process 1 is no rank
    text = ", ".join(filter(None, (host, f"pid {pid}{where}" if pid else "")))
    return f" ({text})" if text else ""


@dataclass(frozen=True)
class MissingRank:
    """A rank that the others wait for.

    kind: "elsewhere", "no heartbeat", "left", "unannounced" or "late"; "unreached": it is patched,
    and cannot reach rank 0; "evaluation ended": it had fewer batches than the others;
    "sync_max_audio_length is false" or "sync=local": it takes no part in the length sync. The rest
    is what it last reported: empty, 0 and -1 if it reported nothing, or if too many ranks are
    missing to describe each. idle: seconds since its last encoder call began. where: what its
    training thread does, if it answers; else what shows why it does not. workers: process ids of
    its data loader's workers. collective: the collective in which it waits itself; empty: in no
    known one. batch: its current or last batch: "1041 of epoch 3 (train): cuts a, b, +30".
    """

    rank: int
    kind: str
    host: str = ""
    pid: int = 0
    calls: int = 0
    idle: float = -1.0
    where: str = ""
    workers: tuple[int, ...] = ()
    collective: str = ""
    batch: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank}{process_text(self.host, self.pid)}"
        # It said so when it was last heard.
        least = "at least " if self.kind in (SILENT, LATE) else ""
        last = (
            f"; its last encoder call, {self.calls}, began {least}{self.idle:.1f} s ago"
            if self.idle >= 0
            else ""
        )
        last += f"; last batch {self.batch}" if self.batch else ""
        workers = (
            f"; its data loader's workers: pids {', '.join(map(str, self.workers))}"
            if self.workers
            else ""
        )
        if self.kind == UNANNOUNCED:
            return f"{who} has not announced itself: {NOT_ANNOUNCED}"
        if self.kind == UNREACHED:
            return f"{who} {REACHED_BY_NONE}: {self.where}"
        if self.kind == LEFT:
            return f"{who} has left: it ended, or destroyed its process group{last}"
        if self.kind == SILENT:
            if self.where.startswith(ALL_RANKS_OF):
                return self.where
            return f"{who}{' ' if self.where == ANSWERS_NOTHING else ': '}{self.where}{last}"
        if self.kind in APART:
            why = (
                f"its encoder's {self.kind}"
                if self.kind == FLAG_IS_OFF
                else f"{self.kind} there"
            )
            return f"{who}: {why}: it takes no part in the length sync{last}"
        if self.kind == EVALUATED:
            return (
                f"{who} has ended this evaluation, it had fewer batches, and waits in"
                f" {self.collective}{last}"
            )
        if self.collective:
            what = f"in {self.collective}"
            if is_guess(self.collective):
                what = f"{PERHAPS}for {self.collective.removeprefix(PERHAPS)}"
            return f"{who} waits itself, {what}: {self.where}{last}"
        has = "is elsewhere" if self.kind == ELSEWHERE else "is late"
        return f"{who} {has}{': ' if self.where else ''}{self.where}{last}{workers}"


def been(missing: Iterable[MissingRank]) -> str:
    """For the line that says that they have come: where they had been, if anywhere."""
    texts = dict.fromkeys(filter(None, map(_been, missing)))  # a host's ranks have one
    return "".join(f"; {text}" for text in texts)


def _been(one: MissingRank) -> str:
    who = f"rank {one.rank}"
    if one.kind == SILENT:
        if one.where.startswith(ALL_RANKS_OF):
            return f"{one.where.partition(':')[0]} could not be reached"
        return f"{who} had not answered" if one.where != GONE else ""
    return f"{who} had been in {one.where}" if one.where else ""


@dataclass(frozen=True)
class Stall:
    """Missing ranks that this rank waits for, or has stopped waiting for: `status().stalls` has
    those that last.
    """

    encoder: str
    call: int  # 0 if the encoder's length sync has ended, because the missing ranks have died
    since: timedelta  # since this rank came to the round
    missing: tuple[MissingRank, ...]
    size: int  # ranks in all
    unknown: str  # why `missing` is not known; empty if it is known
    text: str = ""  # the line, for a stall outside the encoder

    def __str__(self) -> str:
        if self.text:
            return self.text
        who = (
            f"not told: {self.unknown}"
            if self.unknown
            else described(self.missing, self.size)
        )
        return (
            f"{self.encoder}: call {self.call}, {self.since.total_seconds():.0f} s ago,"
            f" missing: {who}"
        )


def described(missing: tuple[MissingRank, ...], size: int) -> str:
    """The missing ranks, at least one, of `size` in all: all named, and what the first DETAILED
    do.
    """
    lines = [f"{named(rank.rank for rank in missing)} of {size}"]
    # A host's ranks have one.
    lines += dict.fromkeys(str(rank) for rank in missing[:DETAILED])
    for kind in KINDS:
        if ranks := [one.rank for one in missing[DETAILED:] if one.kind == kind]:
            lines.append(f"{len(ranks)} more {kind}: {named(ranks)}")
    return shortened(" | ".join(lines))


def shortened(text: str) -> str:
    """A long text of a line, with four functions of each place: a stall's report has more."""
    return text if len(text) < _LONG_TEXT else _CALLERS.sub(r"\1", text)
