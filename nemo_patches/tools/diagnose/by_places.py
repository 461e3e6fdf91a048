"""Which ranks are missing, by where each rank was seen: in its stack, in stall reports, or when it
ended.
"""

from __future__ import annotations

from dataclasses import replace

from nemo_patches.judging import judge as seats
from nemo_patches.judging.judge import Judgement, Seat
from nemo_patches.judging.kinds import CHECKPOINT, is_guess
from nemo_patches.text import named
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import (
    CAUSES,
    CONSEQUENCES,
    GONE_FATES,
    HELD,
    Account,
    Hearing,
)
from nemo_patches.tools.diagnose.facts import NOT_TOLD
from nemo_patches.tools.diagnose.findings import WARNING, Finding, Ruling
from nemo_patches.tools.diagnose.verdicts import (
    ENDING,
    Wait,
    all_absent,
    doings,
    evidence_of,
    finding,
    in_no_collective,
    out_of_step,
    parties,
    step_of,
)
from nemo_patches.tools.diagnose.ways import apart, further_on, parting

_OUT = (
    *HELD,
    fates.GONE,
    fates.ENDED,
    fates.KILLED,
    fates.RAISED,
    fates.SILENT,
    fates.MISSING,
    fates.UNSEEN,
)

_START = "init_process_group"
_OF_TWO = (
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
)


_COLLECTIVE_IN_WORKERS = (
    "Take the collective out of what the data loader's workers run: a worker has no"
    " part in its rank's process group, and ranks may fetch unlike numbers of samples."
)
HAS_ENDED = "The job has ended: none of its processes is there any more."


def by_places(hearing: Hearing) -> Ruling:
    accounts = hearing.accounts
    waiting = hearing.waiting
    seen = [
        one
        for one in accounts.values()
        if one.place_fact or one.fate_kind in (*_OUT, fates.UNREADABLE)
    ]
    if not seen:
        return Ruling()
    over = {one.fate_kind for one in accounts.values()} <= {fates.GONE, fates.ENDED}
    if (
        over
        and hearing.having(fates.GONE)
        and not any(one.place.where for one in seen)
        and not hearing.unseen
    ):
        return Ruling(text=HAS_ENDED, goes_on=True)
    moving = [one for one in seen if one.moved]
    # A rank at the end of its script is missing where others wait; else it waits itself, with a
    # collective pending.
    others_wait = [one for one in waiting if one.place.activity != ENDING]
    waiting = others_wait or waiting
    unreadable = [one for one in seen if one.fate_kind == fates.UNREADABLE]
    if len(unreadable) == len(seen) and not waiting:
        text = f"None of {len(seen)} ranks could be read: {unreadable[0].fate.text}"
        step = (
            "Then run this again; what is known of each process without its stack is"
            " below."
        )
        return Ruling(
            (finding(ids.NOT_ENOUGH, text, evidence=evidence_of(seen), next_step=step),)
        )
    if not waiting:
        return _nobody_waits(hearing, seen, moving)
    if any(one.place.collective for one in moving) and len(moving) + 1 >= len(seen):
        return _goes_on(moving)
    # Ranks that move from one collective to the next go on.
    going = {one.rank for one in moving if one.place.collective}
    unseen = set(range(hearing.world_size)) - {one.rank for one in seen}
    members = [
        rank
        for rank in range(hearing.world_size)
        if rank not in going and rank not in unseen
    ]
    kinds = {
        one.rank: "" if is_guess(one.place.collective) else one.place.seat
        for one in waiting
    }
    out = [
        rank
        for rank in members
        if rank not in kinds and accounts[rank] not in unreadable
    ]
    if (
        out and len(set(kinds.values())) > 1
    ):  # a rank outside every collective comes first, whatever the others are in
        kinds = dict.fromkeys(kinds, "")
    judged = seats.judge(
        (Seat(rank, "job", 1, kind) for rank, kind in kinds.items()), {"job": members}
    )
    ruling = _of_places(judged[0] if judged else None, hearing, waiting, sorted(unseen))
    return _aged(ruling, waiting, hearing)


def _of_places(
    one: Judgement | None, hearing: Hearing, waiting: list[Account], unseen: list[int]
) -> Ruling:
    who, evidence = (
        named([each.rank for each in waiting]),
        evidence_of(hearing.accounts.values()),
    )
    title = _titles(waiting)
    not_known = (
        [f"nothing is known of {named(unseen)}, whose hosts may not be collected yet"]
        if unseen
        else []
    )
    if one is not None and one.id == seats.MISSING:
        accused = [hearing[rank] for rank in one.accused]
        if unreadable := [
            one
            for one in accused
            if one.fate_kind == fates.UNREADABLE and one.reported is None
        ]:
            text = (
                f"{named([each.rank for each in unreadable])} could not be read:"
                f" {unreadable[0].fate.text}"
            )
            return Ruling((finding(ids.NOT_ENOUGH, text, evidence=evidence),))
        accused = [
            each
            for each in accused
            if not _waited_by_its_end(hearing, each, waiting[0])
        ]
        # A rank held up in a collective is accused only if no rank is elsewhere.
        elsewhere = [each for each in accused if not each.place.collective]
        accused = elsewhere or accused
        wait = Wait(
            tuple(sorted(each.rank for each in waiting)),
            _titles(waiting),
            still_s=_still_s(waiting),
        )
        return Ruling(tuple(all_absent(accused, wait, [*not_known, *evidence])))
    if unseen:
        are = "is" if len(waiting) == 1 else "are"
        text = f"{who} {are} in {title}; {not_known[0]}."
        return Ruling((finding(ids.NOT_SEEN, text, evidence=evidence),))
    if one is not None and one.id == seats.OUT_OF_STEP:
        return Ruling((_different(waiting, evidence),))
    return Ruling((_all_in(waiting, evidence, hearing),))


def _different(waiting: list[Account], evidence: list[str]) -> Finding:
    by_seat = parties((each.place.seat, each) for each in waiting)
    first, *_, last = by_seat.values()
    why = further_on(first, last)
    by_title = {title: [one.rank for one in ranks] for title, ranks in by_seat.items()}
    return out_of_step(by_title, evidence, why.text, why.id or ids.OUT_OF_STEP)


def _not_started(
    waiting: list[Account], evidence: list[str], hearing: Hearing
) -> Finding:
    """All wait for the process group, of which each may be at another line."""
    text = "The job has not started: every rank waits in init_process_group"
    unresolved = hearing.told(fates.UNRESOLVED)
    if unresolved:
        ranks, first = (
            named(sorted({fact.rank for fact in unresolved if fact.rank != NOT_TOLD})),
            unresolved[0],
        )
        text += (
            f", and {ranks or 'one of them'} cannot resolve the address at which they"
            " meet "
        )
        text += f"({first.fate_text}) [{first.cite}]"
    elif ways := parting(waiting):
        text += f"; {ways}"
    return finding(ids.START_UP, f"{text}.", evidence=evidence)


def _all_in(waiting: list[Account], evidence: list[str], hearing: Hearing) -> Finding:
    """All wait, in the same collective as far as their stacks show."""
    if all(one.place.collective == _START for one in waiting):
        return _not_started(waiting, evidence, hearing)
    seat = next(
        (one.place.seat for one in waiting if not is_guess(one.place.collective)), ""
    )
    if steps := apart(waiting):
        text = f"Every rank waits, and they are not at the same step: {steps}."
        return finding(ids.SKIPPED, text, evidence=evidence)
    if any(is_guess(one.place.collective) for one in waiting):
        text = (
            "Every rank waits, at least one of them for the GPU: a stack does not tell"
            " for which collective."
        )
        step = (
            "Numbers tell who is missing: run `ncclras` on a host of the job (NCCL 2.24"
            " or newer; ranks with fewer operations than the others, twice the same,"
            " are behind), or dump the Flight Recorder."
        )
        return finding(ids.NOT_ENOUGH, text, evidence=evidence, next_step=step)
    if ways := parting(waiting):
        text = (
            f"Every rank waits in {seat}, and they came to it by different ways:"
            f" {ways}. Possibly these are not the same call, and one rank is ahead."
        )
        return finding(ids.SKIPPED, text, evidence=evidence)
    if waiting[0].place.collective in _OF_TWO:
        text = (
            f"Every rank waits in {seat}, which is between two ranks: each waits for"
            " the other side's call."
        )
        step = (
            "Look at who sends to whom there, and in which order: each recv needs a"
            " rank that comes to its send."
        )
        return finding(ids.ALL_IN, text, evidence=evidence, next_step=step)
    text = (
        f"Every rank waits in the same collective, {seat}: one is a call ahead, their"
        " process groups differ, or the network has failed."
    )
    return finding(ids.ALL_IN, text, evidence=evidence)


def _nobody_waits(
    hearing: Hearing, seen: list[Account], moving: list[Account]
) -> Ruling:
    bad = [one for one in seen if one.fate_kind in (*HELD, fates.GONE, fates.SILENT)]
    here = [one for one in seen if one.fate_kind not in GONE_FATES]
    unmoved = [
        one
        for one in here
        if one.place_fact and one.was_looked_at_twice and not one.moved
    ]
    stuck = [one for one in unmoved if (one.still_s or 0.0) >= hearing.stuck_after_s]
    evidence = evidence_of(seen)
    if not bad and len(stuck) == len(seen) > 1 and not hearing.unseen:
        least = min(one.still_s or 0.0 for one in stuck)
        text = (
            f"No rank is in a collective, and none has moved for {least:.0f} s:"
            f" {doings(stuck)}."
        )
        are_in_workers = all(
            "(distributed_c10d.py:" in one.place.worker for one in stuck
        )
        step = _COLLECTIVE_IN_WORKERS if are_in_workers else ""
        return Ruling(
            (finding(ids.NO_RANK_MOVES, text, evidence=evidence, next_step=step),)
        )
    if bad:
        if (
            not moving
            and all(one.fate_kind in (fates.GONE, fates.SILENT) for one in bad)
            and not any(one.place_fact for one in seen)
        ):
            return Ruling()  # by_ends.py has the better answer, if their ends are known
        return Ruling(tuple(all_absent(bad, None, evidence)))
    if stuck and not moving and not hearing.unseen and len(stuck) == len(unmoved):
        return Ruling(tuple(all_absent(stuck, None, evidence)))
    if moving:
        return _goes_on(moving)
    looked_at = [one for one in here if one.was_looked_at_twice and one.place_fact]
    if stuck and hearing.unseen:
        least = min(one.still_s or 0.0 for one in stuck)
        text = f"{in_no_collective(stuck)}, and has not moved for {least:.0f} s"
        text = text if len(stuck) == 1 else text.replace("and has not", "and have not")
        text += (
            f"; {named(hearing.unseen)} {'was' if len(hearing.unseen) == 1 else 'were'}"
            " not seen."
        )
        return Ruling(
            (
                finding(
                    ids.NOT_ENOUGH,
                    text,
                    evidence=evidence,
                    next_step=step_of(ids.NOT_SEEN),
                ),
            )
        )
    if looked_at and len(looked_at) == len(here):
        text = f"So far no hang: {in_no_collective(looked_at)}. Look again if it lasts."
        return Ruling(text=text, goes_on=True, is_too_early=True)
    return Ruling()


def _goes_on(moving: list[Account]) -> Ruling:
    who, by = named([one.rank for one in moving]), moving[0].motion.by
    how = f" ({by})" if by else ""
    return Ruling(
        text=f"No rank is stuck: {who} went on between the looks{how}.", goes_on=True
    )


def _aged(ruling: Ruling, waiting: list[Account], hearing: Hearing) -> Ruling:
    """Young waits are no hang yet; and a single look at each rank shows a hang for that moment
    only.
    """
    if not ruling.findings:
        return ruling
    first, *rest = ruling.findings
    least = _still_s(waiting)
    if (
        least is not None
        and least < hearing.stuck_after_s
        and any(one.was_looked_at_twice for one in waiting)
    ):
        text = (
            f"So far no hang: {first.text[0].lower()}{first.text[1:]} Look again if it"
            " lasts."
        )
        return Ruling(text=text, goes_on=True, is_too_early=True)
    works = [hearing[rank] for rank in first.ranks]
    if works and all(one.moved and one.place.activity == CHECKPOINT for one in works):
        text = (
            f"So far no hang: {first.text[0].lower()}{first.text[1:-1]}; it goes on"
            f" ({works[0].motion.by})."
        )
        return Ruling(text=f"{text} Look again if it lasts.", goes_on=True)
    if (
        works
        and all(one.moved or one.place.activity == CHECKPOINT for one in works)
        and any(one.moved for one in works)
    ):
        by = next((one.motion.by for one in works if one.moved), "")
        text = f"{first.text[:-1]}; it works{f' ({by})' if by else ''}, and may come."
        first = replace(first, text=text, severity=WARNING)
    held = any(
        hearing[rank].fate_kind in (*HELD, *CAUSES, fates.GONE) for rank in first.ranks
    )
    is_moment = all(
        one.place_fact is not None
        and one.place_fact.own
        and not one.was_looked_at_twice
        for one in waiting
    )
    if is_moment and not held:
        more = (
            "One look at each rank cannot tell a hang from a slow step; look again: who"
            " has moved is not stuck."
        )
        first = replace(
            first,
            text=(
                "At the moment of these stacks:"
                f" {first.text[0].lower()}{first.text[1:]} {more}"
            ),
        )
    return replace(ruling, findings=(first, *rest))


def _waited_by_its_end(hearing: Hearing, one: Account, waiting: Account) -> bool:
    """Whether the error that ended the rank shows that it waited as well; if so, keep the
    contradiction.
    """
    waits = one.waits
    if waits is None or one.fate_kind not in CONSEQUENCES:
        return False
    cite = waiting.place_fact.cite if waiting.place_fact is not None else ""
    waited = f"it waited ({one.fate.text})"
    hearing.contradictions.append(
        f"contradiction: by {cite} rank {one.rank} is in no collective; by {waits.cite}"
        f" {waited}"
    )
    return True


def _titles(waiting: list[Account]) -> str:
    titles = sorted({one.place.seat for one in waiting})
    others = len(titles) - 1
    return titles[0] + (
        f" (and {others} other place{'s' if others > 1 else ''})" if others else ""
    )


def _still_s(waiting: list[Account]) -> float | None:
    return min(
        (one.still_s for one in waiting if one.still_s is not None), default=None
    )
