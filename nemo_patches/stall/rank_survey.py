"""Asks where every rank is: by surveys over the side channel, or by notes in the job's store for unreachable ranks.

Every rank answers the others' surveys. While not all have joined the channel there is nobody to ask; and a network may
block its ports. Then a rank that wants to know leaves a note in the store, of what it would answer, and reads the
others'; it takes the note back once it goes on.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from ..channel import keys
from ..channel.presence import add_bit, ranks_with_bit
from ..channel.side_channel import SideChannel
from ..channel.store_client import StoreClient, StoreRequest
from ..channel.survey import NOT_THERE, Silent, Verdict, combined
from ..sync.events import Group
from .found import Found
from .progress import Progress
from .rank_state import RankState, StateGroup, answer_of, decoded, encoded, groups_of, merged

_LOOK_S, _LOOK_PER_RANK_S = 5.0, 0.002  # a look takes no longer
_ASK_AGAIN_S = 0.5
_READ_AGAIN_S = 0.5
_MOST_NOTES, _MOST_SURVEYS = 64, 32


@dataclass(eq=False)
class Look:
    """One request for all ranks' places. The stall monitor's thread writes it; the store's threads write `in_store`."""

    began: float
    ends_at: float
    found: Found
    is_done: bool = False
    verdicts: list[Verdict] = field(default_factory=list)
    in_store: _InStore | None = None
    request: StoreRequest | None = None
    asked_at: float = 0.0
    read_at: float = 0.0


@dataclass(frozen=True)
class _InStore:
    """The notes in the store."""

    present: frozenset[int]
    notes: tuple[Any, ...]
    are_all: bool  # whether each present rank has a note, as far as they were read


class RankSurvey:
    """The stall monitor's thread writes the fields; the channel's thread calls `asked`, `merge` and `told`."""

    def __init__(
        self,
        group: Group,
        channel: SideChannel,
        progress: Progress,
        client: StoreClient,
        make_state: Callable[[], RankState],
        wake: Callable[[], None],
        heard: Callable[[Found], None],
    ) -> None:
        """heard: gets the result of every survey, including those that other ranks asked for."""
        self._group, self._channel, self._progress, self._client = group, channel, progress, client
        self._make_state, self._wake, self._heard = make_state, wake, heard
        self._replies = queue.SimpleQueue[tuple[str, Callable[[Any], None]]]()
        self._verdicts = queue.SimpleQueue[Verdict]()
        self._asked_at: dict[str, float] = {}  # surveys, and when this rank was asked in each
        self._looks: list[Look] = []  # unfinished ones
        self._noted_at = 0.0  # since when this rank has a note in the store
        self._patience_s = _LOOK_S + group.size * _LOOK_PER_RANK_S

    # The channel's thread.

    def asked(self, id_: str, reply: Callable[[Any], None]) -> None:
        self._replies.put((id_, reply))
        self._wake()

    def merge(self, answers: list[Any]) -> Any:
        return merged(answers)

    def told(self, verdict: Verdict) -> None:
        self._verdicts.put(verdict)
        self._wake()

    # The stall monitor's.

    def look(self) -> Look:
        """Begin a look."""
        now = time.monotonic()
        own = self._make_state()
        look = Look(now, now + self._patience_s, Found(self._group.size, groups_of(answer_of(own), self._group.size)))
        self._looks.append(look)
        if not self._channel.is_whole or not self._channel.has_surveys:
            self._leave_note(own, look)
        self._step(look, now)
        return look

    def tick(self, now: float) -> None:
        """Answer surveys, and take the results that have come."""
        self._answer(now)
        while not self._verdicts.empty():
            verdict = self._verdicts.get()
            asked_at = self._asked_at.get(verdict.id, 0.0)
            for look in self._looks:
                if asked_at >= look.began:  # otherwise the answer may be older than this look
                    look.verdicts.append(verdict)
                else:
                    look.asked_at = 0.0
            self._heard(self._found([verdict], None, None))
        for look in self._looks:
            self._step(look, now)
        self._looks = [look for look in self._looks if not look.is_done]
        if self._noted_at and self._progress.moved_at > self._noted_at:
            self._noted_at = 0.0
            self._client.ask(lambda store: store.set(keys.NOTE.format(rank=self._group.rank), ""))

    @property
    def is_busy(self) -> bool:
        """Whether a look is under way."""
        return bool(self._looks)

    def cancel(self) -> None:
        """Drop all looks: nobody waits for their results."""
        self._looks = []

    def _answer(self, now: float) -> None:
        """Answer all surveys that have asked until now, with one answer that is newer than their questions."""
        replies = []
        while not self._replies.empty():
            replies.append(self._replies.get())
        if not replies:
            return
        for id_, _ in replies:
            self._asked_at[id_] = now
        while len(self._asked_at) > _MOST_SURVEYS:
            del self._asked_at[next(iter(self._asked_at))]
        answer = answer_of(self._make_state())
        for _, reply in replies:
            reply(answer)

    def _step(self, look: Look, now: float) -> None:
        has_surveys = self._channel.has_surveys and self._channel.is_joined
        if has_surveys and now >= look.asked_at + _ASK_AGAIN_S and not self._both_have_come(look):
            look.asked_at = now
            self._channel.ask()
        look.found = found = self._found(look.verdicts, look.in_store, look.request)
        if found.is_complete or now >= look.ends_at:
            look.is_done = True
        elif has_surveys and not self._both_have_come(look):
            return
        elif has_surveys and not self._out_of_reach(found):
            look.is_done = True
        else:
            self._read_notes(look, found, now)

    def _both_have_come(self, look: Look) -> bool:
        return len({verdict.is_mirrored for verdict in look.verdicts}) == 2

    def _out_of_reach(self, found: Found) -> set[int]:
        """Ranks that may have left a note."""
        return set(found.behind) | {rank for rank, one in found.silent.items() if one.how == NOT_THERE}

    def _found(self, verdicts: list[Verdict], in_store: _InStore | None, request: StoreRequest | None) -> Found:
        size, rank = self._group.size, self._group.rank
        residents = tuple(self._channel.residents)
        notes = list(in_store.notes) if in_store is not None else []
        if verdicts:
            heard, silent, _, answer = combined(verdicts, size, merged)
        else:
            heard, silent, answer = set[int](), dict[int, Silent](), []
        own = answer_of(self._make_state()) if rank not in heard else []
        groups = groups_of(merged([answer, own]), size)
        heard = {one for group in groups for one in group.ranks}
        noted = groups_of(merged(notes), size)
        groups += tuple(
            StateGroup(ranks, group.of(ranks[0]))
            for group in noted
            if (ranks := tuple(one for one in group.ranks if one not in heard))
        )
        heard |= {one for group in groups for one in group.ranks}
        silent = {one: why for one, why in silent.items() if one not in heard}
        rest = frozenset(range(size)) - heard - silent.keys()
        absent = frozenset[int]()
        if not residents and in_store is not None:
            absent = rest - in_store.present
        found = Found(size, groups, silent, rest - absent, absent, residents)
        if request is None:
            return found
        return replace(found, trouble=request.trouble(), store_is_unreachable=request.is_unreachable)

    def _leave_note(self, own: RankState, look: Look) -> None:
        rank, note = self._group.rank, encoded(answer_of(own))
        self._noted_at = time.monotonic()

        def leave(store: dist.Store) -> None:
            store.set(keys.NOTE.format(rank=rank), note)
            add_bit(store, keys.NOTED, rank)
            self._read(store, look, set(range(self._group.size)) - {rank})

        look.request, look.read_at = self._client.ask(leave), time.monotonic()

    def _read_notes(self, look: Look, found: Found, now: float) -> None:
        """Read again and again, until all ranks have written theirs: slow ranks may need seconds."""
        asks = look.request is not None and not look.request.is_done
        if look.in_store is not None and look.in_store.are_all and not asks:
            look.is_done = True
        elif not asks and now >= look.read_at + _READ_AGAIN_S:
            wanted = set(range(self._group.size)) - found.heard - found.silent.keys() | self._out_of_reach(found)
            look.request, look.read_at = self._client.ask(lambda store: self._read(store, look, wanted)), now

    def _read(self, store: dist.Store, look: Look, wanted: set[int]) -> None:
        """Runs in a thread for the store."""
        size = self._group.size
        present = ranks_with_bit(store, keys.PRESENT, size)
        noted = sorted(ranks_with_bit(store, keys.NOTED, size) & wanted)[:_MOST_NOTES]
        data = store.multi_get([keys.NOTE.format(rank=rank) for rank in noted]) if noted else []
        notes = tuple(note for note in map(decoded, data) if note)
        before = look.in_store.notes if look.in_store is not None else ()
        heard = {rank for group in groups_of(merged((*before, *notes)), size) for rank in group.ranks}
        are_all = present & wanted <= heard or len(noted) == _MOST_NOTES
        look.in_store = _InStore(frozenset(present), (*before, *notes), are_all)
