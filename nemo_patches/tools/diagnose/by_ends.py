"""Verdicts from how ranks ended, where no rank is known to be missing:
closed connections, time-outs, launchers.
"""

from __future__ import annotations

from dataclasses import replace

from nemo_patches.text import named
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account, Hearing, first_of, is_before
from nemo_patches.tools.diagnose.facts import NOT_TOLD, Fact, Fate
from nemo_patches.tools.diagnose.findings import CRITICAL, Finding, Ruling
from nemo_patches.tools.diagnose.verdicts import (
    all_absent,
    capital,
    cited,
    evidence_of,
    finding,
    inner,
    most_told,
    parties,
    reading_of,
    step_of,
    title_of,
    who,
)

_NOT_COME = (fates.GONE, fates.SILENT, fates.UNSEEN, fates.MISSING, fates.ENDED)


def by_ends(hearing: Hearing) -> Ruling:
    waited = hearing.having(fates.WAITED)
    cut = hearing.having(fates.CUT)
    evidence = evidence_of(hearing.accounts.values())
    if not waited and not cut:
        stuck = _stuck(hearing)
        return Ruling((*stuck, *by_launcher(hearing, of_ranks_that_waited=bool(stuck))))
    kinds = _NOT_COME if waited else (fates.GONE, fates.SILENT, fates.MISSING)
    suspects = [one for one in hearing.having(*kinds) if one.waits is None]
    if suspects:
        ended = [one.rank for one in waited or cut]
        how = "waited until a time limit" if waited else "had their connections closed"
        found = all_absent(suspects, None, evidence)
        return Ruling(
            tuple(
                replace(one, text=f"{one.text} {capital(who(ended))} {how}.")
                for one in found
            )
        )
    if not waited and (first := _left_first(cut, hearing)):
        return Ruling(first)
    if all(one.fate.text.startswith(fates.AT_START) for one in (*waited, *cut)):
        return Ruling(
            (
                _start_up([*waited, *cut], evidence, hearing),
                *by_launcher(hearing, of_ranks_that_waited=True),
            )
        )
    what, step = _collective_of(waited, hearing)
    peers = [one.fate.text.partition("its peer: ")[2] for one in cut]
    peer = next((f" by {peer}" for peer in peers if peer), "")
    ends = "; ".join(
        f"{who(one.rank for one in some)} {how}"
        for some, how in (
            (waited, f"waited {what} until a time limit"),
            (cut, f"had a connection closed{peer}"),
        )
        if some
    )
    unseen = _unseen_text(hearing)
    text = f"{ends}: {_why(waited, hearing)}{unseen}."
    if len(places := _places_of(waited)) > 1:
        told = "; ".join(
            f"{named(ranks)} in {place}" for place, ranks in places.items()
        )
        text = (
            f"{ends}, at different places: {told}. One of them may have made a"
            f" collective more or fewer{unseen}."
        )
        step = step or step_of(ids.OUT_OF_STEP)
    by_title = _by_title(waited)
    if len(by_title) > 1:
        told = "; ".join(
            f"{named(ranks)} in {title}" for title, ranks in by_title.items()
        )
        text = (
            "Ranks waited in collectives of several groups until a time limit, perhaps"
            f" for each other: {told}{unseen}."
        )
        step = (
            "Look for what makes these ranks part: more batches on some, a collective"
            " that only some ranks call."
        )
    seats_of = [
        cited(fact, title_of(fact.seat))
        for one in waited
        for fact in one.seats
        if fact.seat
    ]
    lines = [*seats_of[:8], *evidence]
    found = [finding(ids.WAITED_IN_VAIN, text, evidence=lines, next_step=step)]
    return Ruling((*found, *by_launcher(hearing, of_ranks_that_waited=True)))


def _left_first(cut: list[Account], hearing: Hearing) -> tuple[Finding, ...]:
    """For closed connections without a time-out: the rank that failed first, if only one comes into
    question, or whatever else ended the job.
    """
    terminated = [
        fact
        for fact in _terminated(hearing)
        if fact.rank == NOT_TOLD or fact.fate_text == fates.FROM_OUTSIDE
    ]
    if terminated and not any(
        is_before(fact, terminated[0]) for one in cut for fact in one.fates
    ):
        return tuple(
            replace(one, evidence=(*one.evidence, *evidence_of(cut)))
            for one in _ended_by_others(hearing)
        )
    found = by_launcher(hearing)
    if (
        len(found) != 1
        or len(found[0].ranks) != 1
        or hearing[found[0].ranks[0]].waits is not None
        or hearing.unseen
    ):
        return ()
    text = (
        f"{found[0].text} {capital(who(one.rank for one in cut))} had their connections"
        " closed."
    )
    evidence = (*found[0].evidence, *evidence_of(cut))
    return (replace(found[0], text=text, severity=CRITICAL, evidence=evidence),)


def _why(waited: list[Account], hearing: Hearing) -> str:
    """Why they waited in vain, as far as is known: if nobody is missing of those that are heard,
    nobody may be.
    """
    there = {
        (fact.seat.group, fact.seat.number)
        for one in waited
        for fact in one.seats
        if fact.seat
    }
    heard = {one.rank for one in hearing.having(fates.HEARD)}
    ended = [
        one.rank for one in hearing.having(fates.TERMINATED) if one.rank != NOT_TOLD
    ]
    sizes = parties(
        (fact.seat.size, one.rank)
        for one in waited
        for fact in one.seats
        if fact.seat and fact.seat.size
    )
    unlike = (
        "; ".join(f"{size} on {named(ranks)}" for size, ranks in sizes.items())
        if len(sizes) > 1
        else ""
    )
    more = f". Their sizes differ: {unlike}" if unlike and len(there) == 1 else ""
    is_whole = hearing.world_size == len(waited) > 1 and not hearing.unseen
    if is_whole and len(there) == 1:
        return (
            "all ranks had enqueued it, so that the transfer failed, or hangs on one"
            f" of them{more}"
        )
    text = (
        "another rank did not come, or had gone before, or the transfer failed. Which,"
        " this does not tell"
    )
    if not waited:
        text = (
            "another rank had gone before, or the network failed. Which, this does not"
            " tell"
        )
    if len(ended) == 1 and len(waited) > 1 and hearing.world_size == len(waited) + 1:
        text = (
            f"{named(ended)} alone had no time-out, and somebody else ended it: most"
            " likely it had not come"
        )
    if heard:
        is_ = "was" if len(heard) == 1 else "were"
        text += f"; {named(sorted(heard))} {is_} told of it, and had no time-out"
    return text + more


def _by_title(waited: list[Account]) -> dict[str, list[int]]:
    """Ranks by the collective in which each timed out, where these are of several groups."""
    seats_of = [
        (fact.seat, one.rank)
        for one in waited
        for fact in one.seats
        if fact.seat and fact.seat.kind
    ]
    if len({seat.group for seat, _ in seats_of}) < 2:
        return {}
    return parties((title_of(seat), rank) for seat, rank in seats_of)


def _unseen_text(hearing: Hearing) -> str:
    logged = [one.rank for one in hearing.having(fates.LOGGED) if one.rank != NOT_TOLD]
    text = f"; nothing is known of {named(hearing.unseen)}" if hearing.unseen else ""
    return text + (f"; of {named(logged)} no end is told" if logged else "")


def _start_up(waited: list[Account], evidence: list[str], hearing: Hearing) -> Finding:
    ranks, told = (
        who(one.rank for one in waited),
        waited[0].fate.text.removeprefix(f"{fates.AT_START}: "),
    )
    text = (
        f"The job did not start: {ranks} waited for the process group in vain, and"
        " training had not begun. "
    )
    rank = "It" if len(waited) == 1 else who([waited[0].rank])
    text += f"{capital(rank)} says: {told}{_unseen_text(hearing)}."
    if unresolved := hearing.told(fates.UNRESOLVED):
        text += (
            f" An address could not be resolved: {unresolved[0].fate_text}"
            f" [{unresolved[0].cite}]."
        )
    return finding(ids.START_UP, text, evidence=evidence)


def _collective_of(waited: list[Account], hearing: Hearing) -> tuple[str, str]:
    """What they waited in, if all known seats agree, and the next step for that."""
    facts = [
        fact for one in waited for fact in one.seats if fact.seat and fact.seat.kind
    ]
    if not facts:
        fate = waited[0].fate if waited else Fate("")
        if len(_places_of(waited)) > 1:
            return "for others", ""
        at = f" in {inner(fate.where)}" if fate.where else ""
        return f"for others{at}" + (f" ({fate.text})" if fate.text else ""), ""
    seat = most_told(facts)
    if len({fact.seat.group for fact in facts if fact.seat}) > 1:
        return "in collectives of several groups", ""
    remark, step = reading_of(seat, hearing.evidence.patched)
    return f"in {title_of(seat)}{f', {remark},' if remark else ''}", step


def _places_of(waited: list[Account]) -> dict[str, list[int]]:
    """Ranks by the place where they waited, as their errors say."""
    return parties(
        (inner(one.fate.where), one.rank) for one in waited if one.fate.where
    )


def _stuck(hearing: Hearing) -> list[Finding]:
    stuck = hearing.having(fates.STUCK)
    if not stuck:
        return []
    ranks = [one.rank for one in stuck]
    text = (
        f"The NCCL watchdog of {who(ranks)} got stuck, and no collective timed out: a"
        " call of CUDA or NCCL does not return, or something holds Python's lock."
        " Perhaps it waits for another rank."
    )
    return [finding(ids.STUCK_WATCHDOG, text, evidence=evidence_of(stuck))]


def by_launcher(
    hearing: Hearing, of_ranks_that_waited: bool = False
) -> tuple[Finding, ...]:
    """The first failure in the launchers' tables. of_ranks_that_waited: the exit code may be that
    of a waiting rank.
    """
    firsts = [
        fact
        for fact in first_of(hearing.told(fates.FAILED, fates.ABORTED))
        if not fact.own
    ]
    if not firsts:
        gone = [
            one
            for one in hearing.having(fates.GONE)
            if one.fate_fact and not one.fate_fact.own
        ]
        return (
            ()
            if of_ranks_that_waited
            else tuple(all_absent(gone, None)) or _ended_by_others(hearing)
        )
    ranks = sorted({fact.rank for fact in firsts})
    first = firsts[0]
    assert isinstance(first.value, Fate)
    lines = [cited(fact, fact.fate_text) for fact in firsts]
    lines += [
        cited(fact, f"a traceback, {fact.fate_text}")
        for fact in hearing.told(fates.LOGGED)
    ]
    if len(ranks) > 1:
        text = (
            f"{who(ranks)} failed in the same second, {first.value.text}: which was"
            " first, it does not tell."
        )
        return (finding(ids.FIRST_FAILURE, text, (), lines),)
    text = f"{who(ranks)} failed first, {first.value.text} [{first.cite}]."
    if may_have_waited := first.fate_kind == fates.ABORTED or of_ranks_that_waited:
        text += (
            " It may be one that waited: a rank ends so when a collective's time limit"
            " has passed."
        )
    return (
        finding(
            ids.FIRST_FAILURE,
            text,
            () if may_have_waited else ranks,
            lines,
            hearing[ranks[0]],
        ),
    )


def _terminated(hearing: Hearing) -> list[Fact]:
    """What launchers and schedulers say about ranks, or a job, that somebody else ended."""
    return [fact for fact in hearing.told(fates.TERMINATED) if not fact.own]


def _ended_by_others(hearing: Hearing) -> tuple[Finding, ...]:
    facts = _terminated(hearing)
    if not facts:
        return ()
    of_job = [fact for fact in facts if fact.rank == NOT_TOLD]
    outside = [fact for fact in facts if fact.fate_text == fates.FROM_OUTSIDE]
    first = (of_job or outside or facts)[0]
    step = "Look who ended it: the scheduler's log."
    heard = [one.rank for one in hearing.having(fates.HEARD)]
    before = "no record tells of a failure before"
    if heard:
        before = (
            f"before that {who(heard)} had been told of another rank's time-out: it"
            " hung"
        )
    if of_job:
        text = f"The job was ended ({first.fate_text}) [{first.cite}], and {before}."
        if first.fate_text.startswith(fates.TIME_LIMIT):
            text = (
                f"The job reached its time limit ({first.fate_text.partition('; ')[2]})"
                f" [{first.cite}]"
            )
            text += f"; {before}." if heard else ": that is no hang by itself."
            step = (
                "Ask for more time (`--time`), or go on from the last checkpoint; was"
                " it slower than planned, a trace "
            )
            step += "(NEMO_PATCHES_TRACE) tells who was late."
        elif first.fate_text.startswith(fates.PREEMPTED):
            text = (
                f"The job was preempted ({first.fate_text.partition('; ')[2]})"
                f" [{first.cite}]"
            )
            text += f"; {before}." if heard else "."
            step = (
                "Go on from the last checkpoint; `--requeue` lets Slurm start it again."
            )
        elif first.fate_text.startswith(fates.REQUEUED):
            text = (
                f"Slurm has requeued the job ({first.fate_text.partition('; ')[2]})"
                f" [{first.cite}]; {before}."
            )
            step = "Its next attempt goes on from the last checkpoint."
    elif outside:
        text = (
            f"{who(fact.rank for fact in outside)} ended first, by a SIGTERM that"
            " torchrun had not sent "
        )
        text += f"[{first.cite}]: a user, the scheduler, or another program sent it."
    else:
        text = (
            f"{who(fact.rank for fact in facts)} ended by SIGTERM or the like"
            f" [{first.cite}], and no record tells "
        )
        text += (
            "of a failure before: a user, the scheduler, or another host's launcher"
            " ended the job."
        )
    lines = [cited(fact, fact.fate_text) for fact in (*of_job, *outside, *facts)[:8]]
    return (finding(ids.FIRST_FAILURE, text, evidence=lines, next_step=step),)
