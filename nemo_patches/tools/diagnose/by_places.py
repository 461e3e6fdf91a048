"""Which ranks are missing, by where each rank was seen:
in its stack, in stall reports, or when it ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nemo_patches.judging.kinds import CHECKPOINT, is_guess
from nemo_patches.text import named
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account, Hearing
from nemo_patches.tools.diagnose.facts import MAIN_THREAD, NOT_TOLD, Fact, Place
from nemo_patches.tools.diagnose.findings import WARNING, Finding
from nemo_patches.tools.diagnose.verdicts import (
    ENDING,
    Wait,
    all_absent,
    by_party,
    finding,
    has,
    in_no_collective,
    inner,
    is_,
    names,
    out_of_step,
    parties,
    who,
)
from nemo_patches.tools.diagnose.ways import apart, further_on, parting

_OUT = (
    *conditions.HELD,
    *conditions.NOT_HEARD,
    conditions.ENDED,
    conditions.KILLED,
    conditions.RAISED,
)
_UNLIKE_CLOCKS_S = 10.0  # of hosts
_START = "init_process_group"
_OF_TWO = ("send", "recv", "isend", "irecv", "batch_isend")
_OF_TWO_THREADS = (
    "Give the second thread a process group of its own (dist.new_group), or let the"
    " training thread make its collectives."
)
_COLLECTIVE_IN_WORKERS = (
    "Take the collective out of what the data loader's workers run: a worker has no"
    " part in its rank's process group, and ranks may fetch unlike numbers of samples."
)


def by_places(hearing: Hearing) -> list[Finding]:
    seen = [
        one
        for one in hearing.accounts.values()
        if one.place_fact or one.condition.kind in (*_OUT, conditions.UNREADABLE)
    ]
    moving = [one for one in seen if one.moved]
    waiting = [
        one
        for one in seen
        if one.place.collective
        and not one.moved
        and one.condition.kind not in conditions.HELD | conditions.CAUSES
    ]
    # A rank at the end of its script is missing where others wait; else it waits itself, with a
    # collective pending.
    waiting = [one for one in waiting if one.place.activity != ENDING] or waiting
    if not waiting:
        return _nobody_waits(hearing, seen, moving)
    # Ranks that move from one collective to the next go on.
    going = [one.rank for one in moving if one.place.collective]
    if going and len(moving) + 1 >= len(seen):
        return _goes_on(moving)
    in_one = {NOT_TOLD, *going, *(one.rank for one in waiting)}
    absent = [one for one in seen if one.rank not in in_one]
    waits = {one.place.wait for one in waiting if not is_guess(one.place.collective)}
    unseen = set(range(hearing.world_size)) - {one.rank for one in seen}
    not_known = f"nothing is known of {named(sorted(unseen))}, whose hosts may not be collected yet"
    both = [one for one in seen if _has_two_at_work(one)]
    if both and all(one in both or not _is_readable(one) for one in absent):
        return _aged([_two_threads(both)], waiting, hearing)
    # Which collective each is in counts only once all are in one.
    if before := _seen_before(waiting, absent):
        return [before]
    if any(map(_is_readable, absent)) or (absent and len(waits) < 2):
        found = _missing(absent, waiting, [not_known] * bool(unseen))
    elif unseen:
        text = f"{names(waiting)} {is_(waiting)} in {_titles(waiting)}; {not_known}."
        found = [finding(ids.NOT_SEEN, text)]
    else:
        found = [_different(waiting) if len(waits) > 1 else _all_in(waiting, hearing)]
    return _aged(found, waiting, hearing)


def _seen_before(waiting: list[Account], absent: list[Account]) -> Finding | None:
    """Ranks whose stacks were taken before the others' wait began may have moved since.

    Hosts' clocks may differ by hours: by them alone nobody on another host is early.
    """
    known = [
        (one, one.place_fact)
        for one in (*waiting, *absent)
        if one.place_fact and one.place_fact.own and one.place_fact.at
    ]
    waits = [
        (fact.at - one.still_s, one.still_s, fact.host)
        for one, fact in known
        if one.place.collective and one.still_s
    ]
    if not waits:
        return None
    by_host = {host: begin for begin, _, host in sorted(waits)}
    last, for_s, _ = max(waits)

    def is_early(one: Account, fact: Fact) -> bool:
        if fact.at < by_host.get(fact.host, -math.inf) - _UNLIKE_CLOCKS_S:
            return True
        ran_since = one.still_s is not None and one.still_s < for_s - _UNLIKE_CLOCKS_S
        works = any(text.startswith("it computes") for text in one.place.details)
        return fact.at < last - _UNLIKE_CLOCKS_S and ran_since and not works

    if not (early := [one for one, fact in known if is_early(one, fact)]):
        return None
    was = "was" if len(early) == 1 else "were"
    text = f"{names(early)} {was} seen before the others began to wait, and may have moved."
    step = "Collect the stacks of all hosts at one time, while the job hangs."
    return finding(ids.NOT_ENOUGH, text, next_step=step)


def _has_two_at_work(one: Account) -> bool:
    """Whether a second thread of the rank is in a collective beside the training's, or beside
    backward.
    """
    places = [fact.value for fact in one.threads if isinstance(fact.value, Place)]
    return any(
        place.thread == MAIN_THREAD
        and (place.collective or place.where.startswith("backward ("))
        for place in places
    )


def _two_threads(both: list[Account]) -> Finding:
    told = [
        (f"{place.wait or inner(place.where)} in thread {place.thread}", one.rank)
        for one in both
        for fact in one.threads
        if isinstance(place := fact.value, Place)
    ]
    text = (
        f"{names(both)} {has(both)} two threads in collectives at once:"
        f" {by_party(told) or told[0][0]}. In one process group their order differs from"
        " rank to rank, and then none can end."
    )
    return finding(ids.OUT_OF_STEP, text, next_step=_OF_TWO_THREADS)


def _is_readable(one: Account) -> bool:
    return one.condition.kind != conditions.UNREADABLE


def _missing(
    accused: list[Account], waiting: list[Account], evidence: list[str]
) -> list[Finding]:
    unreadable = [
        one for one in accused if not _is_readable(one) and one.reported is None
    ]
    if unreadable:
        return [_unreadable(unreadable)]
    # Not those whose end shows that they waited as well.
    accused = [
        one for one in accused if one.condition.kind not in conditions.CONSEQUENCES
    ]
    # A rank held up in a collective is accused only if no rank is elsewhere.
    elsewhere = [one for one in accused if not one.place.collective]
    wait = Wait(tuple(one.rank for one in waiting), _titles(waiting), _still_s(waiting))
    return all_absent(elsewhere or accused, wait, evidence)


def _unreadable(unreadable: list[Account]) -> Finding:
    text = f"{names(unreadable)} could not be read: {unreadable[0].condition.text}"
    step = (
        "Then run this again; what is known of each process without its stack is below."
    )
    return finding(ids.NOT_ENOUGH, text, next_step=step)


def _different(waiting: list[Account]) -> Finding:
    by_place = parties((each.place.wait, each) for each in waiting)
    first, *_, last = by_place.values()
    why = further_on(first, last)
    by_title = {title: [one.rank for one in ranks] for title, ranks in by_place.items()}
    return out_of_step(by_title, why=why.text, kind=why.id or ids.OUT_OF_STEP)


def _all_in(waiting: list[Account], hearing: Hearing) -> Finding:
    """All wait, in the same collective as far as their stacks show."""
    collectives = {one.place.collective for one in waiting}
    is_guessed = any(map(is_guess, collectives))
    ways = apart(waiting) or ("" if is_guessed else parting(waiting))
    kind, step = ids.SKIPPED, ""
    if collectives == {_START}:
        kind = ids.START_UP
        text = "The job has not started: every rank waits in init_process_group"
        for fact in hearing.told(conditions.UNRESOLVED)[:1]:
            text += (
                f", and {who([fact.rank])} cannot resolve the address at which they meet"
                f" ({fact.condition_text}) [{fact.cite}]"
            )
        text += "."
    elif ways:
        text = (
            f"Every rank waits, and they did not come to the same step by the same way:"
            f" {ways}. Possibly these are not the same call, and one rank is ahead."
        )
    elif is_guessed:
        kind = ids.NOT_ENOUGH
        text = (
            "Every rank waits, at least one of them perhaps for the GPU: a stack does not tell"
            " for which collective."
        )
        step = (
            "Numbers tell who is missing: run `ncclras` on a host of the job (NCCL 2.24"
            " or newer; ranks with fewer operations than the others, twice the same,"
            " are behind), or dump the Flight Recorder."
        )
    else:
        kind = ids.ALL_IN
        text = (
            f"Every rank waits in the same collective, {_titles(waiting)}. One is a"
            " call ahead, their process groups differ, or the network has failed."
        )
        if waiting[0].place.collective.startswith(_OF_TWO):
            text = (
                f"Every rank waits in {_titles(waiting)}, which is between two ranks:"
                " each waits for the other side's call."
            )
            step = (
                "Look at who sends to whom there, and in which order: each recv needs a"
                " rank that comes to its send."
            )
    return finding(kind, text, next_step=step)


def _nobody_waits(
    hearing: Hearing, seen: list[Account], moving: list[Account]
) -> list[Finding]:
    placed = [one for one in seen if one.place_fact]
    silent = (conditions.GONE, conditions.SILENT)
    bad = [one for one in seen if one.condition.kind in (*conditions.HELD, *silent)]
    if bad and (
        moving or placed or any(one.condition.kind not in silent for one in bad)
    ):
        return all_absent(bad, None)
    if bad or not seen:
        return []  # by_ends.py has the better answer, if their ends are known
    if not any(map(_is_readable, seen)):
        return [_unreadable(seen)]
    if moving:
        return _goes_on(moving)
    looked_at = [
        one
        for one in placed
        if one.motion_fact and one.condition.kind not in conditions.OVER
    ]
    stuck = [one for one in looked_at if (one.still_s or 0.0) >= hearing.stuck_after_s]
    least = _still_s(stuck) or 0.0
    if stuck and (hearing.unseen or len(stuck) == len(looked_at)):
        text = (
            f"{in_no_collective(stuck)}, and {has(stuck)} not moved for {least:.0f} s"
        )
        kind, step = ids.NO_RANK_MOVES, ""
        if all("(distributed_c10d.py:" in one.place.worker for one in stuck):
            step = _COLLECTIVE_IN_WORKERS
        if hearing.unseen:
            kind, step = ids.NOT_ENOUGH, ids.NEXT_STEPS[ids.NOT_SEEN]
            were = "was" if len(hearing.unseen) == 1 else "were"
            text += f"; {named(hearing.unseen)} {were} not seen"
        return [finding(kind, f"{text}.", next_step=step)]
    if looked_at:
        text = f"So far no hang: {in_no_collective(looked_at)}. Look again if it lasts."
        return [finding(ids.TOO_EARLY, text)]
    return []


def _goes_on(moving: list[Account]) -> list[Finding]:
    text = f"No rank is stuck: {names(moving)} went on between the looks{_by(moving)}."
    return [finding(ids.GOES_ON, text)]


def _by(moved: list[Account]) -> str:
    by = moved[0].motion.by
    return f" ({by})" if by else ""


def _aged(
    findings: list[Finding], waiting: list[Account], hearing: Hearing
) -> list[Finding]:
    """Young waits are no hang yet; and a single look at each rank shows a hang for that moment
    only.
    """
    if not findings:
        return []
    first, *rest = findings
    lower = f"{first.text[0].lower()}{first.text[1:]}"
    least = _still_s(waiting)
    looked_twice = any(one.motion_fact for one in waiting)
    if least is not None and least < hearing.stuck_after_s and looked_twice:
        text = f"So far no hang: {lower} Look again if it lasts."
        return [finding(ids.TOO_EARLY, text)]
    accused = [hearing[rank] for rank in first.ranks]
    moved = [one for one in accused if one.moved]
    writes = [one for one in accused if one.place.activity == CHECKPOINT]
    if moved and all(one in moved or one in writes for one in accused):
        if moved == accused == writes:
            text = f"So far no hang: {lower[:-1]}; it goes on{_by(moved)}."
            return [finding(ids.GOES_ON, f"{text} Look again if it lasts.")]
        text = f"{first.text[:-1]}; it works{_by(moved)}, and may come."
        first = replace(first, text=text, severity=WARNING)
    ended = conditions.HELD | conditions.CAUSES | {conditions.GONE}
    is_moment = all(
        one.place_fact and one.place_fact.own and not one.motion_fact for one in waiting
    )
    if is_moment and not any(one.condition.kind in ended for one in accused):
        said, _, more = first.text.rstrip(".").partition(". ")
        text = (
            f"{said}, at the moment of these stacks. {more}{'. ' if more else ''}One look"
            " at each rank cannot tell a hang from a slow step; look again: a rank that has"
            " moved is not stuck."
        )
        first = replace(first, text=text)
    return [first, *rest]


def _titles(waiting: Sequence[Account]) -> str:
    """Those that are no guess come first."""
    titles = sorted(
        {one.place.wait for one in waiting}, key=lambda entry: (is_guess(entry), entry)
    )
    others = len(titles) - 1
    more = f" (and {others} other place{'s' if others > 1 else ''})" if others else ""
    return titles[0] + more


def _still_s(accounts: Sequence[Account]) -> float | None:
    return min(
        (one.still_s for one in accounts if one.still_s is not None), default=None
    )
