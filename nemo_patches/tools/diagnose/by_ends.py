"""Verdicts from how ranks ended, where no rank is known to be missing:
closed connections, time-outs, launchers.
"""

from __future__ import annotations

from dataclasses import replace

from nemo_patches.text import named
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account, Hearing, first_of, is_before
from nemo_patches.tools.diagnose.facts import NOT_TOLD, Fact
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding
from nemo_patches.tools.diagnose.verdicts import (
    Wait,
    all_absent,
    at,
    by_party,
    capital,
    cited,
    finding,
    inner,
    most_told,
    names,
    reading_of,
    title_of,
    who,
)

_NOT_COME = (conditions.GONE, conditions.SILENT, conditions.MISSING)
_UNLIKE = (
    "Look for what makes these ranks part: more batches on some, a collective that only"
    " some ranks call."
)
# By how the text of what the launcher or the scheduler tells begins.
_ENDS_OF_JOB = {
    conditions.TIME_LIMIT: (
        "The job reached its time limit",
        ": that is no hang by itself",
        "Ask for more time (`--time`), or go on from the last checkpoint; was it slower"
        " than planned, a trace (NEMO_PATCHES_TRACE) tells who was late.",
    ),
    conditions.PREEMPTED: (
        "The job was preempted",
        "",
        "Go on from the last checkpoint; `--requeue` lets Slurm start it again.",
    ),
    conditions.REQUEUED: (
        "Slurm has requeued the job",
        "",
        "Its next attempt goes on from the last checkpoint.",
    ),
}


def by_ends(hearing: Hearing) -> list[Finding]:
    waited = hearing.having(conditions.WAITED)
    cut = hearing.having(conditions.CUT)
    if not waited and not cut:
        if missing := hearing.having(conditions.MISSING):
            return all_absent(missing, None)
        stuck = _stuck(hearing)
        return [*stuck, *by_launcher(hearing, of_ranks_that_waited=bool(stuck))]
    kinds = (*_NOT_COME, conditions.UNSEEN, conditions.ENDED) if waited else _NOT_COME
    if suspects := [one for one in hearing.having(*kinds) if one.waits is None]:
        how = "waited until a time limit" if waited else "had their connections closed"
        more = f"{capital(names(waited or cut))} {how}."
        found = all_absent(suspects, None)
        return [replace(one, text=f"{one.text} {more}") for one in found]
    if behind := _behind(waited, hearing):
        return behind
    if not waited and (first := _left_first(cut, hearing)):
        return first
    both = [*waited, *cut]
    if all(one.condition.text.startswith(conditions.AT_START) for one in both):
        first_finding = _start_up(both, hearing)
    else:
        first_finding = _in_vain(waited, cut, hearing)
    return [first_finding, *by_launcher(hearing, of_ranks_that_waited=True)]


def by_words(hearing: Hearing) -> list[Finding]:
    """By general words of lines that no table knows: hearsay, told with its line.

    Nothing is told of ranks that say themselves that they waited, or where most are told so.
    """
    found = []
    for kind, id_ in (
        (conditions.TOLD_ABSENT, ids.MISSING_RANK),
        (conditions.TOLD_DEAD, ids.FIRST_FAILURE),
    ):
        facts = [
            fact
            for fact in hearing.told(kind)
            if fact.rank == NOT_TOLD or hearing[fact.rank].waits is None
        ]
        ranks = {fact.rank for fact in facts} - {NOT_TOLD}
        if not facts or 2 * len(ranks) > max(hearing.world_size, 1) > 2:
            continue
        first = facts[0]
        of_first = [fact.rank for fact in facts if fact.cite == first.cite]
        text = f'by a line of the log: "{first.condition_text}" [{first.cite}].'
        if first.rank != NOT_TOLD:
            how = "is not there" if kind == conditions.TOLD_ABSENT else "ended"
            how = how if len(of_first) == 1 else how.replace("is", "are")
            text = f"{who(of_first)} {how}, {text}"
        one = finding(id_, text, of_first, of=hearing[first.rank])
        found.append(replace(one, severity=WARNING))
    return found[:1]


def _behind(waited: list[Account], hearing: Hearing) -> list[Finding]:
    """By encoder calls, which traces tell, and which ranks make in step."""
    known = [(one.call, one.rank) for one in waited if one.call]
    last, _ = max(known, key=lambda one: one[0].position, default=(None, 0))
    if last is None:
        return []
    behind = [
        one
        for one in hearing.accounts.values()
        if one.waits is None and one.call and one.call.position < last.position
    ]
    ranks = tuple(rank for call, rank in known if call.position == last.position)
    return all_absent(behind, Wait(ranks, last.title, how="went through"))


def _in_vain(waited: list[Account], cut: list[Account], hearing: Hearing) -> Finding:
    """Ranks that waited until a time limit, or whose connections were closed."""
    entered = [fact for one in waited for fact in one.entered if fact.entered.kind]
    what, step = _collective_of(waited, entered, hearing)
    ends = [f"{names(waited)} waited {what} until a time limit"] if waited else []
    if cut:
        peers = (one.condition.text.partition("its peer: ")[2] for one in cut)
        peer = next((f" by {peer}" for peer in peers if peer), "")
        ends.append(f"{names(cut)} had a connection closed{peer}")
    groups = {fact.entered.group for fact in entered}
    places = by_party(
        (inner(o.condition.where), o.rank) for o in waited if o.condition.where
    )
    unseen = _unseen(hearing)
    text = f"{'; '.join(ends)}{unseen}. {_why(waited, hearing)}."
    if alone := _alone(waited, hearing):
        text = f"{alone}. {capital('; '.join(ends))}."
    if entered:
        text += _unlike_sizes(entered)
    elif waited and waited[0].condition.where and waited[0].condition.text:
        says = waited[0].condition.text.rstrip(".")
        text += f" {capital(names(waited[:1]))} says: {says}."
    if len(groups) > 1:
        told = by_party((title_of(fact.entered), fact.rank) for fact in entered)
        text = (
            f"{told}: they waited until a time limit, in collectives of several groups,"
            f" perhaps for each other{unseen}."
        )
        step = _UNLIKE
    elif places:
        text = (
            f"{'; '.join(ends)}, at different places{unseen}: {places}. One of them may"
            " have made a collective more or fewer."
        )
        step = step or _UNLIKE
    lines = [cited(fact, title_of(fact.entered)) for fact in entered[:8]]
    return finding(ids.WAITED_IN_VAIN, text, evidence=lines, next_step=step)


def _left_first(cut: list[Account], hearing: Hearing) -> list[Finding]:
    """For closed connections without a time-out: the rank that failed first, if only one comes into
    question, or whatever else ended the job.
    """
    ended = [
        fact
        for fact in _terminated(hearing)
        if fact.rank == NOT_TOLD or fact.condition_text == conditions.FROM_OUTSIDE
    ]
    of_cut = [fact for one in cut for fact in one.conditions]
    if ended and not any(is_before(fact, ended[0]) for fact in of_cut):
        return _ended_by_others(hearing)
    found = by_launcher(hearing)
    if len(found) != 1 or len(found[0].ranks) != 1 or hearing.unseen:
        return []
    [one] = found
    if hearing[one.ranks[0]].waits is not None:
        return []
    text = f"{one.text} {capital(names(cut))} had their connections closed."
    return [replace(one, text=text, severity=CRITICAL)]


def _why(waited: list[Account], hearing: Hearing) -> str:
    """Why they waited in vain, as far as is known: if nobody is missing of those that are heard,
    nobody may be.
    """
    if not waited:
        return (
            "Another rank had gone before, or the network failed. Which, this does not"
            " tell"
        )
    entries = [fact.entered for one in waited for fact in one.entered]
    is_one = len({(entry.group, entry.number) for entry in entries}) == 1
    if hearing.world_size == len(waited) > 1 and is_one and not hearing.unseen:
        size = hearing.evidence.world_size
        unheard = "" if size else ", or a rank that is not heard has not come"
        return (
            f"All ranks{'' if size else ' that are heard'} had enqueued it, so that the"
            f" transfer failed, or hangs on one of them{unheard}"
        )
    text = (
        "Another rank did not come, or had gone before, or the transfer failed. Which,"
        " this does not tell"
    )
    if heard := hearing.having(conditions.HEARD):
        was = "was" if len(heard) == 1 else "were"
        text += f"; {names(heard)} {was} told of it, and had no time-out"
    return text


def _unlike_sizes(entered: list[Fact]) -> str:
    """Of one collective; empty where they are alike."""
    entries = [fact.entered for fact in entered]
    sizes = by_party(
        ((entry.size, entry.rank) for entry in entries if entry.size), "{what} on {who}"
    )
    is_one = len({(entry.group, entry.number) for entry in entries}) == 1
    return f" Their sizes differ: {sizes}." if sizes and is_one else ""


def _alone(waited: list[Account], hearing: Hearing) -> str:
    """The rank that alone had no time-out, and was ended by somebody else; empty if none."""
    ended = [one for one in hearing.having(conditions.TERMINATED) if one.rank >= 0]
    if len(ended) != 1 or not 2 < hearing.world_size == len(waited) + 1:
        return ""
    why = (
        "alone had no time-out, and somebody else ended it: most likely it had not come"
    )
    return f"{names(ended)} {why}"


def _unseen(hearing: Hearing) -> str:
    return f"; nothing is known of {named(hearing.unseen)}" if hearing.unseen else ""


def _start_up(waited: list[Account], hearing: Hearing) -> Finding:
    first = waited[0]
    told = first.condition.text.removeprefix(f"{conditions.AT_START}: ").rstrip(".")
    rank = "It" if len(waited) == 1 else capital(who([first.rank]))
    text = (
        f"{names(waited)} waited for the process group in vain: the job did not"
        f" start{_unseen(hearing)}. {rank} says: {told}."
    )
    for fact in hearing.told(conditions.UNRESOLVED)[:1]:
        text += (
            f" An address could not be resolved: {fact.condition_text} [{fact.cite}]."
        )
    return finding(ids.START_UP, text)


def _collective_of(
    waited: list[Account], entered: list[Fact], hearing: Hearing
) -> tuple[str, str]:
    """What they waited in, and the next step for that."""
    if entered:
        entry = most_told(entered)
        remark, step = reading_of(entry, hearing.evidence.patched)
        return f"in {title_of(entry)}{f', {remark},' if remark else ''}", step
    places = {one.condition.where for one in waited}
    if len(places) != 1:
        return "for others", ""
    where = at(places.pop())
    text = waited[0].condition.text
    return f"for others{where or (f' ({text})' if text else '')}", ""


def _stuck(hearing: Hearing) -> list[Finding]:
    stuck = hearing.having(conditions.STUCK)
    text = (
        f"{names(stuck)}: the NCCL watchdog got stuck, and no collective timed out. A"
        " call of CUDA or NCCL does not return, or something holds Python's lock."
        " Perhaps it waits for another rank."
    )
    return [finding(ids.STUCK_WATCHDOG, text)] if stuck else []


def by_launcher(hearing: Hearing, of_ranks_that_waited: bool = False) -> list[Finding]:
    """The first failure in the launchers' tables. of_ranks_that_waited: the exit code may be that
    of a waiting rank.
    """
    failed = hearing.told(conditions.FAILED, conditions.ABORTED)
    firsts = [fact for fact in first_of(failed) if not fact.own]
    if not firsts:
        gone = [
            one
            for one in hearing.having(conditions.GONE)
            if one.condition_fact and not one.condition_fact.own
        ]
        found = all_absent(gone, None) or _ended_by_others(hearing)
        return [] if of_ranks_that_waited else found
    first = firsts[0]
    ranks = {fact.rank for fact in firsts}
    text = f"{who(ranks)} failed first, {first.condition_text} [{first.cite}]."
    if len(ranks) > 1:
        text = (
            f"{who(ranks)} failed in the same second, {first.condition_text}: which was"
            " first, it does not tell."
        )
    elif first.condition_kind == conditions.ABORTED or of_ranks_that_waited:
        text += (
            " It may be one that waited: a rank ends so when a collective's time limit"
            " has passed."
        )
    else:
        of = hearing[first.rank]
        return [finding(ids.FIRST_FAILURE, text, ranks, of=of)]
    return [finding(ids.FIRST_FAILURE, text)]


def _terminated(hearing: Hearing) -> list[Fact]:
    """What launchers and schedulers say about ranks, or a job, that somebody else ended."""
    return [fact for fact in hearing.told(conditions.TERMINATED) if not fact.own]


def _ended_by_others(hearing: Hearing) -> list[Finding]:
    facts = _terminated(hearing)
    if not facts:
        return []
    of_job = [fact for fact in facts if fact.rank == NOT_TOLD]
    outside = [fact for fact in facts if fact.condition_text == conditions.FROM_OUTSIDE]
    first = (of_job or outside or facts)[0]
    step = "Look who ended it: the scheduler's log."
    before = ", and no record tells of a failure before"
    if heard := hearing.having(conditions.HEARD):
        before = (
            f"; before that {names(heard)} had been told of another rank's time-out: it"
            " hung"
        )
    text = f"The job was ended ({first.condition_text}) [{first.cite}]{before}."
    for begin, (what, why, next_step) in _ENDS_OF_JOB.items():
        if of_job and first.condition_text.startswith(begin):
            step = next_step
            told = first.condition_text.partition("; ")[2]
            text = f"{what} ({told}) [{first.cite}]{before if heard else why}."
    if not of_job:
        ended = who(fact.rank for fact in outside or facts)
        how = (
            "first, by a SIGTERM that torchrun had not sent"
            if outside
            else "by SIGTERM"
        )
        text = (
            f"{ended} ended {how} [{first.cite}]{before}. A user, the scheduler, another"
            " program or another host's launcher sent it."
        )
    return [finding(ids.FIRST_FAILURE, text, next_step=step)]
