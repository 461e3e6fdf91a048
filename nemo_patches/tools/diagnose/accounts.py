"""Accounts: for each rank, which of its facts count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose.facts import (
    NOT_TOLD,
    Call,
    Evidence,
    Fact,
    Fate,
    Member,
    Motion,
    Place,
)

CAUSES = frozenset({fates.RAISED, fates.KILLED, fates.NODE})
CONSEQUENCES = frozenset({fates.WAITED, fates.CUT, fates.PASSED_ON})
HELD = (fates.STOPPED, fates.TRACED)
GONE_FATES = (
    CAUSES
    | CONSEQUENCES
    | {fates.TERMINATED, fates.ENDED, fates.FAILED, fates.GONE, fates.ABORTED}
)
_THERE = frozenset({fates.RUNS, fates.STOPPED, fates.TRACED})
_NOT_HEARD = frozenset({fates.SILENT, fates.UNSEEN, fates.MISSING, fates.GONE})
# Causes before consequences, what is known before what is not.
_RANKED = (
    *(
        fates.RAISED,
        fates.KILLED,
        fates.NODE,
        fates.STOPPED,
        fates.TRACED,
        fates.WAITED,
        fates.CUT,
    ),
    *(fates.PASSED_ON, fates.STUCK),
    *(
        fates.ABORTED,
        fates.TERMINATED,
        fates.ENDED,
        fates.FAILED,
        fates.GONE,
        fates.SILENT,
        fates.MISSING,
    ),
    *(
        fates.UNSEEN,
        fates.UNREADABLE,
        fates.LOGGED,
        fates.UNRESOLVED,
        fates.HEARD,
        fates.RUNS,
    ),
)


@dataclass
class Account:
    """One rank, with the fact of each kind that counts; all fates and seats are kept, to find
    contradictions.
    """

    rank: int
    fate_fact: Fact | None = None
    place_fact: Fact | None = None
    motion_fact: Fact | None = None
    member_fact: Fact | None = None
    reported: Fact | None = None
    call: Call | None = None
    fates: list[Fact] = field(default_factory=list)
    seats: list[Fact] = field(default_factory=list)

    @property
    def fate_kind(self) -> str:
        return self.fate.kind

    @property
    def fate(self) -> Fate:
        return _value_of(self.fate_fact, _NO_FATE)

    @property
    def place(self) -> Place:
        return _value_of(self.place_fact, _NO_PLACE)

    @property
    def motion(self) -> Motion:
        return _value_of(self.motion_fact, _NO_MOTION)

    @property
    def moved(self) -> bool:
        return self.motion.moved

    @property
    def still_s(self) -> float | None:
        return self.motion.still_s

    @property
    def was_looked_at_twice(self) -> bool:
        return self.motion_fact is not None

    @property
    def member(self) -> Member:
        return _value_of(self.member_fact, _NO_MEMBER)

    @property
    def host(self) -> str:
        return self.member_fact.host if self.member_fact is not None else ""

    @property
    def waits(self) -> Fact | None:
        """The fact that shows the rank waiting for others, if any: where it is, or the error that
        ended it.
        """
        if self.place.collective and not self.moved:
            return self.place_fact
        ends = (fact for fact in self.fates if fact.fate_kind in CONSEQUENCES)
        return next(ends, None)

    @property
    def position(self) -> tuple[int, int]:
        """Of its last encoder call; (0, 0) where that is not known."""
        return self.call.position if self.call is not None else (0, 0)


_NO_FATE, _NO_PLACE, _NO_MOTION, _NO_MEMBER = Fate(""), Place(), Motion(False), Member()
_Value = TypeVar("_Value", Fate, Place, Motion, Member)


def _value_of(fact: Fact | None, unknown: _Value) -> _Value:
    return (
        fact.value
        if fact is not None and isinstance(fact.value, type(unknown))
        else unknown
    )


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
            if one.fate_fact or one.place_fact or one.seats or one.call
        }
        return [rank for rank in range(self.world_size) if rank not in told]

    def having(self, *kinds: str) -> list[Account]:
        return [one for one in self.accounts.values() if one.fate_kind in kinds]

    def told(self, *kinds: str) -> list[Fact]:
        """All facts of these kinds of fate, of any rank, also those that do not count."""
        return [
            fact
            for one in self.accounts.values()
            for fact in one.fates
            if fact.fate_kind in kinds
        ]

    @property
    def waiting(self) -> list[Account]:
        """Ranks that were last seen in a collective."""
        return [
            one
            for one in self.accounts.values()
            if one.place.collective
            and not one.moved
            and one.fate_kind not in (*HELD, *CAUSES)
        ]


def accounts_of(evidence: Evidence) -> dict[int, Account]:
    """By rank, in rising order."""
    accounts: dict[int, Account] = {}
    for fact in evidence.facts:
        account = accounts.setdefault(fact.rank, Account(fact.rank))
        if _is_missing_by_report(fact):
            account.reported = fact if account.reported is None else account.reported
        if fact.seat is not None:
            account.seats.append(fact)
        elif isinstance(fact.value, Fate):
            account.fates.append(fact)
        elif isinstance(fact.value, Place):
            account.place_fact = _counts(account.place_fact, fact)
        elif isinstance(fact.value, Call):
            account.call = fact.value
        elif isinstance(fact.value, Motion):
            account.motion_fact = _counts(account.motion_fact, fact)
        else:
            account.member_fact = _counts(account.member_fact, fact)
    for account in accounts.values():
        if account.rank != NOT_TOLD:  # facts without a rank may be about several ranks
            account.fates = _that_count(account.fates)
        account.fate_fact = min(
            account.fates,
            key=lambda fact: (_RANKED.index(fact.fate_kind), not fact.own, fact.at),
            default=None,
        )
    return dict(sorted(accounts.items()))


def _is_missing_by_report(fact: Fact) -> bool:
    """Whether another rank reports this one missing from the collective that it waits in."""
    if isinstance(fact.value, Place):
        return not fact.own and not fact.value.collective
    return not fact.own and fact.fate_kind in _NOT_HEARD


def _counts(before: Fact | None, fact: Fact) -> Fact:
    """The rank's own facts before hearsay, then later before earlier; without comparable times, the
    last one read.
    """
    if before is None or fact.own != before.own:
        return fact if before is None or fact.own else before
    return before if 0 < fact.at < before.at else fact


def _that_count(told: list[Fact]) -> list[Fact]:
    """Leave out exceptions that a rank raised after it had waited in vain, which are consequences,
    and hearsay about a rank that is known to be there.
    """
    waited = [fact for fact in told if fact.fate_kind in CONSEQUENCES]
    is_there = any(fact.own and fact.fate_kind in _THERE for fact in told)
    return [
        fact
        for fact in told
        if not (
            fact.fate_kind == fates.RAISED
            and any(is_before(one, fact) for one in waited)
        )
        and not (is_there and not fact.own and fact.fate_kind in _NOT_HEARD)
    ]


def is_before(one: Fact, other: Fact) -> bool:
    """By the same host's clock; False where that is not known."""
    return bool(one.at and other.at) and one.host == other.host and one.at < other.at


def first_of(facts: Iterable[Fact]) -> list[Fact]:
    """The facts of which none is known to have been after another."""
    facts = list(facts)
    return [
        fact for fact in facts if not any(is_before(other, fact) for other in facts)
    ]
