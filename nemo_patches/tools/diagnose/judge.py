"""The verdict over all evidence of a job, whatever its sources.

Causes before consequences, numbers before kinds, own before hearsay, later before earlier. A place
explains, and never accuses. Nobody whom any fact shows waiting is accused; what contradicts is
printed with both citations, and takes the accusation away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nemo_patches.text import named
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import (
    CAUSES,
    CONSEQUENCES,
    Account,
    Hearing,
    accounts_of,
    first_of,
    is_before,
)
from nemo_patches.tools.diagnose.by_calls import by_calls
from nemo_patches.tools.diagnose.by_ends import by_ends, by_launcher
from nemo_patches.tools.diagnose.by_numbers import by_numbers
from nemo_patches.tools.diagnose.by_places import HAS_ENDED, by_places
from nemo_patches.tools.diagnose.collect.host_jobs import STUCK_AFTER_S
from nemo_patches.tools.diagnose.facts import (
    ALL_WELL,
    NOT_TOLD,
    Evidence,
    Fact,
    Fate,
    Member,
    Motion,
)
from nemo_patches.tools.diagnose.findings import (
    CRITICAL,
    WARNING,
    Diagnosis,
    Finding,
    Ruling,
)
from nemo_patches.tools.diagnose.verdicts import (
    capital,
    evidence_of,
    finding,
    in_no_collective,
    inner,
    is_for_memory,
    killed,
    node_failed,
    raised,
    who,
)

_MOST_RANKS = 1 << 20  # whatever world size a file claims


def judge(
    evidence: Evidence, source: str = "", stuck_after_s: float = STUCK_AFTER_S
) -> Diagnosis:
    """The report over all of it. stuck_after_s: of ranks that were looked at twice, from when on a
    wait is a hang.
    """
    ruling = rule(evidence, stuck_after_s)
    cause = next((one.id for one in evidence.findings if one.severity == CRITICAL), "")
    hangs = tuple(
        replace(one, severity=WARNING, because=one.because or cause)
        if one.because or cause
        else one
        for one in ruling.findings
    )
    # A finding that followed from its source's own verdict on the hang follows from the verdict
    # over all evidence.
    root = hangs[0].id if hangs else ""
    others = (
        replace(one, because=root) if one.because else one for one in evidence.findings
    )
    findings = _ordered([*hangs, *others])
    if not findings and not ruling.goes_on:
        findings = (_not_enough(evidence),) if not _is_healthy(evidence) else ()
    return Diagnosis(
        folder=source,
        world_size=evidence.world_size,
        verdict=(
            findings[0].text
            if findings
            else ruling.text or " ".join(("Nothing found.", *evidence.summary))
        ),
        next_step=findings[0].next_step if findings else "",
        findings=findings,
        ranks=tuple(evidence.ranks),
        problems=tuple(evidence.problems[:20]),
        earlier=tuple(evidence.earlier[:20]),
        summary=tuple(evidence.summary),
    )


def rule(evidence: Evidence, stuck_after_s: float = STUCK_AFTER_S) -> Ruling:
    """Which ranks are the reason that the job ended or hangs, as far as the evidence shows; or that
    it goes on.
    """
    accounts = accounts_of(evidence)
    most = (
        max(
            [
                *accounts,
                *(rank for ranks in evidence.groups.values() for rank in ranks),
            ],
            default=-1,
        )
        + 1
    )
    hearing = Hearing(
        accounts,
        evidence,
        min(max(evidence.world_size, most), _MOST_RANKS),
        stuck_after_s,
    )
    causes = _causes(hearing)
    hang = by_numbers(hearing)
    if not hang.findings:
        hang = by_places(hearing)
    if not hang.findings and not hang.goes_on:
        hang = by_calls(hearing)
    if causes:
        # The rank is not known: the launcher's tables may name it.
        if not any(one.ranks for one in causes):
            causes += by_launcher(hearing, of_ranks_that_waited=True)
        explained = {rank for one in causes for rank in one.ranks}
        rest = [one for one in hang.findings if not set(one.ranks) <= explained]
        if causes[0].severity == CRITICAL:
            rest = [replace(one, because=causes[0].id) for one in rest]
        return Ruling((*causes, *rest))
    if hang.findings or (hang.goes_on and hang.text != HAS_ENDED):
        return _with_contradictions(hang, hearing)
    ends = by_ends(hearing)
    return _with_contradictions(ends if ends.findings else hang, hearing)


def _with_contradictions(ruling: Ruling, hearing: Hearing) -> Ruling:
    """With what the logs have on the accused rank, too: a thread that died, or a traceback that may
    be its end.
    """
    if not ruling.findings:
        return ruling
    first, *rest = ruling.findings
    for fact in hearing.told(fates.LOGGED):
        if first.ranks and fact.rank not in (*first.ranks, NOT_TOLD):
            continue
        assert isinstance(fact.value, Fate)
        at = f" in {inner(fact.value.where)}" if fact.value.where else ""
        if ", in its thread " in fact.fate_text:
            log = "The log" if fact.rank == NOT_TOLD else f"The log of rank {fact.rank}"
            first = replace(
                first,
                text=f"{first.text} {log} has {fact.fate_text}{at} [{fact.cite}].",
            )
            break
        if first.id == ids.KILLED:
            text = (
                f"{first.text} Or it ended by {fact.fate_text}{at} [{fact.cite}], which"
                " no line ties to a rank."
            )
            first = replace(first, text=text)
            break
    if not hearing.contradictions:
        return replace(ruling, findings=(first, *rest))
    first = replace(first, evidence=(*hearing.contradictions[:4], *first.evidence))
    return replace(ruling, findings=(first, *rest))


def _ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(
        sorted(
            findings,
            key=lambda one: (
                bool(one.because),
                one.severity != CRITICAL,
                ids.ORDER.index(one.id),
            ),
        )
    )


def _is_healthy(evidence: Evidence) -> bool:
    """Whether all ended in good order, or a source knows the job and reports no trouble of any
    rank.
    """
    if not evidence.facts:
        return bool(evidence.summary)
    kinds = {fact.value.kind for fact in evidence.facts if isinstance(fact.value, Fate)}
    says_so = evidence.is_well or ALL_WELL in evidence.summary
    is_well = says_so and all(isinstance(fact.value, Member) for fact in evidence.facts)
    return is_well or (bool(kinds) and kinds <= {fates.ENDED})


def _not_enough(evidence: Evidence) -> Finding:
    looked_for = (
        f" Looked for: {'; '.join(evidence.looked_for)}." if evidence.looked_for else ""
    )
    if not evidence.facts:
        return finding(ids.NOT_ENOUGH, f"Nothing is recognised.{looked_for}")
    told = {fact.rank for fact in evidence.facts}
    unseen = sorted(set(range(min(evidence.world_size, _MOST_RANKS))) - told)
    of_others = f"; of {named(unseen)} nothing is told" if unseen else ""
    lines = evidence_of(accounts_of(evidence).values())
    text = f"Of {who(told)} something is told, and nothing that decides{of_others}."
    if lines:
        text = f"{capital(lines[0])}{of_others}. No line tells more."
        looked_for = ""
    placed = [
        one
        for one in accounts_of(evidence).values()
        if one.place.where and not one.place.collective
    ]
    if placed:
        text = f"{in_no_collective(placed)}: one look at each tells no more{of_others}."
        looked_for = ""
    for fact in evidence.facts:
        if isinstance(fact.value, Motion) and fact.value.moved:
            text = (
                f"{capital(who([fact.rank]))} went on ({fact.value.by}) [{fact.cite}],"
                " and nothing is told after that."
            )
        if isinstance(fact.value, Fate) and fact.value.kind == fates.LOGGED:
            at = f" in {inner(fact.value.where)}" if fact.value.where else ""
            text = (
                f"The log of {who([fact.rank])} has a traceback, {fact.value.text}{at}"
                f" [{fact.cite}], "
            )
            text += "and nothing tells whether it ended the rank or was caught."
    return finding(ids.NOT_ENOUGH, text + looked_for, evidence=lines)


def _causes(hearing: Hearing) -> list[Finding]:
    """The first exceptions and kills. Those that came after another rank had waited in vain are no
    causes.
    """
    # Time-outs only: a closed connection may be logged before the error of the rank that closed it.
    time_outs = [fact for fact in hearing.told(fates.WAITED) if fact.at]
    facts = [
        one.fate_fact
        for one in hearing.accounts.values()
        if one.fate_fact is not None
        and one.fate_kind in CAUSES
        and (
            _is_behind(one, hearing)
            or not any(is_before(t, one.fate_fact) for t in time_outs)
        )
    ]
    if not facts:
        return []
    reported = [fact for fact in facts if hearing[fact.rank].reported is not None]
    firsts = _first_by_calls(first_of(reported or facts), hearing)
    others_are_missing = not reported and any(
        one.reported is not None for one in hearing.accounts.values()
    )
    if hearing.told(fates.NODE):  # the launcher kills what runs on the other nodes
        firsts = [
            fact
            for fact in firsts
            if fact.fate_kind != fates.KILLED or is_for_memory(fact)
        ]
    return [
        *_exceptions(hearing, facts, firsts, others_are_missing),
        *_kills(hearing, firsts),
        *_nodes(hearing),
    ]


def _exceptions(
    hearing: Hearing, facts: list[Fact], firsts: list[Fact], others_are_missing: bool
) -> Iterator[Finding]:
    """facts: all that show a cause. firsts: those of them that no other is known to have
    preceded.
    """
    for first in _apart_by_error(
        [fact for fact in firsts if fact.fate_kind == fates.RAISED]
    )[:4]:
        alike = [
            fact.rank
            for fact in facts
            if fact.fate_kind == fates.RAISED and _error(fact) == _error(first)
        ]
        others = [one for rank, one in hearing.accounts.items() if rank not in alike]
        one = raised([hearing[rank] for rank in sorted(alike)], first, others[:4])
        went_on = _was_caught(
            hearing[first.rank],
            [each for each in others if each.fate_fact not in facts],
        )
        yield replace(one, severity=WARNING) if others_are_missing or went_on else one


def _kills(hearing: Hearing, firsts: list[Fact]) -> Iterator[Finding]:
    """One finding for kills for want of memory, and one for all others."""
    of_kill = [fact for fact in firsts if fact.fate_kind == fates.KILLED]
    for for_memory in (True, False):
        if some := [fact for fact in of_kill if is_for_memory(fact) == for_memory]:
            others = [
                one for one in hearing.accounts.values() if one.fate_fact not in some
            ]
            yield killed([hearing[fact.rank] for fact in some], some, others[:4])


def _nodes(hearing: Hearing) -> Iterator[Finding]:
    facts = hearing.told(fates.NODE)
    if facts:
        others = [
            one
            for one in hearing.accounts.values()
            if one.fate_kind not in ("", fates.NODE)
        ]
        yield node_failed(facts, others[:4])


def _is_behind(one: Account, hearing: Hearing) -> bool:
    """Whether ranks that waited in vain had reached a later encoder call: they waited for this
    one.
    """
    waited = hearing.having(*CONSEQUENCES)
    return one.call is not None and any(
        other.call is not None and one.position < other.position for other in waited
    )


def _first_by_calls(facts: list[Fact], hearing: Hearing) -> list[Fact]:
    """Order by encoder calls, if they are known for all of these ranks: ranks make them in step."""
    if any(hearing[fact.rank].call is None for fact in facts):
        return facts
    first = min((hearing[fact.rank].position for fact in facts), default=(0, 0))
    return [fact for fact in facts if hearing[fact.rank].position == first]


def _was_caught(first: Account, others: list[Account]) -> bool:
    """Whether the process ended in good order after its exception, as all others did."""
    return first.fate.exit_code == 0 and all(
        one.fate_kind == fates.ENDED for one in others
    )


def _error(fact: Fact) -> tuple[str, str]:
    """Type and innermost frame, by which errors are told apart: messages differ from rank to
    rank.
    """
    assert isinstance(fact.value, Fate)
    return fact.value.text.partition(":")[0], fact.value.where.partition(" < ")[0]


def _apart_by_error(facts: list[Fact]) -> list[Fact]:
    by_error: dict[tuple[str, str], Fact] = {}
    for fact in sorted(facts, key=lambda one: (one.at, one.rank)):
        by_error.setdefault(_error(fact), fact)
    return list(by_error.values())
