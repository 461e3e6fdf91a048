"""The verdict over all evidence of a job, whatever its sources.

Causes before consequences, numbers before kinds, own before hearsay, later before earlier. A place explains, and never
accuses. Nobody whom any fact shows waiting is accused; what contradicts is printed with both citations, and takes the
accusation away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from nemo_patches.stall import judge as seats
from nemo_patches.stall.judge import Judgement, Seat
from nemo_patches.stall.rank_text import CHECKPOINT, is_guess, named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import (
    CAUSES,
    CONSEQUENCES,
    Account,
    accounts_of,
    fate_kind,
    first_of,
    is_before,
)
from nemo_patches.tools.diagnose.facts import (
    ABORTED,
    AT_START,
    CUT,
    ENDED,
    FAILED,
    GONE,
    KILLED,
    MISSING,
    RAISED,
    SILENT,
    STOPPED,
    STUCK,
    TERMINATED,
    TRACED,
    UNREADABLE,
    UNSEEN,
    WAITED,
    Evidence,
    Fact,
    Fate,
)
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding, Report
from nemo_patches.tools.diagnose.verdicts import (
    ENDING,
    Wait,
    absent,
    cited,
    evidence_of,
    finding,
    inner,
    is_for_memory,
    killed,
    kind_of_absent,
    raised,
    reading_of,
    same_kind,
    title_of,
    who,
)
from nemo_patches.tools.diagnose.ways import apart, further_on, parting

STUCK_AFTER_S = 30.0  # a wait that is younger may end by itself
_HELD = (STOPPED, TRACED)
_OUT = (*_HELD, GONE, ENDED, KILLED, RAISED, SILENT, MISSING, UNSEEN)


@dataclass(frozen=True)
class Ruling:
    """What it comes to. goes_on: the job does, as `text` says. is_too_early: its waits are young; look again."""

    findings: tuple[Finding, ...] = ()
    text: str = ""
    goes_on: bool = False
    is_too_early: bool = False


@dataclass
class _Case:
    accounts: dict[int, Account]
    evidence: Evidence
    world_size: int
    stuck_after_s: float
    contradictions: list[str] = field(default_factory=list)

    def __getitem__(self, rank: int) -> Account:
        return self.accounts.get(rank) or Account(rank)

    @property
    def unseen(self) -> list[int]:
        """Ranks of which nothing is known."""
        told = {rank for rank, one in self.accounts.items() if one.fate or one.place or one.seats}
        return [rank for rank in range(self.world_size) if rank not in told]

    @property
    def waiting(self) -> list[Account]:
        """Who stands in a collective, by what was seen of it last."""
        return [
            one
            for one in self.accounts.values()
            if one.place_value.collective and not one.moved and one.fate_kind not in (*_HELD, *CAUSES)
        ]


def judge(evidence: Evidence, source: str = "", stuck_after_s: float = STUCK_AFTER_S) -> Report:
    """The report over all of it. stuck_after_s: of ranks that were looked at twice, from when on a wait is a hang."""
    ruling = rule(evidence, stuck_after_s)
    hangs = ruling.findings or (() if ruling.goes_on else tuple(evidence.hangs))
    findings = _ordered([*hangs, *(_following(one, hangs) for one in evidence.findings)])
    if not findings and not ruling.goes_on:
        findings = (_not_enough(evidence),) if not _is_healthy(evidence) else ()
    return Report(
        folder=source,
        world_size=evidence.world_size,
        moving=evidence.moving,
        runs=evidence.runs,
        verdict=findings[0].text if findings else ruling.text or " ".join(("Nothing found.", *evidence.summary)),
        next_step=findings[0].next_step if findings else "",
        findings=findings,
        ranks=tuple(evidence.ranks),
        problems=tuple(evidence.problems[:20]),
        earlier=tuple(evidence.earlier[:20]),
        summary=tuple(evidence.summary),
    )


def _following(one: Finding, hangs: tuple[Finding, ...]) -> Finding:
    """What followed from a source's own verdict on the hang follows from the one over all evidence."""
    return replace(one, because=hangs[0].id if hangs else "") if one.because else one


def rule(evidence: Evidence, stuck_after_s: float = STUCK_AFTER_S) -> Ruling:
    """Who is the reason that the job ended or hangs, as far as the evidence tells; or that it goes on."""
    accounts = accounts_of(evidence)
    most = max([*accounts, *(rank for ranks in evidence.groups.values() for rank in ranks)], default=-1) + 1
    case = _Case(accounts, evidence, max(evidence.world_size, most), stuck_after_s)
    causes = _causes(case)
    hang = _by_numbers(case)
    if not hang.findings:
        hang = _by_places(case)
    if causes:
        if not any(one.ranks for one in causes):  # whose it was is not told: the launcher's tables may help
            causes += _by_launcher(case, of_ranks_that_waited=True)
        explained = {rank for one in causes for rank in one.ranks}
        rest = [one for one in hang.findings if not set(one.ranks) <= explained]
        return Ruling((*causes, *(replace(one, because=causes[0].id, severity=WARNING) for one in rest)))
    if hang.findings or hang.goes_on:
        return _with_contradictions(hang, case)
    ends = _by_ends(case)
    return _with_contradictions(ends if ends.findings else hang, case)


def _with_contradictions(ruling: Ruling, case: _Case) -> Ruling:
    if not case.contradictions or not ruling.findings:
        return ruling
    first, *rest = ruling.findings
    first = replace(first, evidence=(*case.contradictions[:4], *first.evidence))
    return replace(ruling, findings=(first, *rest))


def _ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(
        sorted(findings, key=lambda one: (bool(one.because), one.severity != CRITICAL, ids.ORDER.index(one.id)))
    )


def _is_healthy(evidence: Evidence) -> bool:
    """Whether all ended in good order; or a source tells of the job, and of no rank that anything is amiss with."""
    if not evidence.facts:
        return bool(evidence.summary)
    kinds = {fact.value.kind for fact in evidence.facts if isinstance(fact.value, Fate)}
    return bool(kinds) and kinds <= {ENDED}


def _not_enough(evidence: Evidence) -> Finding:
    looked_for = f" Looked for: {'; '.join(evidence.looked_for)}." if evidence.looked_for else ""
    if not evidence.facts:
        return finding(ids.NOT_ENOUGH, f"Nothing is recognised.{looked_for}")
    told = {fact.rank for fact in evidence.facts}
    unseen = sorted(set(range(evidence.world_size)) - told)
    of_others = f"; of {named(unseen)} nothing is told" if unseen else ""
    text = f"Of {named(sorted(told))} something is told, and nothing that decides{of_others}."
    return finding(ids.NOT_ENOUGH, text + looked_for, evidence=evidence_of(accounts_of(evidence).values()))


# 1. Who ended for a reason of its own.


def _causes(case: _Case) -> list[Finding]:
    """The first exception, and the ranks that have the same; else who was killed. None after others waited in vain."""
    # A closed connection is told of by whoever comes to write first, be it the rank that closed it or another.
    time_outs = [fact for one in case.accounts.values() for fact in one.fates if fate_kind(fact) == WAITED and fact.at]
    facts = [
        one.fate
        for one in case.accounts.values()
        if one.fate is not None and one.fate_kind in CAUSES and not any(is_before(t, one.fate) for t in time_outs)
    ]
    if not facts:
        return []
    firsts = first_of(facts)
    found = []
    exceptions = [fact for fact in firsts if fate_kind(fact) == RAISED]
    for first in _apart_by_error(exceptions)[:4]:
        alike = [fact.rank for fact in facts if fate_kind(fact) == RAISED and _error(fact) == _error(first)]
        others = [one for rank, one in case.accounts.items() if rank not in alike]
        found.append(raised([case[rank] for rank in sorted(alike)], first, others[:4]))
    of_kill = [fact for fact in firsts if fate_kind(fact) == KILLED]
    for some in ([fact for fact in of_kill if is_for_memory(fact)], [f for f in of_kill if not is_for_memory(f)]):
        if some:
            others = [one for one in case.accounts.values() if one.fate not in some]
            found.append(killed([case[fact.rank] for fact in some], some, others[:4]))
    return found


def _error(fact: Fact) -> tuple[str, str]:
    """What tells errors apart: the type, and the innermost frame; their words differ from rank to rank."""
    assert isinstance(fact.value, Fate)
    return fact.value.text.partition(":")[0], fact.value.where.partition(" < ")[0]


def _apart_by_error(facts: list[Fact]) -> list[Fact]:
    """The first fact of each error."""
    by_error: dict[tuple[str, str], Fact] = {}
    for fact in sorted(facts, key=lambda one: (one.at, one.rank)):
        by_error.setdefault(_error(fact), fact)
    return list(by_error.values())


# 2. Numbers: records of which collectives each rank has entered.


def _by_numbers(case: _Case) -> Ruling:
    groups = case.evidence.groups
    facts = {
        (seat.group, seat.number, fact.rank): fact
        for fact in case.evidence.facts
        if isinstance(seat := fact.value, Seat) and fact.rank in groups.get(seat.group, ())
    }
    known = (fact.value for fact in facts.values() if isinstance(fact.value, Seat))
    judged = seats.judge(known, groups, case.evidence.begins)
    order = (seats.MISSING, seats.OUT_OF_STEP, seats.SIZES, seats.CROSSED, seats.ALL_IN, seats.OLDER)
    found = []
    for one in sorted(judged, key=lambda each: order.index(each.id)):
        found += _of_judgement(one, case, facts)
    if found and case.unseen:
        text = f"Nothing is known of {named(case.unseen)}: it left no record, or its files are elsewhere."
        found.append(finding(ids.NOT_SEEN, text))
    return Ruling(tuple(found))


def _of_judgement(one: Judgement, case: _Case, facts: dict[tuple[str, int, int], Fact]) -> list[Finding]:
    title = title_of(one.seat)
    there = [facts[one.seat.group, one.seat.number, rank] for rank in one.waiting]
    evidence = [cited(fact, title_of(fact.value)) for fact in there if isinstance(fact.value, Seat)]
    if one.id == seats.MISSING:
        step = reading_of(_most_told(there), case.evidence.patched)[1]
        wait = Wait(one.waiting, title, seat=one.seat)
        behind = {rank: last for rank in one.accused if (last := _pending(case, rank, one.seat, facts))}
        accused = [
            case[rank] for rank in one.accused if rank not in behind and not _has_come_since(case, rank, one, there[0])
        ]
        if not accused and behind:
            return [_behind(behind, wait, evidence)]
        found = _grouped(accused, wait, [*(_last_entered(account) for account in accused), *evidence])
        return [replace(each, next_step=f"{each.next_step} {step}".strip()) for each in found]
    if one.id == seats.OUT_OF_STEP:
        return [_out_of_step(_by_title(there), evidence)]
    if one.id == seats.SIZES:
        told = "; ".join(f"{title} on {named(ranks)}" for title, ranks in _by_title(there).items())
        return [finding(ids.SIZES, f"The ranks give the same collective different sizes: {told}.", evidence=evidence)]
    if one.id == seats.CROSSED:
        have = "has" if len(one.absent) == 1 else "have"
        text = (
            f"Ranks wait in collectives of different groups: {named(one.waiting)} in {title}, and {named(one.absent)}, "
            f"which {have} not entered that, in one of another group. Which rank is missing, this does not tell."
        )
        return [finding(ids.CROSSED, text, evidence=evidence)]
    if one.id == seats.ALL_IN and one.seat.group in case.evidence.partly_known:
        return []  # that nobody is missing is not known
    if one.id == seats.ALL_IN:
        unseen = f"; nothing is known of {named(case.unseen)}" if case.unseen else ""
        text = f"All {len(one.waiting)} ranks have entered {title}, and none has completed it{unseen}."
        return [finding(ids.ALL_IN, text, evidence=evidence)]
    came = f"{named(one.absent)} came to it after {'its' if len(one.absent) == 1 else 'their'} own"
    text = f"The records were not made at one time: {title} was completed, so {came}."
    return [finding(ids.NOT_ENOUGH, text, next_step="Take the dumps of all ranks while the job hangs.")]


def _last_entered(account: Account) -> str:
    """What it has entered last, of any group."""
    facts = [(fact.at, fact.value.number, fact) for fact in account.seats if isinstance(fact.value, Seat)]
    if not facts:
        return f"rank {account.rank}: no collective of it is known"
    *_, last = max(facts, key=lambda one: one[:2])
    return cited(last, f"its last collective: {title_of(last.value)}") if isinstance(last.value, Seat) else ""


def _most_told(facts: Iterable[Fact]) -> Seat:
    """Of one collective's seats the one that tells most."""
    known = [fact.value for fact in facts if isinstance(fact.value, Seat)]
    return max(known, key=lambda seat: (bool(seat.kind), bool(seat.size)))


def _pending(case: _Case, rank: int, seat: Seat, facts: dict[tuple[str, int, int], Fact]) -> Fact | None:
    """The earlier collective of that group in which it waits itself, if it does: one that has ended for nobody."""
    own = [
        fact.value.number
        for fact in case[rank].seats
        if isinstance(fact.value, Seat) and fact.value.group == seat.group
    ]
    last = facts.get((seat.group, max((number for number in own if number < seat.number), default=-1), rank))
    if last is None or not isinstance(last.value, Seat) or last.value.done is not False:
        return None
    there = (facts.get((seat.group, last.value.number, other)) for other in case.evidence.groups[seat.group])
    has_ended = any(fact and isinstance(fact.value, Seat) and fact.value.completed for fact in there)
    return None if has_ended else last


def _behind(behind: dict[int, Fact], wait: Wait, evidence: list[str]) -> Finding:
    titles = {rank: title_of(fact.value) for rank, fact in behind.items() if isinstance(fact.value, Seat)}
    text = f"All wait, and their collectives have drifted apart: {named(behind)} in {next(iter(titles.values()))}, "
    text += f"{named(wait.ranks)} in {wait.title}."
    lines = [cited(fact, titles[rank]) for rank, fact in behind.items()]
    return finding(ids.SKIPPED, text, evidence=[*lines, *evidence])


def _has_come_since(case: _Case, rank: int, one: Judgement, there: Fact) -> bool:
    """Whether another fact shows the rank waiting, or going on; the contradiction is kept."""
    account = case[rank]
    waits = account.motion if account.moved else account.waits
    if waits is None:
        return False
    place = account.place_value
    since = ": it has come since" if same_kind(one.seat.kind, place.collective) else ""
    what = f"it waits in {place.seat}{since}" if place.collective else f"it waited ({account.fate_value.text})"
    what = f"it goes on ({account.moved_by})" if account.moved else what
    entered = f"rank {rank} had not entered {title_of(one.seat)}"
    case.contradictions.append(f"contradiction: by {there.cite} {entered}; by {waits.cite} {what}")
    return True


def _by_title(facts: Iterable[Fact]) -> dict[str, list[int]]:
    """By what it is, who is in it; the smallest party first."""
    parties: dict[str, list[int]] = defaultdict(list)
    for fact in facts:
        if isinstance(fact.value, Seat):
            parties[f"{fact.value.kind or 'a collective'} {fact.value.size}".strip()].append(fact.rank)
    return dict(sorted(parties.items(), key=lambda item: len(item[1])))


def _grouped(accused: Sequence[Account], wait: Wait | None, evidence: Iterable[str] = ()) -> list[Finding]:
    """A finding for each kind of absent rank."""
    by_kind: dict[str, list[Account]] = defaultdict(list)
    for account in accused:
        by_kind[kind_of_absent(account)].append(account)
    found = [absent(kind, accounts, wait) for kind, accounts in by_kind.items()]
    return [replace(one, evidence=tuple(dict.fromkeys((*one.evidence, *evidence)))[:12]) for one in found]


def _out_of_step(parties: dict[str, list[int]], evidence: Iterable[str], why: str = "") -> Finding:
    sizes = [len(ranks) for ranks in parties.values()]
    odd = next(iter(parties.values())) if sizes[0] < sizes[-1] else []
    is_ = "is the odd one" if len(odd) == 1 else "are the odd ones"
    remark = f" {why}" if why else f" {named(odd)} {is_} out.".replace(" rank", " Rank", 1) if odd else ""
    told = "; ".join(f"{named(ranks)} in {title}" for title, ranks in parties.items())
    return finding(
        ids.OUT_OF_STEP, f"The ranks are in different collectives, so none can end: {told}.{remark}", evidence=evidence
    )


# 3. Kinds: where each rank was seen, by stacks, by others' stall reports, by what found it at its end.


def _by_places(case: _Case) -> Ruling:
    accounts = case.accounts
    waiting = case.waiting
    seen = [one for one in accounts.values() if one.place or one.fate_kind in (*_OUT, UNREADABLE)]
    if not seen:
        return Ruling()
    over = all(one.fate_kind in (GONE, ENDED) for one in accounts.values())
    if over and not any(one.place_value.where for one in seen) and not case.unseen:
        return Ruling(text="The job has ended: none of its processes is there any more.", goes_on=True)
    moving = [one for one in seen if one.moved]
    # Who has ended its script is missing where others wait; else it waits itself, with a collective pending.
    others_wait = [one for one in waiting if one.place_value.activity != ENDING]
    waiting = others_wait or waiting
    unreadable = [one for one in seen if one.fate_kind == UNREADABLE]
    if len(unreadable) == len(seen):
        text = f"None of {len(seen)} ranks could be read: {unreadable[0].fate_value.text}"
        return Ruling((finding(ids.NOT_ENOUGH, text),))
    if not waiting:
        return _nobody_waits(case, seen, moving)
    if any(one.place_value.collective for one in moving) and len(moving) + 1 >= len(seen):
        return _goes_on(moving)
    # Who moves from one collective to the next goes on; the others wait for nobody that is known.
    going = {one.rank for one in moving if one.place_value.collective}
    unseen = set(range(case.world_size)) - {one.rank for one in seen}
    members = [rank for rank in range(case.world_size) if rank not in going and rank not in unseen]
    kinds = {one.rank: "" if is_guess(one.place_value.collective) else one.place_value.seat for one in waiting}
    out = [rank for rank in members if rank not in kinds and accounts[rank] not in unreadable]
    if out and len(set(kinds.values())) > 1:  # who is outside every collective comes first, whatever the others are in
        kinds = dict.fromkeys(kinds, "")
    judged = seats.judge((Seat(rank, "job", 1, kind) for rank, kind in kinds.items()), {"job": members})
    ruling = _of_places(judged[0] if judged else None, case, waiting, sorted(unseen))
    return _aged(ruling, waiting, case)


def _of_places(one: Judgement | None, case: _Case, waiting: list[Account], unseen: list[int]) -> Ruling:
    who, evidence = named([each.rank for each in waiting]), evidence_of(case.accounts.values())
    title = waiting[0].place_value.seat
    if one is not None and one.id == seats.MISSING:
        accused = [case[rank] for rank in one.accused]
        if unreadable := [each for each in accused if each.fate_kind == UNREADABLE]:
            text = f"{named([each.rank for each in unreadable])} could not be read: {unreadable[0].fate_value.text}"
            return Ruling((finding(ids.NOT_ENOUGH, text, evidence=evidence),))
        accused = [each for each in accused if not _waited_by_its_end(case, each, waiting[0])]
        wait = Wait(tuple(sorted(each.rank for each in waiting)), _titles(waiting), still_s=_still_s(waiting))
        return Ruling(tuple(_grouped(accused, wait, evidence)))
    if unseen:
        are = "is" if len(waiting) == 1 else "are"
        text = f"{who} {are} in {title}; nothing is known of {named(unseen)}, whose hosts may not be collected yet."
        return Ruling((finding(ids.NOT_SEEN, text, evidence=evidence),))
    if one is not None and one.id == seats.OUT_OF_STEP:
        return Ruling((_different(waiting, evidence),))
    return Ruling((_all_in(waiting, evidence),))


def _different(waiting: list[Account], evidence: list[str]) -> Finding:
    parties: dict[str, list[Account]] = defaultdict(list)
    for each in waiting:
        parties[each.place_value.seat].append(each)
    ordered = dict(sorted(parties.items(), key=lambda item: len(item[1])))
    first, *_, last = ordered.values()
    why = further_on(first, last)
    found = _out_of_step({title: [one.rank for one in ranks] for title, ranks in ordered.items()}, evidence, why.text)
    return replace(found, id=why.id or found.id) if why.text else found


def _all_in(waiting: list[Account], evidence: list[str]) -> Finding:
    """All wait: in the same, as far as a stack tells."""
    seat = next((one.place_value.seat for one in waiting if not is_guess(one.place_value.collective)), "")
    if steps := apart(waiting):
        text = f"Every rank waits, and they are not at the same step: {steps}."
        return finding(ids.SKIPPED, text, evidence=evidence)
    if any(is_guess(one.place_value.collective) for one in waiting):
        text = "Every rank waits, at least one of them for the GPU: a stack does not tell for which collective."
        step = (
            "Ask NCCL (`nemo-patches diagnose --ras HOST`), or dump the Flight Recorder: numbers tell who is missing."
        )
        return finding(ids.NOT_ENOUGH, text, evidence=evidence, next_step=step)
    if ways := parting(waiting):
        text = (
            f"Every rank waits in {seat}, and they came to it by different ways: {ways}. Possibly these are not the "
            "same call, and one rank is ahead."
        )
        return finding(ids.SKIPPED, text, evidence=evidence)
    text = f"Every rank waits in the same collective, {seat}: one is a call ahead, or the network has failed."
    return finding(ids.ALL_IN, text, evidence=evidence)


def _nobody_waits(case: _Case, seen: list[Account], moving: list[Account]) -> Ruling:
    bad = [one for one in seen if one.fate_kind in (*_HELD, GONE, SILENT)]
    stuck = [one for one in seen if one.place and _is_still(one, case.stuck_after_s)]
    evidence = evidence_of(seen)
    if not bad and len(stuck) == len(seen) > 1 and not case.unseen:
        places = sorted({one.place_value.worker or one.place_value.where for one in stuck})
        least = min(one.still_s or 0.0 for one in stuck)
        where = f"all are in {places[0]}" if len(places) == 1 else f"they are in {'; '.join(places[:3])}"
        text = f"No rank is in a collective, and none has moved for {least:.0f} s: {where}."
        return Ruling((finding(ids.NO_RANK_MOVES, text, evidence=evidence),))
    if bad:
        if not moving and all(one.fate_kind in (GONE, SILENT) for one in bad) and not any(one.place for one in seen):
            return Ruling()  # how they ended, if anything tells it, is the better answer
        return Ruling(tuple(_grouped(bad, None, evidence)))
    if stuck and not moving:
        return Ruling(tuple(_grouped(stuck, None, evidence)))
    if moving:
        return _goes_on(moving)
    return Ruling()


def _is_still(one: Account, stuck_after_s: float) -> bool:
    return one.was_looked_at_twice and not one.moved and (one.still_s or 0.0) >= stuck_after_s


def _goes_on(moving: list[Account]) -> Ruling:
    who, how = named([one.rank for one in moving]), f" ({moving[0].moved_by})" if moving[0].moved_by else ""
    text = f"No rank is stuck: {who} went on between the looks{how}."
    return Ruling(text=text[0].upper() + text[1:], goes_on=True)


def _aged(ruling: Ruling, waiting: list[Account], case: _Case) -> Ruling:
    """Where the waits are young, no hang yet; where each rank was seen once, a hang by this moment's look only."""
    if not ruling.findings:
        return ruling
    first, *rest = ruling.findings
    least = _still_s(waiting)
    if least is not None and least < case.stuck_after_s and any(one.was_looked_at_twice for one in waiting):
        text = f"So far no hang: {first.text[0].lower()}{first.text[1:]} Look again if it lasts."
        return Ruling(text=text, goes_on=True, is_too_early=True)
    works = [case[rank] for rank in first.ranks]
    if (
        works
        and all(one.moved or one.place_value.activity == CHECKPOINT for one in works)
        and any(one.moved for one in works)
    ):
        text = f"{first.text[:-1]}; it works, and may come."
        first = replace(first, text=text, severity=WARNING)
    held = any(case[rank].fate_kind in (*_HELD, *CAUSES, GONE) for rank in first.ranks)
    is_moment = all(one.place is not None and one.place.own and not one.was_looked_at_twice for one in waiting)
    if is_moment and not held:
        more = "One look at each rank cannot tell a hang from a slow step; look again: who has moved is not stuck."
        first = replace(first, text=f"At the moment of these stacks: {first.text[0].lower()}{first.text[1:]} {more}")
    return replace(ruling, findings=(first, *rest))


def _waited_by_its_end(case: _Case, one: Account, waiting: Account) -> bool:
    """Whether the error that ended it shows it waiting for others, too."""
    waits = one.waits
    if waits is None or one.fate_kind not in CONSEQUENCES:
        return False
    cite = waiting.place.cite if waiting.place is not None else ""
    waited = f"it waited ({one.fate_value.text})"
    case.contradictions.append(
        f"contradiction: by {cite} rank {one.rank} is in no collective; by {waits.cite} {waited}"
    )
    return True


def _titles(waiting: list[Account]) -> str:
    titles = sorted({one.place_value.seat for one in waiting})
    return titles[0] + (f" (and {len(titles) - 1} other places)" if len(titles) > 1 else "")


def _still_s(waiting: list[Account]) -> float | None:
    return min((one.still_s for one in waiting if one.still_s is not None), default=None)


# 4. Ends alone: ranks whose connections closed, or whose time ran out, and nobody is known to be missing.

_NOT_COME = (GONE, SILENT, UNSEEN, MISSING, ENDED)


def _by_ends(case: _Case) -> Ruling:
    waited = [one for one in case.accounts.values() if one.fate_kind == WAITED]
    cut = [one for one in case.accounts.values() if one.fate_kind == CUT]
    evidence = evidence_of(case.accounts.values())
    if not waited and not cut:
        stuck = _stuck(case)
        return Ruling((*stuck, *_by_launcher(case, of_ranks_that_waited=bool(stuck))))
    kinds = _NOT_COME if waited else (GONE, SILENT, MISSING)
    suspects = [one for one in case.accounts.values() if one.fate_kind in kinds and one.waits is None]
    if suspects:
        ended = [one.rank for one in (waited or cut)]
        how = "waited until a time limit" if waited else "had their connections closed"
        found = _grouped(suspects, None, evidence)
        more = f" {who(ended)} {how}."
        return Ruling(tuple(replace(one, text=one.text + more[:1] + more[1].upper() + more[2:]) for one in found))
    if all(one.fate_value.text.startswith(AT_START) for one in (*waited, *cut)):
        return Ruling((_start_up([*waited, *cut], evidence, case), *_by_launcher(case, of_ranks_that_waited=True)))
    what, step = _collective_of(waited, case)
    ends = "; ".join(
        f"{who(one.rank for one in some)} {how}"
        for some, how in ((waited, f"waited {what} until a time limit"), (cut, "had a connection closed"))
        if some
    )
    unseen = _unseen_text(case)
    text = f"{ends}: another rank did not come, or had gone before. Which one, this does not tell{unseen}."
    seats_of = [
        cited(fact, title_of(fact.value)) for one in waited for fact in one.seats if isinstance(fact.value, Seat)
    ]
    lines = [*seats_of[:8], *evidence]
    found = [finding(ids.WAITED_IN_VAIN, text[0].upper() + text[1:], evidence=lines, next_step=step)]
    return Ruling((*found, *_by_launcher(case, of_ranks_that_waited=True)))


def _unseen_text(case: _Case) -> str:
    return f"; nothing is known of {named(case.unseen)}" if case.evidence.world_size and case.unseen else ""


def _start_up(waited: list[Account], evidence: list[str], case: _Case) -> Finding:
    ranks, told = who(one.rank for one in waited), waited[0].fate_value.text.removeprefix(f"{AT_START}: ")
    text = f"The job did not start: {ranks} waited for the process group in vain, and training had not begun. "
    rank = "It" if len(waited) == 1 else who([waited[0].rank])
    return finding(
        ids.START_UP, f"{text}{rank[0].upper()}{rank[1:]} says: {told}{_unseen_text(case)}.", evidence=evidence
    )


def _collective_of(waited: list[Account], case: _Case) -> tuple[str, str]:
    """What they waited in, if that is the same for all of which it is known; and what to do then."""
    facts = [fact for one in waited for fact in one.seats if isinstance(fact.value, Seat) and fact.value.kind]
    if not facts:
        fate = waited[0].fate_value if waited else Fate("")
        at = f" in {inner(fate.where)}" if fate.where else ""
        return f"for others{at}" + (f" ({fate.text})" if fate.text else ""), ""
    seat = _most_told(facts)
    if len({fact.value.group for fact in facts if isinstance(fact.value, Seat)}) > 1:
        return "in collectives of several groups", ""
    remark, step = reading_of(seat, case.evidence.patched)
    return f"in {title_of(seat)}{f', {remark},' if remark else ''}", step


def _stuck(case: _Case) -> list[Finding]:
    stuck = [one for one in case.accounts.values() if one.fate_kind == STUCK]
    if not stuck:
        return []
    ranks = [one.rank for one in stuck]
    text = (
        f"The NCCL watchdog of {who(ranks)} got stuck, and no collective timed out: a call of CUDA or NCCL does not "
        "return, or something holds Python's lock. Perhaps it waits for another rank."
    )
    return [finding(ids.STUCK_WATCHDOG, text, evidence=evidence_of(stuck))]


def _by_launcher(case: _Case, of_ranks_that_waited: bool = False) -> tuple[Finding, ...]:
    """Who failed first by the launcher's tables. of_ranks_that_waited: a code of 1 may be that of such a rank."""
    facts = [fact for one in case.accounts.values() for fact in one.fates if fate_kind(fact) in (FAILED, ABORTED)]
    firsts = [fact for fact in first_of(facts) if not fact.own]
    if not firsts:
        gone = [one for one in case.accounts.values() if one.fate_kind == GONE and one.fate and not one.fate.own]
        return () if of_ranks_that_waited else tuple(_grouped(gone, None)) or _ended_by_others(case)
    ranks = sorted({fact.rank for fact in firsts})
    first = firsts[0]
    assert isinstance(first.value, Fate)
    lines = [cited(fact, fact.value.text) for fact in firsts if isinstance(fact.value, Fate)]
    if len(ranks) > 1:
        text = f"{who(ranks)} failed in the same second, {first.value.text}: which was first, it does not tell."
        return (finding(ids.FIRST_FAILURE, text, (), lines),)
    text = f"{who(ranks)} failed first, {first.value.text} [{first.cite}]."
    if may_have_waited := fate_kind(first) == ABORTED or of_ranks_that_waited:
        text += " It may be one that waited: a rank ends so when a collective's time limit has passed."
    return (finding(ids.FIRST_FAILURE, text, () if may_have_waited else ranks, lines, case[ranks[0]]),)


def _ended_by_others(case: _Case) -> tuple[Finding, ...]:
    fates = [fact for one in case.accounts.values() for fact in one.fates]
    facts = [fact for fact in fates if fate_kind(fact) == TERMINATED and not fact.own]
    if not facts:
        return ()
    text = f"{who(fact.rank for fact in facts)} ended by SIGTERM or the like [{facts[0].cite}], and no record tells of "
    text += "a failure before: a user, the scheduler, or another host's launcher ended the job."
    lines = [cited(fact, fact.value.text) for fact in facts[:8] if isinstance(fact.value, Fate)]
    return (finding(ids.FIRST_FAILURE, text, evidence=lines, next_step="Look who ended it: the scheduler's log."),)
