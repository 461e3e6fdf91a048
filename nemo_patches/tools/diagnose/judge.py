"""The verdict over all evidence of a job, whatever its sources.

Causes before consequences, numbers before kinds, own before hearsay, later before earlier. A place
explains, and never accuses. Nobody whom any fact shows waiting is accused; what contradicts is
printed with both citations, and takes the accusation away.
"""

from __future__ import annotations

from dataclasses import replace

from nemo_patches.text import named
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import (
    Hearing,
    accounts_of,
)
from nemo_patches.tools.diagnose.by_causes import by_causes
from nemo_patches.tools.diagnose.by_ends import by_ends, by_launcher, by_words
from nemo_patches.tools.diagnose.by_numbers import by_numbers
from nemo_patches.tools.diagnose.by_places import by_places
from nemo_patches.tools.diagnose.collect.host_jobs import STUCK_AFTER_S
from nemo_patches.tools.diagnose.facts import (
    ALL_WELL,
    NOT_TOLD,
    Evidence,
    Member,
)
from nemo_patches.tools.diagnose.findings import (
    CRITICAL,
    WARNING,
    Diagnosis,
    Finding,
)
from nemo_patches.tools.diagnose.verdicts import (
    at,
    capital,
    evidence_of,
    finding,
    in_no_collective,
    shown_lines,
    who,
)

_MOST_RANKS = 1 << 20  # whatever world size a file claims
_MOST_SHOWN = 20
_MOST_HINTS = 2
_BESIDE_HINTS = (
    *(ids.WAITED_IN_VAIN, ids.ALL_IN, ids.MISSING_RANK, ids.STUCK_WATCHDOG),
    *(ids.NOT_ENOUGH, ids.START_UP),
)


def judge(
    evidence: Evidence, source: str = "", stuck_after_s: float = STUCK_AFTER_S
) -> Diagnosis:
    """The report over all of it. stuck_after_s: of ranks that were looked at twice, from when on a
    wait is a hang.
    """
    hearing = _hearing(evidence, stuck_after_s)
    ruled = _rule(hearing)
    no_hang = [ruled.pop(0).text] if ruled and ruled[0].id in ids.NO_HANG else []
    findings = sorted((*ruled, *evidence.findings), key=_place)
    if not findings and not no_hang and not _is_healthy(hearing):
        findings = [_with_all_evidence(_not_enough(hearing), hearing)]
    elif findings and findings[0] in ruled:
        findings[0] = _with_all_evidence(findings[0], hearing)
    uneven = [one for one in findings if one.id == ids.UNEVEN_CALLS]
    if uneven and findings[0].id in (ids.OUT_OF_STEP, ids.LATE):
        step = f"{uneven[0].text} {uneven[0].next_step}"
        findings[0] = replace(findings[0], next_step=step)
    if findings and evidence.past:
        text = f"{evidence.past} {findings[0].text}"
        findings[0] = replace(findings[0], text=text, next_step="")
    first = findings[0] if findings else None
    fine = " ".join(no_hang or ("Nothing found.", *evidence.summary))
    return Diagnosis(
        folder=source,
        world_size=evidence.world_size,
        verdict=first.text if first else fine,
        next_step=first.next_step if first else "",
        findings=tuple(findings),
        ranks=tuple(evidence.ranks),
        problems=tuple(evidence.problems[:_MOST_SHOWN]),
        earlier=tuple(evidence.earlier[:_MOST_SHOWN]),
        summary=tuple(evidence.summary),
    )


def is_too_early(evidence: Evidence, stuck_after_s: float) -> bool:
    """Whether its waits are young: look again."""
    ruled = _rule(_hearing(evidence, stuck_after_s))
    return any(one.id == ids.TOO_EARLY for one in ruled)


def _hearing(evidence: Evidence, stuck_after_s: float) -> Hearing:
    accounts = accounts_of(evidence)
    known = {rank for ranks in evidence.groups.values() for rank in ranks}
    size = max(evidence.world_size, 1 + max((*accounts, *known), default=-1))
    return Hearing(accounts, evidence, min(size, _MOST_RANKS), stuck_after_s)


def _rule(hearing: Hearing) -> list[Finding]:
    causes = by_causes(hearing)
    hang = by_numbers(hearing) or by_places(hearing)
    if causes:
        # The rank is not known: the launcher's tables may name it.
        if not any(one.ranks for one in causes):
            causes += by_launcher(hearing, of_ranks_that_waited=True)
        explained = {rank for one in causes for rank in one.ranks}
        rest = [one for one in hang if not set(one.ranks) <= explained]
        if causes[0].severity == CRITICAL:
            because = causes[0].id
            rest = [replace(o, because=because, severity=WARNING) for o in rest]
        return [*causes, *rest]
    hang = hang or by_ends(hearing)
    if hang and hang[0].id in ids.NO_HANG:
        return hang
    if not any(one.ranks for one in hang):
        hang += by_words(hearing)
    if not hang:
        return []
    hang.sort(key=_place)
    if len(hang) > 1 and hang[-1].ranks and not hang[0].ranks:
        hang[0] = replace(hang[0], text=f"{hang[0].text} {hang[-1].text}")
    hang[0] = _with_the_log(hang[0], hearing)
    return hang


def _place(one: Finding) -> tuple[bool, bool, int]:
    """By which findings are sorted: those that explain others first."""
    return bool(one.because), one.severity != CRITICAL, ids.ORDER.index(one.id)


def _with_the_log(first: Finding, hearing: Hearing) -> Finding:
    """With what the logs have on the accused rank, too: a thread that died, or a traceback that may
    be its end.
    """
    for fact in hearing.told(conditions.LOGGED):
        if first.ranks and fact.rank not in (*first.ranks, NOT_TOLD):
            continue
        told = f"{fact.condition_text}{at(fact.condition.where)} [{fact.cite}]"
        log = "The log" if fact.rank == NOT_TOLD else f"The log of rank {fact.rank}"
        if ", in its thread " in fact.condition_text:
            text = f"{log} has {told}."
        elif first.id == ids.KILLED:
            text = f"Or it ended by {told}, which no line ties to a rank."
        elif fact.rank in first.ranks or first.id == ids.WAITED_IN_VAIN:
            text = f"{log} has a traceback, which may have been caught: {told}."
        else:
            continue
        return replace(first, text=f"{first.text} {text}")
    return first


def _with_all_evidence(first: Finding, hearing: Hearing) -> Finding:
    of_ranks = evidence_of(hearing.accounts.values())
    lines = (*hearing.contradictions[:4], *first.evidence, *of_ranks)
    hints = [
        f"{fact.condition_text} [{fact.cite}]"
        for fact in hearing.evidence.facts
        if fact.condition_kind == conditions.HINT
    ]
    text = first.text
    if hints and first.id in _BESIDE_HINTS:
        text += f" Beside that: {'; '.join(hints[:_MOST_HINTS])}."
    return replace(first, text=text, evidence=shown_lines(lines))


def _is_healthy(hearing: Hearing) -> bool:
    """Whether all ended in good order, or a source knows the job and reports no trouble of any
    rank.
    """
    evidence = hearing.evidence
    if all(isinstance(fact.value, Member) for fact in evidence.facts):
        return evidence.is_well or ALL_WELL in evidence.summary
    kinds = {fact.condition_kind for fact in evidence.facts} - {"", conditions.HINT}
    return kinds == {conditions.ENDED}


def _not_enough(hearing: Hearing) -> Finding:
    accounts = hearing.accounts.values()
    unseen = sorted(set(range(hearing.world_size)) - hearing.accounts.keys())
    of_others = f"; of {named(unseen)} nothing is told" if unseen else ""
    logged = hearing.having(conditions.LOGGED)
    lines = [*evidence_of(logged), *evidence_of(accounts)]
    placed = [one for one in accounts if one.place.where and not one.place.collective]
    if placed and not logged:
        text = f"{in_no_collective(placed)}: one look at each tells no more{of_others}."
    elif lines:
        text = f"{capital(lines[0])}{of_others}. No line tells more."
    else:
        text = "Nothing is recognised."
        if accounts:
            ranks = who(hearing.accounts)
            text = f"Of {ranks} something is told, and nothing that decides{of_others}."
        if hearing.evidence.looked_for:
            text += f" Looked for: {'; '.join(hearing.evidence.looked_for)}."
    for one in accounts:
        if one.moved and one.motion_fact:
            text = (
                f"{who([one.rank])} went on ({one.motion.by}) [{one.motion_fact.cite}],"
                " and nothing is told after that."
            )
    return finding(ids.NOT_ENOUGH, text, evidence=lines)
