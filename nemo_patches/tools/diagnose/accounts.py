"""Accounts: for each rank, which of its facts count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.rank_facts import (
    MAIN_THREAD,
    NOT_TOLD,
    Condition,
    EncoderCall,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
)

_IS_NO_MORE = (conditions.KILLED, conditions.GONE)


@dataclass
class Account:
    """One rank, with the fact of each kind that counts; all conditions and collectives are kept,
    to find contradictions.
    """

    rank: int
    condition_fact: Fact | None = None
    place_fact: Fact | None = None
    place: Place = field(default_factory=Place)
    motion_fact: Fact | None = None
    motion: Motion = field(default_factory=Motion)
    member_fact: Fact | None = None
    member: ProcessRank = field(default_factory=ProcessRank)
    reported: Fact | None = None  # missing, by another rank
    call: EncoderCall | None = None
    # Of its threads that are in collectives, and the main one.
    at_work: list[Place] = field(default_factory=list)
    conditions: list[Fact] = field(default_factory=list)
    entered: list[Fact] = field(default_factory=list)

    @property
    def condition(self) -> Condition:
        return self.condition_fact.condition if self.condition_fact else Condition("")

    @property
    def moved(self) -> bool:
        return self.motion.moved and self.condition.kind not in _IS_NO_MORE

    @property
    def still_s(self) -> float | None:
        return self.motion.still_s

    @property
    def is_first_hand(self) -> bool:
        """Whether it says itself how it ended."""
        return bool(self.condition_fact and self.condition_fact.own)

    @property
    def is_readable(self) -> bool:
        return self.condition.kind != conditions.UNREADABLE

    @property
    def has_two_at_work(self) -> bool:
        """Whether a second thread is in a collective beside the training's, or beside backward."""
        return any(
            place.thread == MAIN_THREAD
            and (place.collective or place.where.startswith("backward ("))
            for place in self.at_work
        )

    @property
    def waits(self) -> Fact | None:
        """The fact that shows the rank waiting for others, if any: where it is, or the error that
        ended it.
        """
        if self.place.collective and not self.moved:
            return self.place_fact
        ends = (
            fact
            for fact in self.conditions
            if fact.condition_kind in conditions.CONSEQUENCES
        )
        return next(ends, None)

    def take(self, fact: Fact) -> None:
        if not fact.own and fact.is_of_absence:
            self.reported = self.reported or fact
        match fact.value:
            case Entry():
                self.entered.append(fact)
            case Condition():
                self.conditions.append(fact)
            case Place() as place if place.thread:
                self.at_work.append(place)
            case Place() as place:
                if _counts(fact, self.place_fact):
                    self.place_fact = fact
                    self.place = _with_worker(place, self.place)
                else:
                    self.place = _with_worker(self.place, place)
            case Motion() as motion:
                if _counts(fact, self.motion_fact):
                    self.motion_fact = fact
                    self.motion = motion
            case EncoderCall() as call:
                self.call = call
            case ProcessRank() as member:
                if _counts(fact, self.member_fact):
                    self.member_fact = fact
                    self.member = member


@dataclass
class Hearing:
    """All ranks' accounts, and the contradictions between their facts, as they are found."""

    accounts: dict[int, Account]
    evidence: Evidence
    world_size: int
    stuck_after_s: float
    contradictions: list[str] = field(default_factory=list)

    def __getitem__(self, rank: int) -> Account:
        return self.accounts.get(rank) or Account(rank)

    @property
    def unseen(self) -> list[int]:
        told = {
            rank
            for rank, one in self.accounts.items()
            if one.conditions or one.place_fact or one.entered or one.call
        }
        return [rank for rank in range(self.world_size) if rank not in told]

    def having(self, *kinds: str) -> list[Account]:
        return [one for one in self.accounts.values() if one.condition.kind in kinds]

    def told(self, *kinds: str) -> list[Fact]:
        """All facts of these kinds of condition, of any rank, also those that do not count."""
        return [
            fact
            for one in self.accounts.values()
            for fact in one.conditions
            if fact.condition_kind in kinds
        ]


def accounts_of(evidence: Evidence) -> dict[int, Account]:
    """By rank, in rising order."""
    accounts: dict[int, Account] = {}
    for fact in evidence.facts:
        if fact.condition_kind != conditions.HINT:
            accounts.setdefault(fact.rank, Account(fact.rank)).take(fact)
    time_outs = begins_of(
        fact for fact in evidence.facts if fact.condition_kind == conditions.WAITED
    )
    for account in accounts.values():
        account.conditions = [
            _of_dead(f, account, time_outs) for f in account.conditions
        ]
        if account.rank != NOT_TOLD:  # facts without a rank may be about several ranks
            account.conditions = _that_count(account.conditions)
        account.condition_fact = min(
            account.conditions,
            key=lambda fact: (
                conditions.RANKED.index(fact.condition_kind),
                not fact.own,
                fact.at,
            ),
            default=None,
        )
    return dict(sorted(accounts.items()))


def _of_dead(fact: Fact, account: Account, time_outs: Mapping[str, float]) -> Fact:
    """A death of which nobody saw the reason is a kill; after the rank's own time-out it is that
    time-out's consequence. When it was counts only where time-outs came before it.
    """
    if fact.condition_kind != conditions.DIED:
        return fact
    has_waited = any(
        one.condition_kind == conditions.WAITED for one in account.conditions
    )
    is_over = has_waited and account.rank != NOT_TOLD
    kind = conditions.ABORTED if is_over else conditions.KILLED
    is_late = account.rank == NOT_TOLD or is_after(fact, time_outs)
    value = replace(fact.condition, kind=kind)
    return replace(fact, value=value, at=fact.at if is_late else 0.0)


def _counts(fact: Fact, before: Fact | None) -> bool:
    """The rank's own facts before hearsay, then later before earlier; without comparable times, the
    last one read.
    """
    if before is None or fact.own != before.own:
        return before is None or fact.own
    return not 0 < fact.at < before.at


def _with_worker(place: Place, other: Place) -> Place:
    """With the data loader's worker that another report knows, at the same place."""
    is_same = place.where.partition(" < ")[0] == other.where.partition(" < ")[0]
    if place.worker or not is_same:
        return place
    return replace(place, worker=other.worker)


def _that_count(told: list[Fact]) -> list[Fact]:
    """Leave out exceptions that a rank raised after it had waited in vain, which are consequences,
    hearsay about a rank that is known to be there, and the kill of one that was found hung.
    """
    waited = [fact for fact in told if fact.condition_kind in conditions.CONSEQUENCES]
    by_monitor = any(
        fact.condition_text.startswith(conditions.BY_MONITOR) for fact in told
    )
    there = (conditions.RUNS, *conditions.HELD)
    is_there = any(fact.own and fact.condition_kind in there for fact in told)
    return [
        fact
        for fact in told
        if not (
            fact.condition_kind == conditions.RAISED
            and any(is_before(one, fact) for one in waited)
        )
        and not (
            is_there and not fact.own and fact.condition_kind in conditions.NOT_HEARD
        )
        and not (by_monitor and fact.condition_text.startswith("SIGKILL"))
    ]


def is_before(one: Fact, other: Fact) -> bool:
    """By the same host's clock; False where that is not known."""
    return bool(one.at and other.at) and one.host == other.host and one.at < other.at


def first_of(facts: Iterable[Fact]) -> list[Fact]:
    """The facts of which none is known to have been after another."""
    facts = list(facts)
    begins = begins_of(facts)
    return [fact for fact in facts if not is_after(fact, begins)]


def begins_of(facts: Iterable[Fact]) -> dict[str, float]:
    """By host, when the first of these facts was, as far as that is known."""
    begins: dict[str, float] = {}
    for fact in facts:
        if fact.at:
            begins[fact.host] = min(begins.get(fact.host, fact.at), fact.at)
    return begins


def is_after(fact: Fact, begins: Mapping[str, float]) -> bool:
    """Whether any of the facts of begins_of was before it."""
    return bool(fact.at) and begins.get(fact.host, fact.at) < fact.at


def still_s(accounts: Iterable[Account]) -> float | None:
    """For how long all of them have not moved, as far as is known."""
    known = (one.still_s for one in accounts if one.still_s is not None)
    return min(known, default=None)
