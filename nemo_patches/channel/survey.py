"""Surveys: ask down a tree where every rank is, merge the answers on the way up, send the verdict to all.

Who wants to know asks its parent, which says at once that it is there and asks its own. The root sends a question
down; each rank gives its answer; an inner rank merges them, and says of a child that does not answer in time that it is
silent, and who is behind it. The root's verdict goes down to all. Where a parent does not say that it is there, its
child judges for its own subtree. Nothing is sent while nobody asks. An error here ends surveys, never rounds.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import functools
import json
import math
import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from .links import LEFT, VANISHED, Links
from .tree import FORMAT, Connection

ACK = -6  # in place of a round's number
_ACK_S = 0.8  # for a parent to say that it is there
_OWN_S = 1.0  # for this rank's own answer, which another thread gives
_LEAF_S, _HOP_S = 1.2, 0.2  # for a leaf's answer; and for each level above the leaves
_GAP_S = 0.5  # between two surveys of one root: ranks that ask meanwhile share the next
_PER_RANK_S = 0.0005  # added per rank of the job to the leaf's time and the gap: many may share a machine
_MOST_OPEN = 4
SILENT, HELD_UP, LOST, NOT_THERE = "silent", "held up", "lost", "not there yet"
NO_SURVEYS = "no surveys"  # it shares rounds with the others, and nothing more
_SUREST_FIRST = (LEFT, VANISHED, NO_SURVEYS, HELD_UP, SILENT, LOST, NOT_THERE)
Runs = list[list[int]]


class Silent(NamedTuple):
    """A rank that has not answered."""

    rank: int
    how: str  # one of the above, or how it has ended (links.py)
    seconds: float  # since it last sent anything
    behind: Runs  # the ranks below it, which are not heard in this tree


class Verdict(NamedTuple):
    """What one tree, or one subtree of it, has found."""

    id: str  # of the survey in which this rank was asked
    is_mirrored: bool  # of the second tree
    root: int
    above: Silent | None  # if this root is not the tree's: its parent, which does not answer
    heard: Runs
    silent: tuple[Silent, ...]
    answer: Any  # of the ranks that are heard, merged


class Subject(Protocol):
    """The subject of surveys. Called on the channel's thread: must be quick, and must not wait."""

    def asked(self, id_: str, reply: Callable[[Any], None]) -> None:
        """Call `reply` soon, on any thread, with this rank's answer, as JSON data. id_: the survey's."""

    def merge(self, answers: list[Any]) -> Any:
        """Merge answers into one of bounded size; an answer may be in two of them. They are untrusted data."""

    def told(self, verdict: Verdict) -> None:
        """A verdict has come, from one of the two trees; another rank may have asked for the survey."""


class Channel(Protocol):
    """What surveys need of the side channel."""

    rank: int
    size: int

    def send(self, connection: Connection, number: int) -> None:
        """A message that is none of a round's."""

    def send_note(self, connection: Connection, note: bytes) -> bool:
        """Whether it is on its way."""

    def wake(self) -> None:
        """Make the channel's thread look soon."""


@dataclass
class _Survey:
    """A survey under way at this rank. origin: the neighbour that wants the answer; None: this rank judges."""

    id: str
    origin: Connection | None
    above: Silent | None
    deadline: float
    pending: dict[int, float] = field(default_factory=dict)  # ranks without an answer, and when each was last heard
    answers: list[Any] = field(default_factory=list)
    heard: set[int] = field(default_factory=set)
    silent: dict[int, Silent] = field(default_factory=dict)


class Surveys:
    """The surveys of one tree. Any thread may call `ask`, only the channel's thread the rest."""

    def __init__(self, channel: Channel, links: Links, subject: Subject) -> None:
        self._channel, self._links, self._subject = channel, links, subject
        self._wanted = queue.SimpleQueue[None]()  # an entry for each request of this rank
        self._replies = queue.SimpleQueue[tuple[str, Any]]()  # this rank's own answers, by the survey's id
        self._open: dict[str, _Survey] = {}
        self._number = 0
        self._began_at = -math.inf
        self._is_due = False  # this rank must judge for its subtree
        self._ack_by = self._verdict_by = math.inf  # deadlines for the parent
        self._leaf_s, self._gap_s = (each + channel.size * _PER_RANK_S for each in (_LEAF_S, _GAP_S))
        self._silent_at: dict[int, float] = {}  # silent neighbours: not waited for until they send something
        self._heights: dict[int, int] = {}  # of ranks, in the tree

    def ask(self) -> None:
        """Any thread: request a verdict for every rank. If a survey is under way, it is that one's."""
        self._wanted.put(None)
        self._channel.wake()

    def tick(self, now: float) -> float:
        """Do what is due; return when to look again."""
        while not self._wanted.empty():
            self._wanted.get()
            self._want(now)
        while not self._replies.empty():
            self._replied(*self._replies.get(), now)
        parent = self._links.place.parent
        if now >= min(self._ack_by, self._verdict_by):  # the parent is, or has become, silent
            self._ack_by = self._verdict_by = math.inf
            self._silent_at[parent] = now
            self._begin(self._silence(parent, now), now)
        if self._is_due and now >= self._began_at + self._gap_s:
            self._begin(self._silence(parent, now) if parent >= 0 else None, now)
        for survey in [one for one in self._open.values() if now >= one.deadline]:
            self._conclude(survey, now)
        gap = self._began_at + self._gap_s if self._is_due else math.inf
        return min(self._ack_by, self._verdict_by, gap, *(one.deadline for one in self._open.values()), math.inf)

    def acknowledged(self, connection: Connection) -> None:
        if connection is self._links.parent:
            self._ack_by = math.inf

    def note(self, connection: Connection, data: bytes) -> None:
        """Handle a note from another rank: untrusted data of bounded size, whose types are checked on use."""
        now, from_parent = time.monotonic(), connection is self._links.parent
        try:
            note = json.loads(data)
            kind = note["is"]
            if kind == "ask" and not from_parent:
                self._channel.send(connection, ACK)
                self._want(now)
            elif kind == "question" and from_parent:
                self._ack_by = self._verdict_by = math.inf
                self._spread(_Survey(str(note["id"])[:40], connection, None, self._deadline(now)), now)
            elif kind == "answer" and not from_parent:
                self._answered(connection.rank, note, now)
            elif kind == "verdict" and from_parent:
                self._tell(data, _verdict_of(note, self._links.place.is_mirrored))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, AttributeError):
            return  # no rank of this format sends it

    def lost(self, rank: int) -> None:
        """The connection to a neighbour is lost, or it has left: do not wait for its answer."""
        now = time.monotonic()
        for survey in list(self._open.values()):
            if survey.pending.pop(rank, None) is not None:
                survey.silent[rank] = self._silence(rank, now)
                if not survey.pending:
                    survey.deadline = 0.0
        if rank == self._links.place.parent and min(self._ack_by, self._verdict_by) < math.inf:
            self._ack_by = self._verdict_by = math.inf
            self._is_due = True

    def _want(self, now: float) -> None:
        if self._open or self._verdict_by < math.inf:
            return  # a verdict is under way
        place = self._links.place
        parent = self._links.connections.get(place.parent)
        if parent is None or self._is_silent(parent) or not self._channel.send_note(parent, _ASK):
            self._is_due = True
            return
        self._ack_by = now + _ACK_S
        self._verdict_by = now + _ACK_S + 2 * self._patience_s(place.all_parents.index(-1)) + self._gap_s

    def _begin(self, above: Silent | None, now: float) -> None:
        self._number += 1
        self._began_at, self._is_due = now, False
        self._spread(_Survey(f"{self._channel.rank}.{self._number}", None, above, self._deadline(now)), now)

    def _spread(self, survey: _Survey, now: float) -> None:
        """To the children, and to this rank itself."""
        while len(self._open) >= _MOST_OPEN:
            del self._open[next(iter(self._open))]
        self._open[survey.id] = survey
        note = json.dumps({"is": "question", "id": survey.id}).encode()
        for rank in self._links.place.children:
            child = self._links.connections.get(rank)
            was_silent = child is not None and self._is_silent(child)
            if child is not None and self._channel.send_note(child, note) and not was_silent:
                survey.pending[rank] = child.heard_at
            else:
                survey.silent[rank] = self._silence(rank, now)
        survey.pending[self._channel.rank] = now
        self._subject.asked(survey.id, functools.partial(self._reply, survey.id))

    def _reply(self, id_: str, answer: Any) -> None:
        """Any thread."""
        self._replies.put((id_, answer))
        self._channel.wake()

    def _replied(self, id_: str, answer: Any, now: float) -> None:
        rank = self._channel.rank
        if (survey := self._open.get(id_)) is not None and survey.pending.pop(rank, None) is not None:
            survey.answers.append(answer)
            survey.heard.add(rank)
            if not survey.pending:
                self._conclude(survey, now)

    def _answered(self, rank: int, note: dict[str, Any], now: float) -> None:
        survey = self._open.get(note["id"])
        if survey is None:
            return
        heard, silent = ranks_of(note["heard"]), [_silent_of(one) for one in note["silent"]]
        if survey.pending.pop(rank, None) is None:
            return
        survey.answers.append(note["answer"])
        survey.heard |= heard
        survey.silent.update((one.rank, one) for one in silent)
        if not survey.pending:
            self._conclude(survey, now)

    def _conclude(self, survey: _Survey, now: float) -> None:
        del self._open[survey.id]
        for rank in survey.pending:
            if rank != self._channel.rank:
                self._silent_at[rank] = now
            survey.silent[rank] = self._silence(rank, now)
        answer = self._subject.merge(survey.answers)
        silent = tuple(survey.silent.values())
        if survey.origin is not None:
            found = {
                "is": "answer",
                "id": survey.id,
                "heard": runs_of(survey.heard),
                "silent": silent,
                "answer": answer,
            }
            self._channel.send_note(survey.origin, json.dumps(found).encode())
            return
        is_mirrored, heard = self._links.place.is_mirrored, runs_of(survey.heard)
        verdict = Verdict(survey.id, is_mirrored, self._channel.rank, survey.above, heard, silent, answer)
        self._tell(json.dumps({"is": "verdict", **verdict._asdict()}).encode(), verdict)

    def _tell(self, data: bytes, verdict: Verdict) -> None:
        for rank in self._links.place.children:
            if (child := self._links.connections.get(rank)) is not None:
                self._channel.send_note(child, data)
        self._ack_by = self._verdict_by = math.inf
        self._subject.told(verdict)

    def _silence(self, rank: int, now: float) -> Silent:
        if rank == self._channel.rank:
            return Silent(rank, HELD_UP, _OWN_S, [])
        links, place = self._links, self._links.place
        connection = links.connections.get(rank)
        if place.residents[rank].format != FORMAT:
            how = NO_SURVEYS
        elif connection is not None:
            how = SILENT
        else:
            how = links.ended.get(rank) or (LOST if rank in links.away else NOT_THERE)
        seconds = now - connection.heard_at if connection is not None else 0.0
        below = _below(place.all_parents, rank) if rank in place.children else set[int]()
        return Silent(rank, how, round(seconds, 1), runs_of(below))

    def _is_silent(self, neighbour: Connection) -> bool:
        """Whether it was silent at the last survey, and has sent nothing since."""
        return neighbour.heard_at < self._silent_at.get(neighbour.rank, -math.inf)

    def _deadline(self, now: float) -> float:
        return now + max(self._patience_s(self._channel.rank), _OWN_S)

    def _patience_s(self, rank: int) -> float:
        """The wait for the answers below a rank: longer at the top, so that a parent can report who is silent."""
        if (height := self._heights.get(rank, -1)) < 0:
            parents, level, height = self._links.place.all_parents, {rank}, 0
            while level := {other for other, parent in enumerate(parents) if parent in level}:
                height += 1
            self._heights[rank] = height
        return self._leaf_s + _HOP_S * (height - 1) if height else 0.0


_ASK = json.dumps({"is": "ask"}).encode()


class Combined(NamedTuple):
    """Both trees' verdicts. silent: by rank. behind: ranks that are not heard because a silent one hides them."""

    heard: set[int]
    silent: dict[int, Silent]
    behind: set[int]
    answer: Any


def combined(verdicts: Iterable[Verdict], size: int, merge: Callable[[list[Any]], Any]) -> Combined:
    """Of a rank that one tree has not heard, what the other has heard; of one that neither has, the surer reason."""
    all_ = list(verdicts)
    heard = set[int]().union(*(ranks_of(one.heard) for one in all_))
    silent: dict[int, Silent] = {}
    for one in all_:
        for other in (*one.silent, *filter(None, [one.above])):
            before = silent.get(other.rank)
            if other.rank not in heard and (before is None or _sureness(other) < _sureness(before)):
                silent[other.rank] = other
    behind = set(range(size)) - heard - silent.keys()
    return Combined(heard, silent, behind, merge([one.answer for one in all_]))


def _sureness(silent: Silent) -> int:
    return _SUREST_FIRST.index(silent.how) if silent.how in _SUREST_FIRST else len(_SUREST_FIRST)


def _verdict_of(note: dict[str, Any], is_mirrored: bool) -> Verdict:
    """Raises the errors of malformed JSON."""
    above = _silent_of(note["above"]) if note["above"] is not None else None
    silent = tuple(_silent_of(one) for one in note["silent"])
    heard = runs_of(ranks_of(note["heard"]))
    return Verdict(str(note["id"])[:40], is_mirrored, int(note["root"]), above, heard, silent, note["answer"])


def _silent_of(told: list[Any]) -> Silent:
    rank, how, seconds, behind = told
    return Silent(int(rank), str(how)[:40], float(seconds), runs_of(ranks_of(behind)))


_MOST_RANKS = 1 << 20


def runs_of(ranks: Iterable[int]) -> Runs:
    """Ranks as [first, last] of each run."""
    found = []
    for _, pairs in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        found.append([run[0], run[-1]])
    return found


def ranks_of(runs: Runs) -> set[int]:
    """Raises ValueError if these cannot be ranks of a job."""
    found = set[int]()
    for first, last in runs:
        if not 0 <= first <= last < _MOST_RANKS:
            raise ValueError("no ranks")
        found.update(range(first, last + 1))
    return found


def _below(parents: list[int], rank: int) -> set[int]:
    """All ranks below one."""
    found, level = set[int](), {rank}
    while level := {other for other, parent in enumerate(parents) if parent in level}:
        found |= level
    return found
