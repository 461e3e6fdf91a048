"""Which ranks are missing, by the encoder calls that each rank has reached, where other facts show
that ranks wait.

A rank is accused only if its own record is complete, and never for a round of the length sync that
it has reached. If all ranks have left the encoder, the hang is outside it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from nemo_patches.text import named
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import CONSEQUENCES, Account, Hearing
from nemo_patches.tools.diagnose.endings import Ending
from nemo_patches.tools.diagnose.facts import Call
from nemo_patches.tools.diagnose.findings import WARNING, Finding, Ruling
from nemo_patches.tools.diagnose.verdicts import capital, doings, evidence_of, finding

OF_ALL = (ids.OUTSIDE, ids.ALL_INSIDE, ids.STOPPED_AT_ONCE)  # ids that accuse nobody
LONG_S = 10.0  # in a call: longer than healthy ranks wait for each other
_PHASES = {ids.LENGTH_SYNC: "in the length sync", ids.LAYERS: "after the length sync"}
_KNOWN_ENDS = (fates.RAISED, *CONSEQUENCES, fates.TERMINATED, fates.ENDED)


@dataclass(frozen=True)
class _Standing:
    """One rank, and its last call of one encoder."""

    account: Account
    call: Call

    @property
    def rank(self) -> int:
        return self.account.rank

    @property
    def ending(self) -> Ending:
        return self.call.ending

    @property
    def kind(self) -> str:
        return self.account.fate_kind

    @property
    def waited(self) -> bool:
        """Whether the error that ended it shows that it waited."""
        return self.kind in CONSEQUENCES and not self.account.fate.text.startswith(
            fates.SYNC_ENDED
        )

    @property
    def has_no_end(self) -> bool:
        return self.kind not in _KNOWN_ENDS or self.account.fate.text.startswith(
            fates.SYNC_ENDED
        )

    @property
    def runs(self) -> bool:
        return any(fact.fate_kind == fates.RUNS for fact in self.account.fates)

    @property
    def in_good_order(self) -> bool:
        return (
            self.kind == fates.ENDED
            and not self.ending.phase
            and not self.account.fate.exit_code
        )


_Some = list[_Standing]


@dataclass(frozen=True)
class _Ranks:
    """All ranks whose last call of one encoder is known. explained: see Evidence."""

    hearing: Hearing
    all: _Some
    sure: _Some
    explained: frozenset[int]

    @property
    def are_all(self) -> bool:
        return len(self.all) >= self.hearing.world_size

    @property
    def timed_out(self) -> bool:
        return any(one.kind == fates.WAITED for one in self.all)

    @property
    def closed(self) -> bool:
        """Whether connections were closed, and no time limit had passed."""
        return any(one.waited for one in self.all) and not self.timed_out

    @property
    def reporting(self) -> _Some:
        """Ranks whose stall monitors have reported the stall that the records end in."""
        return [
            one
            for one in self.all
            if one.account.motion_fact is not None and not one.account.moved
        ]

    def having(self, test: Callable[[_Standing], bool]) -> _Some:
        return [one for one in self.all if test(one)]


def by_calls(hearing: Hearing) -> Ruling:
    found: list[Finding] = []
    for encoder in dict.fromkeys(
        name for one in hearing.accounts.values() for name in one.calls
    ):
        standings = [
            _Standing(one, one.calls[encoder])
            for one in hearing.accounts.values()
            if encoder in one.calls
        ]
        sure = [one for one in standings if not one.ending.unsure]
        explained = frozenset(hearing.evidence.explained.get(encoder, ()))
        found += _of_encoder(_Ranks(hearing, standings, sure, explained), encoder)
    # Where ranks differ in one encoder, that they are level in another one is no finding.
    unequal = [one for one in found if one.id not in OF_ALL]
    inside = [one for one in found if one.id == ids.ALL_INSIDE]
    return Ruling(tuple(unequal or inside or found[:1]))


def _of_encoder(ranks: _Ranks, encoder: str) -> list[Finding]:
    """By stall reports, then by how processes ended, then by rounds that were given up. Without any
    of these, ranks at different calls are no evidence: a healthy job that is killed looks like
    that.
    """
    if not any(one.ending.call for one in ranks.all):
        return []
    reported = [
        account
        for account in ranks.hearing.accounts.values()
        if _is_reported(account, encoder)
    ]
    if accused := [
        _Standing(one, _standing_call(one, encoder))
        for one in reported
        if not _is_excused(one, ranks)
    ]:
        return _by_reports(ranks, accused)
    if any(one.kind == fates.RAISED for one in ranks.sure):
        return []  # judge.py names the exception
    known = [
        one
        for one in ranks.all
        if (not one.ending.unsure or one.ending.lost_last)
        and one.rank not in ranks.explained
        and not _waits(one)
    ]
    if not any(one.rank not in ranks.explained for one in ranks.sure):
        return []
    for look in (_left_in_a_collective, _waited_for_in_vain, _gone):
        if suspects := look(ranks, known):
            others = _at_top([one for one in ranks.sure if one not in suspects])
            if look is _waited_for_in_vain and 2 * len(suspects) > len(ranks.all):
                return [
                    _not_level(others, suspects)
                ]  # rather one that went on than so many that are held up
            return _grouped(ranks, suspects, others or suspects)
    if ranks.explained or ranks.hearing.evidence.moving:
        return []
    if ranks.closed or ranks.having(
        lambda one: one.ending.sync_ended and one.kind == fates.TERMINATED
    ):
        return _ended_by_nobody_known(ranks)
    if (
        ranks.reporting
        or ranks.timed_out
        or ranks.having(lambda one: one.runs or one.call.since_s is not None)
    ):
        return _level(ranks)
    return _stopped_at_once(ranks)


def _by_reports(ranks: _Ranks, accused: _Some) -> list[Finding]:
    others = _at_top([one for one in ranks.all if not one.call.reported])
    if (
        not others
    ):  # all report each other: the rank that is furthest has not held the others up
        others = _at_top([one for one in ranks.all if one.ending.call])
        accused = [one for one in accused if one not in others] or accused
    return _grouped(ranks, accused, others)


def _standing_call(account: Account, encoder: str) -> Call:
    no_trace = Call(
        encoder,
        "its first encoder call",
        Ending(account.rank, unsure="it has no trace here"),
    )
    return account.calls.get(encoder, no_trace)


def _is_reported(account: Account, encoder: str) -> bool:
    """Whether others report the rank missing; if it has no trace, for whichever encoder."""
    return account.reported is not None and (
        not account.calls or _standing_call(account, encoder).reported
    )


def _is_excused(account: Account, ranks: _Ranks) -> bool:
    """Whether a rank that others report missing has waited itself, or was ended by others."""
    has_left = account.reported is not None and account.reported.fate_kind == fates.GONE
    # If another missing rank has raised an exception, the launcher probably ended this one.
    others = [
        one
        for one in ranks.hearing.accounts.values()
        if one is not account and one.reported is not None
    ]
    raised = any(one.fate_kind == fates.RAISED for one in others)
    by_others = has_left and (account.fate_kind == fates.TERMINATED or raised)
    return (
        by_others
        or account.waits is not None
        or account.moved
        or account.rank in ranks.explained
    )


def _waits(one: _Standing) -> bool:
    """Not any more once it has ended in good order: what it was in was at the moment of a
    report.
    """
    return not one.in_good_order and (
        one.account.moved or bool(one.account.place.collective)
    )


def _top(some: Iterable[_Standing]) -> tuple[int, int]:
    return max((one.ending.position for one in some), default=(0, 0))


def _at_top(some: _Some) -> _Some:
    top = _top(some)
    return [one for one in some if one.ending.position == top]


def _left_in_a_collective(ranks: _Ranks, known: _Some) -> _Some:
    """The ranks that others waited for in a collective until an error ended them."""
    waited = ranks.having(lambda one: one.waited)
    rest = [one for one in known if not one.waited]
    if not waited or not ranks.are_all:
        return []
    if ranks.timed_out:
        seen = [one for one in rest if not one.has_no_end]
        return seen if any(one.ending.position < _top(waited) for one in seen) else rest
    return _gone_first(ranks, rest)


def _gone_first(ranks: _Ranks, rest: _Some) -> _Some:
    """Of the ranks that did not wait as far as is known, those that left before connections were
    closed.

    Ranks ended by SIGTERM are victims; prefer a rank without a recorded end.
    """
    top = _top(ranks.all)
    if left := [one for one in rest if one.kind == fates.ENDED and _is_early(one, top)]:
        return left
    no_end = [one for one in rest if one.has_no_end]
    if no_end:
        return no_end if len(no_end) == 1 or _are_whole_hosts(ranks, no_end) else []
    return [one for one in rest if one.kind != fates.TERMINATED]


def _are_whole_hosts(ranks: _Ranks, some: _Some) -> bool:
    """Whether these are all ranks of their hosts. Of several ranks without a recorded end only
    whole hosts are named: SIGTERM leaves no stack where a job has replaced its handler.
    """
    inside = {one.rank for one in some}
    hosts = [
        {one.account.host for one in ranks.all if (one.rank in inside) == which}
        for which in (True, False)
    ]
    return not hosts[0] & hosts[1]


def _is_early(one: _Standing, top: tuple[int, int]) -> bool:
    """Whether the rank's interpreter ended before the training did."""
    return one.ending.position < top or bool(one.account.fate.exit_code)


def _waited_for_in_vain(ranks: _Ranks, known: _Some) -> _Some:
    """The ranks that have not reached a round of the length sync that others gave up."""
    waited = [
        one.ending for one in ranks.sure if one.ending.in_vain or one.ending.sync_ended
    ]
    ended = any(ending.sync_ended for ending in waited)
    return [
        one
        for one in known
        if any(
            one.ending.position < other.position and one.ending.came_to < other.round
            for other in waited
        )
        and not one.waited
        and not (one.kind == fates.TERMINATED and ended)
    ]


def _gone(ranks: _Ranks, known: _Some) -> _Some:
    """The ranks that ended, or have no recorded end, where others' length sync ended because a rank
    had gone.
    """
    if not any(one.ending.sync_ended for one in ranks.sure) or not ranks.are_all:
        return []
    rest = [
        one
        for one in known
        if not (one.ending.sync_ended or one.ending.raised or one.waited)
    ]
    top = _top(one for one in ranks.sure if one.rank not in ranks.explained)
    return [
        one
        for one in _gone_first(ranks, rest)
        if not one.in_good_order or one.ending.position < top
    ]


def _grouped(ranks: _Ranks, suspects: _Some, others: _Some) -> list[Finding]:
    groups: dict[tuple[str, bool], _Some] = defaultdict(list)
    for one in suspects:
        groups[
            _why(ranks, one, others), one.rank in ranks.hearing.evidence.perhaps_missing
        ].append(one)
    return [
        replace(found, severity=WARNING) if perhaps else found
        for (kind, perhaps), some in groups.items()
        if kind != ids.EXCEPTION  # judge.py tells of causes
        for found in [_absent(ranks, kind, some, others)]
    ]


def _why(ranks: _Ranks, one: _Standing, others: _Some) -> str:
    reported = one.account.reported
    kind = (reported.fate_kind or ids.MISSING_RANK) if reported is not None else ""
    if kind and (one.ending.unsure or (kind == fates.UNSEEN and not one.ending.call)):
        return ids.MISSING_RANK  # others report it, and more is not known
    if one.kind == fates.RAISED:
        return ids.EXCEPTION
    if one.kind == fates.ENDED:
        return ids.ENDED
    if kind == fates.SILENT:
        return ids.SILENT
    went_on = (
        any(other.ending.sync_ended for other in others) and not one.ending.sync_ended
    )
    not_told = one.has_no_end and any(
        other.kind == fates.TERMINATED for other in others
    )
    if (
        kind == fates.GONE or (not kind and (went_on or ranks.closed or not_told))
    ) and not one.runs:
        return ids.KILLED
    return (
        ids.SOME_INSIDE
        if one.ending.phase and not one.ending.unsure
        else ids.MISSING_RANK
    )


def _usual(some: _Some) -> _Standing:
    """The first with the call number that most have."""
    number = Counter(one.ending.call for one in some).most_common(1)[0][0]
    return next(one for one in some if one.ending.call == number)


def _absent(ranks: _Ranks, kind: str, some: _Some, others: _Some) -> Finding:
    first, usual = some[0], _usual(others)
    who, theirs = named([one.rank for one in some]), named([one.rank for one in others])
    it_is, it_has = ("It is", "It has") if len(some) == 1 else ("They are", "They have")
    waits = "waits" if len(others) == 1 else "wait"
    went = f"{usual.call.title}, which {theirs} {_went(others)}"
    is_inside = kind == ids.SOME_INSIDE
    if is_inside and not any(one.ending.phase for one in others):
        why = f"{capital(theirs)} came out of it"
    elif is_inside or (
        first.ending.position >= usual.ending.position and not first.ending.unsure
    ):
        why = f"{it_is} not in the collective that {theirs} {waits} in"
    elif first.ending.unsure and not any(
        one.ending.phase == ids.LENGTH_SYNC for one in others
    ):
        why = f"{it_is} not where {theirs} {waits}, after {went}"
    else:
        there, here = usual.ending.call, first.ending.call + 1
        number = (
            f" (call {there} there, {here} here)"
            if there != here and not first.ending.unsure
            else ""
        )
        why = f"{it_has} not entered {went}{number}"
    text = f"{who}: {_doing(kind, some, ranks)}. {why}."
    found = _finding(kind, text, some, [*some, *others[:2]])
    if first.ending.unsure:
        return replace(found, call=usual.ending.call)
    # Report the call that these ranks have not entered.
    call = found.call + (
        not first.ending.phase and first.ending.position < others[0].ending.position
    )
    if kind in (ids.ENDED, ids.MISSING_RANK) and 0 < first.call.behind_since < call:
        call = first.call.behind_since
        it_has, it = ("It has", "it") if len(some) == 1 else ("They have", "they")
        more = (
            f" {it_has} been behind since call {call}, which {it} skipped, or came to"
            " too late."
        )
        found = replace(found, text=found.text + more)
    return replace(found, call=call)


def _doing(kind: str, some: _Some, ranks: _Ranks) -> str:
    first, is_one = some[0], len(some) == 1
    told = doings([one.account for one in some])
    at = ""
    if kind == ids.SOME_INSIDE:
        told = told or "stuck there, or killed"
        return f"inside {first.call.title}, {_PHASES[first.ending.phase]}; {told}"
    if kind == ids.KILLED:
        if first.kind == fates.FAILED:
            return (
                f"{'it' if is_one else 'they'} failed {_where(first)}:"
                f" {first.account.fate.text}"
            )
        they_were, their_end = (
            ("it was", "its end") if is_one else ("they were", "their ends")
        )
        return (
            f"{they_were} killed or crashed {_where(first)}: no record tells of"
            f" {their_end}"
        )
    if kind == ids.SILENT:
        at = f"; {'its trace stops' if is_one else 'their traces stop'} {_where(first)}"
    if kind == ids.MISSING_RANK and not told:
        they_are, their, were = (
            ("it is", "its", "was") if is_one else ("they are", "their", "were")
        )
        or_killed = (
            ""
            if first.account.reported is not None or first.runs
            else f", or {were} killed there"
        )
        told = (
            f"{they_are} stuck before the encoder, in {their} data or"
            f" elsewhere{or_killed}"
        )
    if kind == ids.MISSING_RANK and first.ending.unsure:
        at = f"; {first.ending.unsure}"
    return told + at


def _where(one: _Standing) -> str:
    if one.ending.phase:
        return f"{_PHASES[one.ending.phase]} of {one.call.title}"
    return (
        f"after {one.call.title}"
        if one.ending.call
        else "before its first encoder call"
    )


def _went(others: _Some) -> str:
    inside = sum(bool(one.ending.phase) for one in others)
    if not inside:
        return "went through"
    is_ = "is" if len(others) == 1 else "are"
    return f"{is_} in" if inside == len(others) else f"{is_} in or through"


def _finding(
    kind: str, text: str, some: _Some, told: _Some, severity: str = ""
) -> Finding:
    """About the ranks in `some`. told: the ranks whose last records are evidence."""
    lines = [*(one.call.last for one in told[:4] if one.call.last)]
    if vain := sorted(one.rank for one in told if one.ending.in_vain):
        lines.append(f"waited in vain for its round: {named(vain)}")
    if gone := sorted(one.rank for one in told if one.ending.sync_ended):
        lines.append(
            f"the length sync has ended, because a rank has gone, on {named(gone)}"
        )
    lines += evidence_of(one.account for one in told)
    first = some[0]
    found = finding(
        kind, text, [one.rank for one in some], lines, some[0].account, severity
    )
    return replace(
        found,
        encoder=first.call.encoder,
        call=first.ending.call,
        phase=first.ending.phase,
    )


def _level(ranks: _Ranks) -> list[Finding]:
    """The job hangs, and no rank stands out by its records."""
    if len(ranks.sure) < ranks.hearing.world_size:
        return []  # a rank of which nothing is known may be the reason
    at_top = _at_top(ranks.sure)
    behind = [one for one in ranks.sure if one not in at_top and not one.waited]
    inside = [one for one in at_top if one.ending.phase]
    outside = [one for one in at_top if not one.ending.phase]
    reporting = ranks.reporting
    reported = all(one in reporting for one in at_top)
    went_on = not reported and (
        reporting or any((one.call.since_s or LONG_S) < LONG_S for one in at_top)
    )
    if went_on and (behind or inside):
        return _stopped_at_once(
            ranks
        )  # a healthy job looks the same: the ranks ahead moved a moment ago
    if behind and not reported:
        return _grouped(ranks, behind, at_top)
    if inside and outside and not reported:
        return [_absent(ranks, ids.SOME_INSIDE, inside, outside)]
    if not behind and all(one.ending.in_vain for one in at_top):
        # The last rank to reach a round does not wait in vain: some trace is incomplete
        return []
    return [_of_equals(ranks, at_top[0].call.title, inside, outside, behind)]


def _not_level(ahead: _Some, behind: _Some) -> Finding:
    """All wait as far as is known, and some are calls ahead."""
    who, others = (
        named([one.rank for one in ahead]),
        named([one.rank for one in behind]),
    )
    is_ = "is" if len(ahead) == 1 else "are"
    text = (
        f"{who} {is_} at {_usual(ahead).call.title}, {others} at call"
        f" {_usual(behind).ending.call}: {who} went on "
    )
    text += (
        "without a collective that the others wait in (a skipped backward, a swallowed"
        " exception, one batch more), "
    )
    text += "or the others are held up. No record says which."
    return replace(
        _finding(ids.SKIPPED, text, ahead, [*ahead[:2], *behind[:2]]),
        ranks=(),
        phase="",
    )


def _of_equals(
    ranks: _Ranks, call: str, inside: _Some, outside: _Some, behind: _Some
) -> Finding:
    everyone = f"All {len(ranks.sure)} ranks"
    if inside and not outside and not behind:
        there = [one for one in inside if one.ending.phase == ids.LENGTH_SYNC] or inside
        which = _PHASES[there[0].ending.phase]
        if len(there) < len(inside):
            which = f"{named([one.rank for one in there])} {which}"
        text = f"{everyone} are inside {call}, {which}, and none has come out."
        return _finding(ids.ALL_INSIDE, text, there, there)
    if behind:
        return _not_level([one for one in ranks.sure if one not in behind], behind)
    if inside:
        text = (
            f"{everyone} wait, some in {call} and some after it, and no record says for"
            " whom."
        )
        return replace(_finding(ids.OUTSIDE, text, ranks.sure, ranks.sure), phase="")
    text = (
        f"{everyone} have come out of {call}, and none has entered another: if they"
        " hang, it is outside the encoder."
    )
    # A job that decodes or writes for long, and calls no encoder, looks the same, unless a rank was
    # seen to wait.
    severity = "" if ranks.hearing.evidence.saw_a_wait or ranks.timed_out else WARNING
    return _finding(ids.OUTSIDE, text, ranks.sure, ranks.sure, severity)


def _stopped_at_once(ranks: _Ranks) -> list[Finding]:
    """Ranks without a recorded end, and no record of a wait in vain: nobody is accused."""
    stopped = ranks.having(lambda one: one.has_no_end or one.kind == fates.TERMINATED)
    if not stopped or ranks.having(
        lambda one: one.ending.in_vain or one.ending.sync_ended
    ):
        return []
    if len(stopped) < len(ranks.all) and all(one.ending.unsure for one in stopped):
        return []  # incomplete files of a job whose other ranks have recorded their ends
    by_signal = [one.rank for one in stopped if one.kind == fates.TERMINATED]
    how = f"SIGTERM ended {named(by_signal)}" if by_signal else "no trace says how"
    who, have = (
        named([one.rank for one in stopped]),
        "has" if len(stopped) == 1 else "have",
    )
    which = (
        "All ranks stop"
        if len(stopped) == ranks.hearing.world_size
        else f"{who} {have} stopped"
    )
    text = (
        f"{which} at or near {_usual(_at_top(ranks.all)).call.title}, {how}: the job"
        " was ended as a whole, or it still runs. No record shows that a rank waited"
        " for another one in vain, so none is accused."
    )
    return [_of_nobody(text, ranks)]


def _ended_by_nobody_known(ranks: _Ranks) -> list[Finding]:
    """Connections were closed, or SIGTERM or Ctrl-C ended ranks, and no record shows a rank that
    left before.
    """
    if not ranks.are_all:
        return []  # a rank of which there is no trace may have gone first
    terminated = [one.rank for one in ranks.all if one.kind == fates.TERMINATED]
    closed = [one.rank for one in ranks.all if one.waited]
    why = [f"SIGTERM, or Ctrl-C, ended {named(terminated)}"] if terminated else []
    why += [f"the connections of {named(closed)} were closed"] if closed else []
    who = (
        "somebody ended the job, or a part of it"
        if terminated
        else "the network was lost, or a rank left unseen"
    )
    if no_end := [one.rank for one in ranks.all if one.has_no_end and not one.runs]:
        each, have = ("one of them", "have") if len(no_end) > 1 else ("it", "has")
        who += f", or {each} was killed or crashed first: {named(no_end)} {have} no end"
    text = (
        f"At or near {_usual(_at_top(ranks.all)).call.title} {', and '.join(why)}:"
        f" {who}. No rank is accused."
    )
    return [_of_nobody(text, ranks)]


def _of_nobody(text: str, ranks: _Ranks) -> Finding:
    return replace(
        _finding(ids.STOPPED_AT_ONCE, text, ranks.all, ranks.all),
        ranks=(),
        call=0,
        phase="",
    )
