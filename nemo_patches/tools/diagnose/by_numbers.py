"""Which ranks are missing, by the numbers of the collectives that each rank has entered; clocks are
not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging import judge as seats
from nemo_patches.judging.judge import Judgement, Seat
from nemo_patches.text import named
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account, Hearing
from nemo_patches.tools.diagnose.facts import OF_MODEL, Fact
from nemo_patches.tools.diagnose.findings import Finding, Ruling
from nemo_patches.tools.diagnose.verdicts import (
    Wait,
    all_absent,
    cited,
    finding,
    most_told,
    out_of_step,
    parties,
    reading_of,
    same_kind,
    step_of,
    title_of,
)

_MOST_OF_BUFFERS = 1 << 26  # elements


def by_numbers(hearing: Hearing) -> Ruling:
    groups = hearing.evidence.groups
    facts = {
        (seat.group, seat.number, fact.rank): fact
        for fact in hearing.evidence.facts
        if (seat := fact.seat) and fact.rank in groups.get(seat.group, ())
    }
    known = (fact.seat for fact in facts.values() if fact.seat)
    judged = seats.judge(known, groups, hearing.evidence.begins)
    order = (
        seats.MISSING,
        seats.OUT_OF_STEP,
        seats.SIZES,
        seats.CROSSED,
        seats.ALL_IN,
        seats.OLDER,
    )
    found = []
    for one in sorted(judged, key=lambda each: order.index(each.id)):
        found += _of_judgement(one, hearing, facts)
    if found and hearing.unseen:
        text = (
            f"Nothing is known of {named(hearing.unseen)}: it left no record, or its"
            " files are elsewhere."
        )
        found.append(finding(ids.NOT_SEEN, text))
    return Ruling(tuple(found))


def _of_judgement(
    one: Judgement, hearing: Hearing, facts: dict[tuple[str, int, int], Fact]
) -> list[Finding]:
    title = title_of(one.seat)
    there = [facts[one.seat.group, one.seat.number, rank] for rank in one.waiting]
    evidence = [cited(fact, title_of(fact.seat)) for fact in there if fact.seat]
    if one.id == seats.MISSING:
        step = reading_of(most_told(there), hearing.evidence.patched)[1]
        how = "gave up" if one.seat.done and one.seat.kind == LENGTH_SYNC else ""
        wait = Wait(one.waiting, title, how=how)
        behind = {
            rank: last
            for rank in one.accused
            if (last := _pending(hearing, rank, one.seat, facts))
        }
        accused = [
            hearing[rank]
            for rank in one.accused
            if rank not in behind and not _has_come_since(hearing, rank, one, there[0])
        ]
        if not accused and behind:
            return [_behind(behind, wait, evidence)]
        found = all_absent(
            accused, wait, [*(_last_entered(account) for account in accused), *evidence]
        )
        return [
            replace(each, next_step=f"{each.next_step} {step}".strip())
            for each in found
        ]
    if one.id == seats.OUT_OF_STEP:
        return [out_of_step(_by_title(there), evidence)]
    if one.id == seats.SIZES:
        told = "; ".join(
            f"{title} on {named(ranks)}" for title, ranks in _by_title(there).items()
        )
        if one.seat.group == OF_MODEL:
            step = (
                "Make the model the same on all ranks before DDP wraps it: parameters"
                " that only some ranks add or "
            )
            step += "freeze, another config or checkpoint."
            text = (
                f"The ranks have different models: {told.replace('a collective ', '')}."
            )
            return [finding(ids.SIZES, text, evidence=evidence, next_step=step)]
        step = ""
        if "broadcast" in one.seat.kind.lower() and all(
            _is_small(fact.seat) for fact in there if fact.seat
        ):
            step = (
                "With sync_max_audio_length=false, DDP's buffer broadcast meets"
                " positional encodings of different "
            )
            step += (
                "sizes: nemo_patches keeps their shapes equal. Else look for a buffer"
                " whose size depends on the rank."
            )
        text = f"The ranks give the same collective different sizes: {told}."
        return [finding(ids.SIZES, text, evidence=evidence, next_step=step)]
    if one.id == seats.CROSSED:
        have = "has" if len(one.absent) == 1 else "have"
        text = (
            f"Ranks wait in collectives of different groups: {named(one.waiting)} in"
            f" {title}, and {named(one.absent)}, which {have} not entered that, in one"
            " of another group. Which rank is missing, this does not tell."
        )
        return [finding(ids.CROSSED, text, evidence=evidence)]
    if one.id == seats.ALL_IN and one.seat.group in hearing.evidence.partly_known:
        return []  # a rank of which nothing is known may be missing
    if one.id == seats.ALL_IN:
        text = (
            f"All {len(one.waiting)} ranks have entered {title}, and none has"
            " completed it."
        )
        if not hearing.unseen:
            return [finding(ids.ALL_IN, text, evidence=evidence)]
        text = (
            f"{text[:-1]}; nothing is known of {named(hearing.unseen)}, of which some"
            " may be missing."
        )
        return [
            finding(
                ids.ALL_IN, text, evidence=evidence, next_step=step_of(ids.NOT_SEEN)
            )
        ]
    came = (
        f"{named(one.absent)} came to it after"
        f" {'its' if len(one.absent) == 1 else 'their'} own"
    )
    text = f"The records were not made at one time: {title} was completed, so {came}."
    return [
        finding(
            ids.NOT_ENOUGH,
            text,
            next_step="Take the dumps of all ranks while the job hangs.",
        )
    ]


def _is_small(seat: Seat) -> bool:
    """Whether it may be a model's buffers."""
    numbers = [int(number[:18]) for number in re.findall(r"\d+", seat.size)]
    return math.prod(numbers) <= _MOST_OF_BUFFERS


def _last_entered(account: Account) -> str:
    """The last collective that the rank has entered, of any group."""
    facts = [(fact.at, fact.seat.number, fact) for fact in account.seats if fact.seat]
    if not facts:
        return f"rank {account.rank}: no collective of it is known"
    *_, last = max(facts, key=lambda one: one[:2])
    return (
        cited(last, f"its last collective: {title_of(last.seat)}") if last.seat else ""
    )


def _pending(
    hearing: Hearing, rank: int, seat: Seat, facts: dict[tuple[str, int, int], Fact]
) -> Fact | None:
    """The earlier collective of that group that the rank itself waits in, if any: one that nobody
    has completed.
    """
    own = [
        fact.seat.number
        for fact in hearing[rank].seats
        if fact.seat and fact.seat.group == seat.group
    ]
    last = facts.get(
        (
            seat.group,
            max((number for number in own if number < seat.number), default=-1),
            rank,
        )
    )
    if last is None or not last.seat or last.seat.done is not False:
        return None
    there = (
        facts.get((seat.group, last.seat.number, other))
        for other in hearing.evidence.groups[seat.group]
    )
    has_ended = any(fact and fact.seat and fact.seat.completed for fact in there)
    return None if has_ended else last


def _behind(behind: dict[int, Fact], wait: Wait, evidence: list[str]) -> Finding:
    titles = {rank: title_of(fact.seat) for rank, fact in behind.items() if fact.seat}
    text = (
        f"All wait, and their collectives have drifted apart: {named(behind)} in"
        f" {next(iter(titles.values()))}, "
    )
    text += f"{named(wait.ranks)} in {wait.title}."
    lines = [cited(fact, titles[rank]) for rank, fact in behind.items()]
    return finding(ids.SKIPPED, text, evidence=[*lines, *evidence])


def _has_come_since(hearing: Hearing, rank: int, one: Judgement, there: Fact) -> bool:
    """Whether another fact shows the rank waiting or moving; if so, keep the contradiction."""
    account = hearing[rank]
    waits = account.motion_fact if account.moved else account.waits
    if waits is None:
        return False
    place = account.place
    since = ": it has come since" if same_kind(one.seat.kind, place.collective) else ""
    what = (
        f"it waits in {place.seat}{since}"
        if place.collective
        else f"it waited ({account.fate.text})"
    )
    what = f"it goes on ({account.motion.by})" if account.moved else what
    entered = f"rank {rank} had not entered {title_of(one.seat)}"
    hearing.contradictions.append(
        f"contradiction: by {there.cite} {entered}; by {waits.cite} {what}"
    )
    return True


def _by_title(facts: Iterable[Fact]) -> dict[str, list[int]]:
    seats_of = ((fact.seat, fact.rank) for fact in facts if fact.seat)
    return parties(
        (f"{seat.kind or 'a collective'} {seat.size}".strip(), rank)
        for seat, rank in seats_of
    )
