"""What each rule of the judge says: the sentences of its finding, and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging.kinds import OF_EVALUATION, OF_TRAINING, is_guess
from nemo_patches.judging.waits import EVALUATION, remedy, stage
from nemo_patches.text import named
from nemo_patches.tools.diagnose import conditions, entries
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account, Hearing, still_s
from nemo_patches.tools.diagnose.entries import EntryJudgement
from nemo_patches.tools.diagnose.findings import WARNING, Finding
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD, OF_MODEL, Fact
from nemo_patches.tools.diagnose.verdicts import (
    Wait,
    all_absent,
    at,
    by_party,
    capital,
    cited,
    evidence_of,
    finding,
    has,
    in_no_collective,
    inner,
    is_,
    most_told,
    names,
    out_of_step,
    parties,
    reading_of,
    shown_lines,
    title_of,
    titles,
    was,
    who,
)

ARE_NUMBERED = "Nothing tells the stacks' ranks: they are numbered in their order."
_MOST_OF_WAY = 12  # frames
_MOST_PRINTED = 2  # lines of ranks that are not seen
# Words of an error that decide what to do.
_LOOK_AT_THE_GPU = (
    "Look at that GPU (`dmesg` of its host), and leave the node out if it comes again."
)
_CURES = (
    (
        conditions.UNTOLD,
        (
            "Look how it died: the end of its own log, and `dmesg` on its host; the job"
            " cannot go on without it."
        ),
    ),
    (" by GPU", _LOOK_AT_THE_GPU),
    ("ECC error", _LOOK_AT_THE_GPU),
    ("a consequence of its GPU's error", _LOOK_AT_THE_GPU),
    (
        "shared memory",
        (
            "Give the container more shared memory (`docker run --shm-size`, /dev/shm),"
            " or the data loader fewer workers."
        ),
    ),
    (
        "killed by signal: Killed",
        (
            "A worker of its data loader was killed, most likely for want of memory:"
            " `dmesg` on its host tells. Use fewer workers, a smaller prefetch_factor,"
            " or give the job more host memory."
        ),
    ),
    (
        "DataLoader worker",
        (
            "A worker of its data loader crashed or was killed: its own lines, and"
            " `dmesg` on its host, tell how; the traceback shows only where the rank met"
            " that."
        ),
    ),
    (
        "find_unused_parameters",
        (
            "Some parameters got no gradient on these ranks: make each step use all of"
            " them, or pass find_unused_parameters=True to DDP; the lines below number"
            " them."
        ),
    ),
    (
        "Bus error",
        (
            "A full /dev/shm ends a process so: give the container more (`docker run"
            " --shm-size`)."
        ),
    ),
    (
        "Duplicate GPU",
        (
            "Give each rank a GPU of its own: torch.cuda.set_device(LOCAL_RANK),"
            " CUDA_VISIBLE_DEVICES."
        ),
    ),
)
_MOST_OF_BUFFERS = 1 << 26  # elements
_SIZES_OF_BUFFERS = (
    "With sync_max_audio_length=false, DDP's buffer broadcast meets positional encodings"
    " of different sizes: nemo_patches keeps their shapes equal. Else look for a buffer"
    " whose size depends on the rank."
)
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
_MOST_HINTS = 2
_BESIDE_HINTS = (
    *(ids.WAITED_IN_VAIN, ids.ALL_IN, ids.MISSING_RANK, ids.STUCK_WATCHDOG),
    *(ids.NOT_ENOUGH, ids.START_UP, ids.FIRST_FAILURE, ids.OUT_OF_STEP, ids.SIZES),
)
_MODELS_DIFFER = (
    "Make the model the same on all ranks before DDP wraps it: parameters that only some"
    " ranks add or freeze, another config or checkpoint."
)
_ASK_FOR_NUMBERS = (
    "Numbers tell who is missing: run `ncclras` on a host of the job (NCCL 2.24 or"
    " newer; ranks with fewer operations than the others, twice the same, are behind),"
    " or dump the Flight Recorder."
)
_SENDS_TO_WHOM = (
    "Look at who sends to whom there, and in which order: each recv needs a rank that"
    " comes to its send."
)


# What ended ranks


def cause(facts: list[Fact], hearing: Hearing) -> Finding:
    """facts: of one error; the first is quoted, or the one that names the node."""
    first = next((one for one in facts if " node " in one.condition_text), facts[0])
    text = first.condition_text
    ranks = {fact.rank for fact in facts}
    own = [hearing[rank] for rank in sorted(ranks)]
    others = [one for rank, one in hearing.accounts.items() if rank not in ranks]
    if first.condition_kind == conditions.RAISED:
        kind = ids.EXCEPTION
        told = f"{who(ranks)} raised {text}{at(first.condition.where)}"
    elif first.condition_kind == conditions.NODE:
        kind = ids.NODE_FAILED
        whose = f", of {named(ranks)}" if NOT_TOLD not in ranks else ""
        told = f"A node of the job failed{whose} ({text})"
    else:
        kind = ids.KILLED
        victim = who(ranks)
        if text.startswith(conditions.FOR_MEMORY):
            kind = ids.OUT_OF_MEMORY
            # A data loader's worker, or a program that a rank has started, may have been the one.
            victim = "a process of the job" if ranks == {NOT_TOLD} else victim
        said = f" ({text})" if text else ""
        where = own[0].place.where
        place = f", in {inner(where)}" if where else ""
        how = f"{was(ranks)} killed"
        if text.startswith(conditions.UNTOLD):
            how = "died"
        told = f"{victim} {how}{said}{place}"
    found = finding(
        kind,
        f"{told} [{first.cite}].",
        sorted(ranks),
        first.condition.details,
        own[0],
        next_step=next((step for words, step in _CURES if words in text), ""),
    )
    is_reported = any(one.reported for one in own)
    others_are_missing = not is_reported and any(one.reported for one in others)
    # The process ended in good order after its exception, as all others did.
    was_caught = first.condition.exit_code == 0 and all(
        one.condition.kind == conditions.ENDED for one in others
    )
    is_doubtful = kind == ids.EXCEPTION and (others_are_missing or was_caught)
    return replace(found, severity=WARNING) if is_doubtful else found


# Who is missing, by numbers


def by_number(
    one: EntryJudgement,
    hearing: Hearing,
    there: Sequence[Fact],
    accused: Sequence[Account],
) -> list[Finding]:
    """there: of the ranks that wait. accused: empty, unless ranks are missing."""
    title = title_of(one.entry)
    evidence = [cited(fact, title_of(fact.entered)) for fact in there]
    if one.id == entries.MISSING:
        return _behind(one, hearing, there, accused, evidence)
    by_title = parties(
        (
            f"{fact.entered.kind or 'a collective'} {fact.entered.size}".strip(),
            fact.rank,
        )
        for fact in there
    )
    out, printed = _that_ran_out(by_title, hearing)
    if one.id == entries.OUT_OF_STEP:
        places = {fact.rank: hearing[fact.rank].place for fact in there}
        alone = hearing.evidence.alone
        found = out_of_step(by_title, places, evidence, alone=alone)
        return [replace(found, ranks=out, text=f"{found.text}{printed}")]
    kind, step = one.id, ""
    if one.id == entries.SIZES:
        told = "; ".join(f"{key} on {named(of)}" for key, of in by_title.items())
        text = f"The ranks give the same collective different sizes: {told}."
        if one.entry.group == OF_MODEL:
            told = told.replace("a collective ", "")
            text = f"The ranks have different models: {told}."
            step = _MODELS_DIFFER
        elif all(map(_may_be_buffers, there)):
            step = _SIZES_OF_BUFFERS
        text += printed
        step = (
            f"{capital(OF_TRAINING)} ends all ranks' training together."
            if out
            else step
        )
    elif one.id == entries.DRIFTED:
        kind = ids.SKIPPED
        last = (_last(hearing[rank], one.entry.group) for rank in one.absent)
        earlier = [*filter(None, last)]
        lines = [cited(fact, title_of(fact.entered)) for fact in earlier]
        evidence = [*lines, *evidence]
        text = (
            f"{named(one.absent)} in {title_of(earlier[0].entered)},"
            f" {named(one.waiting)} in {title}: all wait, and their collectives have"
            " drifted apart."
        )
    elif one.id == entries.CROSSED:
        text = (
            f"Ranks wait in collectives of different groups: {named(one.waiting)} in"
            f" {title}, and {named(one.absent)}, which {has(one.absent)} not entered"
            " that, in one of another group. Which rank is missing, this does not tell."
        )
    elif one.id == entries.ALL_IN:
        text = (
            f"All {len(one.waiting)} ranks have entered {title}, and none has"
            " completed it"
        )
        if hearing.unseen:
            unseen = named(hearing.unseen)
            some = "of which some may be missing"
            if 2 * len(hearing.unseen) < hearing.world_size and one.entry.kind:
                # A record is made where a failure is seen; who is missing sees none.
                it = "it" if unseen.startswith("rank ") else "them"
                text = f"{unseen} may be missing: no record of {it} is here. {text}"
                some = "as of a rank that others wait for"
            text += f". Nothing is known of {unseen}, {some}"
            step = ids.NEXT_STEPS[ids.NOT_SEEN]
        text += "."
    else:
        kind = ids.NOT_ENOUGH
        text = (
            f"The records were not made at one time: {title} was completed, and"
            f" {named(one.absent)} came to it after the record."
        )
    ranks = out if one.id == entries.SIZES else ()
    return [finding(kind, text, ranks, evidence=evidence, next_step=step)]


def _that_ran_out(
    by_title: dict[str, list[int]], hearing: Hearing
) -> tuple[tuple[int, ...], str]:
    """Of unlike collectives: the few that are in one because they have no more batches, by their
    own lines alone, and a sentence on that.
    """
    few, most = (list(by_title.values())[number] for number in (0, -1))
    printed = hearing.evidence.ran_out
    if len(few) >= len(most) or {*few} != printed.keys():
        return (), ""
    told = "; ".join(
        f"rank {rank} printed {printed[rank]}" for rank in few[:_MOST_PRINTED]
    )
    return tuple(
        few
    ), f" {capital(named(few))} had no more batches, as it seems: {told}."


def _may_be_buffers(fact: Fact) -> bool:
    numbers = re.findall(r"\d{1,18}", fact.entered.size)
    size = math.prod(map(int, numbers))
    return "broadcast" in fact.entered.kind.lower() and size <= _MOST_OF_BUFFERS


def _behind(
    one: EntryJudgement,
    hearing: Hearing,
    there: Sequence[Fact],
    accused: Sequence[Account],
    evidence: list[str],
) -> list[Finding]:
    how = "gave up" if one.entry.done and one.entry.kind == LENGTH_SYNC else ""
    last = [fact.entered for fact in map(_last, accused) if fact]
    inside = any(each.counted and each.number == one.entry.number - 1 for each in last)
    wait = Wait(one.waiting, title_of(one.entry), how=how, may_be_inside=inside)
    step = reading_of(most_told(there), hearing.evidence.patched)[1]
    lines = [_last_entered(account) for account in accused]
    return [
        replace(each, next_step=f"{each.next_step} {step}".strip())
        for each in all_absent(accused, wait, [*lines, *evidence])
    ]


def _last(account: Account, group: str = "") -> Fact | None:
    """The last collective that the rank has entered, of this group or of any."""
    entered = (fact for fact in account.entered if group in ("", fact.entered.group))
    return max(entered, key=lambda fact: (fact.at, fact.entered.number), default=None)


def _last_entered(account: Account) -> str:
    last = _last(account)
    if last is None:
        return f"rank {account.rank}: no collective of it is known"
    return cited(last, f"its last collective: {title_of(last.entered)}")


def contradiction(
    account: Account, one: EntryJudgement, there: Fact, shows: Fact
) -> str:
    """shows: the fact by which the rank waits, or moves."""
    what = f"it waited ({account.condition.text})"
    if account.moved:
        what = f"it goes on ({account.motion.by})"
    elif account.place.collective:
        what = f"it waits in {account.place.wait}"
    return (
        f"contradiction: by {there.cite} rank {account.rank} had not entered"
        f" {title_of(one.entry)}; by {shows.cite} {what}"
    )


def by_two_sources(
    one: EntryJudgement, there: Sequence[Fact], elsewhere: Sequence[Account]
) -> Finding:
    """These wait elsewhere, by their stacks; the others' stacks are not there to compare."""
    seen = next(fact.cite for each in elsewhere if (fact := each.place_fact))
    text = (
        f"{names(elsewhere)} {is_(elsewhere)} in {titles(elsewhere)} [{seen}],"
        f" {named(one.waiting)} in {title_of(one.entry)} [{there[0].cite}]: different"
        " collectives, or one of these was recorded before the other."
    )
    step = f"{ids.NEXT_STEPS[ids.NOT_ENOUGH]} {ids.NEXT_STEPS[ids.OUT_OF_STEP]}"
    return finding(ids.OUT_OF_STEP, text, next_step=step)


def nothing_known(unseen: Sequence[int]) -> Finding:
    text = f"Nothing is known of {named(unseen)}: it left no record, or its files are elsewhere."
    return finding(ids.NOT_SEEN, text)


# Who is missing, by places


def not_known(unseen: Sequence[int]) -> str:
    return f"nothing is known of {named(unseen)}, whose hosts may not be collected yet"


def not_seen(waiting: Sequence[Account], unseen: Sequence[int]) -> Finding:
    there = f"{names(waiting)} {is_(waiting)} in {titles(waiting)}"
    return finding(ids.NOT_SEEN, f"{there}; {not_known(unseen)}.")


def seen_before(early: Sequence[Account]) -> Finding:
    text = (
        f"{names(early)} {was(early)} seen before the others began to wait, and may have"
        " moved."
    )
    return finding(ids.NOT_ENOUGH, text)


def two_threads(both: Sequence[Account]) -> Finding:
    told = [
        (f"{place.wait or inner(place.where)} in thread {place.thread}", one.rank)
        for one in both
        for place in one.at_work
    ]
    text = (
        f"{names(both)} {has(both)} two threads in collectives at once:"
        f" {by_party(told) or told[0][0]}. In one process group their order differs from"
        " rank to rank, and then none can end."
    )
    return finding(ids.OUT_OF_STEP, text, next_step=_OF_TWO_THREADS)


def unreadable(accounts: Sequence[Account]) -> Finding:
    text = f"{names(accounts)} could not be read: {accounts[0].condition.text}"
    step = (
        "Then run this again; what is known of each process without its stack is below."
    )
    return finding(ids.NOT_ENOUGH, text, next_step=step)


def all_in(waiting: Sequence[Account], hearing: Hearing, apart: str) -> Finding:
    """All wait, in the same collective as far as their stacks show. apart: where their ways part,
    by the stacks; empty: nowhere.
    """
    collectives = {one.place.collective for one in waiting}
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
    elif apart:
        text = (
            f"Every rank waits, and they did not come to the same step by the same way:"
            f" {apart}. Possibly these are not the same call, and one rank is ahead."
        )
        if all(EVALUATION in map(stage, one.place.way) for one in waiting):
            step = f"{ids.NEXT_STEPS[kind]} If it is {OF_EVALUATION}."
    elif any(map(is_guess, collectives)):
        kind = ids.NOT_ENOUGH
        text = (
            "Every rank waits, at least one of them perhaps for the GPU: a stack does not tell"
            " for which collective."
        )
        step = _ASK_FOR_NUMBERS
    elif waiting[0].place.collective.startswith(_OF_TWO):
        kind = ids.ALL_IN
        text = (
            f"Every rank waits in {titles(waiting)}, which is between two ranks: each"
            " waits for the other side's call."
        )
        step = _SENDS_TO_WHOM
    else:
        kind = ids.ALL_IN
        text = (
            f"Every rank waits in the same collective, {titles(waiting)}. One is a"
            " call ahead, their process groups differ, or the network has failed."
        )
    return finding(kind, text, next_step=step)


def no_rank_moves(stuck: Sequence[Account], hearing: Hearing) -> Finding:
    for_s = still_s(stuck) or 0.0
    text = f"{in_no_collective(stuck)}, and {has(stuck)} not moved for {for_s:.0f} s"
    kind, step = ids.NO_RANK_MOVES, ""
    if all("(distributed_c10d.py:" in one.place.worker for one in stuck):
        step = _COLLECTIVE_IN_WORKERS
    if unseen := hearing.unseen:
        kind, step = ids.NOT_ENOUGH, ids.NEXT_STEPS[ids.NOT_SEEN]
        text += f"; {named(unseen)} {was(unseen)} not seen"
    return finding(kind, f"{text}.", next_step=step)


def goes_on(moving: Sequence[Account]) -> Finding:
    text = f"No rank is stuck: {names(moving)} went on between the looks{moved_by(moving)}."
    return finding(ids.GOES_ON, text)


def moved_by(moved: Sequence[Account]) -> str:
    by = moved[0].motion.by
    return f" ({by})" if by else ""


def so_far(text: str) -> Finding:
    return finding(ids.TOO_EARLY, f"So far no hang: {text}. Look again if it lasts.")


def idles(found: Finding, told: str) -> Finding:
    """Whose GPU does nothing, where the others' may wait for it."""
    text = f"{found.text[:-1]}; {told}."
    return replace(found, text=at_the_moment(text))


def at_the_moment(text: str) -> str:
    said, _, more = text.rstrip(".").partition(". ")
    return (
        f"{said}, at the moment of these stacks. {more}{'. ' if more else ''}One look at"
        " each rank cannot tell a hang from a slow step; look again: a rank that has"
        " moved is not stuck."
    )


# How ranks ended


def mispaired(found: list[Account], hearing: Hearing) -> Finding:
    ranks = names(found)
    sizes = re.search(r"(\d{1,18}) vs\.? (\d{1,18})", found[0].condition.text)
    how = f" ({sizes[1]} bytes, and {sizes[2]} in its own)" if sizes else ""
    both = [*found, *hearing.having(conditions.WAITED, conditions.CUT)]
    told, cure = _places(both)
    place = f", {told}" if told else at(found[0].condition.where)
    text = (
        f"{ranks} got the message of another collective{how}{place}: two ranks are in"
        " unlike collectives, or give one unlike sizes. Which of them is wrong, it does"
        f" not tell: {ranks} only noticed."
    )
    step = f"{ids.NEXT_STEPS[ids.OUT_OF_STEP]} {cure}"
    return finding(ids.OUT_OF_STEP, text, next_step=step)


def _places(accounts: Iterable[Account]) -> tuple[str, str]:
    """Where they waited, if at different places, and what to do if their batches are uneven."""
    known = [(one.rank, one.condition.where) for one in accounts if one.condition.where]
    told = by_party((inner(where), rank) for rank, where in known)
    cure = remedy(([rank], where.split(" < ")[::-1], "") for rank, where in known)
    return told, f"{capital(cure)}."


def start_up(waited: list[Account], hearing: Hearing) -> Finding:
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


def in_vain(waited: list[Account], cut: list[Account], hearing: Hearing) -> Finding:
    """Ranks that waited until a time limit, or whose connections were closed."""
    entered = [fact for one in waited for fact in one.entered if fact.entered.kind]
    what, step = _collective_of(waited, entered, hearing)
    ends = [f"{names(waited)} waited {what} until a time limit"] if waited else []
    if cut:
        peers = (one.condition.text.partition("its peer: ")[2] for one in cut)
        peer = next((f" by {peer}" for peer in peers if peer), "")
        known = [one for one in cut if one.rank != NOT_TOLD]
        ends.append(f"{names(known or cut)} had a connection closed{peer}")
    groups = {fact.entered.group for fact in entered}
    places, cure = _places(waited)
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
        step = f"{step or _UNLIKE} {cure}"
    lines = [cited(fact, title_of(fact.entered)) for fact in entered[:8]]
    return finding(ids.WAITED_IN_VAIN, text, evidence=lines, next_step=step)


def _why(waited: list[Account], hearing: Hearing) -> str:
    """Why they waited in vain, as far as is known: if nobody is missing of those that are heard,
    nobody may be.
    """
    if not waited:
        return (
            "Another rank had gone before, or the network failed: no line tells which of"
            " these"
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
    perhaps = f", perhaps {named(hearing.unseen)}," if hearing.unseen else ""
    text = (
        f"Another rank{perhaps} did not come, or had gone before, or the transfer failed:"
        " no line tells which of these"
    )
    if heard := hearing.having(conditions.HEARD):
        text += f"; {names(heard)} {was(heard)} told of it, and had no time-out"
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
    if not hearing.unseen:
        return ""
    printed = hearing.evidence.printed
    told = [
        f"rank {one} printed {printed[one]}" for one in hearing.unseen if one in printed
    ]
    return "; ".join(
        [f"; nothing is known of {named(hearing.unseen)}", *told[:_MOST_PRINTED]]
    )


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


def stuck(accounts: Sequence[Account]) -> Finding:
    text = (
        f"{names(accounts)}: the NCCL watchdog got stuck, and no collective timed out. A"
        " call of CUDA or NCCL does not return, or something holds Python's lock."
        " Perhaps it waits for another rank."
    )
    return finding(ids.STUCK_WATCHDOG, text)


def failed_first(
    firsts: Sequence[Fact], hearing: Hearing, of_ranks_that_waited: bool
) -> Finding:
    first = firsts[0]
    ranks = {fact.rank for fact in firsts}
    how = first.condition_text
    if len(ranks) > 1:
        at_once = " in the same second" if all(fact.at for fact in firsts) else ""
        text = (
            f"{who(ranks)} failed{at_once}, {how}: which was first, it does not tell."
        )
        return finding(ids.FIRST_FAILURE, text)
    text = f"{who(ranks)} failed first, {how} [{first.cite}]."
    if first.condition_kind == conditions.ABORTED or of_ranks_that_waited:
        text += (
            " It may be one that waited: a rank ends so when a collective's time limit"
            " has passed."
        )
        return finding(ids.FIRST_FAILURE, text)
    return finding(ids.FIRST_FAILURE, text, ranks, of=hearing[first.rank])


def ended_by_others(facts: Sequence[Fact], hearing: Hearing) -> Finding:
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
    return finding(ids.FIRST_FAILURE, text, next_step=step)


def reported_elsewhere(one: Account) -> list[str]:
    """What others say of the rank, and how it came to its place: that may be in a library."""
    lines = []
    if one.reported is not None:
        text = one.reported.condition_text
        lines.append(cited(one.reported, f"others say that it had not come {text}"))
    if one.place_fact is not None and one.place.way:
        way = " > ".join(one.place.way[-_MOST_OF_WAY:])
        lines.append(cited(one.place_fact, f"its calls: {way}"))
    return lines


def by_words(kind: str, facts: Sequence[Fact], hearing: Hearing) -> Finding:
    """Hearsay: the line itself."""
    first = facts[0]
    of_first = [fact.rank for fact in facts if fact.cite == first.cite]
    text = f'by a line of the log: "{first.condition_text}" [{first.cite}].'
    if first.rank != NOT_TOLD:
        how = "ended"
        if kind == ids.MISSING_RANK:
            how = f"{is_(of_first)} not there"
        if first.condition_kind == conditions.TOLD_APART:
            how = f"{is_(of_first)} behind all others, or held up"
            text = text.replace("a line", "a table", 1).replace('"', "")
            if first.condition_text.startswith(conditions.OF_KERNEL):
                text = f"by {first.condition_text} [{first.cite}]."
        text = f"{who(of_first)} {how}, {text}"
    found = finding(kind, text, of_first, of=hearing[first.rank])
    return replace(found, severity=WARNING)


# With what else is known


def with_the_log(first: Finding, hearing: Hearing) -> Finding:
    """With what the logs have on the accused rank, too: a thread that died, or a traceback that may
    be its end.
    """
    for fact in hearing.told(conditions.LOGGED, conditions.THREAD):
        if first.ranks and fact.rank not in (*first.ranks, NOT_TOLD):
            continue
        told = f"{fact.condition_text}{at(fact.condition.where)} [{fact.cite}]"
        log = "The log" if fact.rank == NOT_TOLD else f"The log of rank {fact.rank}"
        if fact.condition_kind == conditions.THREAD:
            if fact.condition_text in first.text:
                continue
            text = f"{log} has {told}."
        elif first.id == ids.KILLED:
            text = f"Or it ended by {told}, which no line ties to a rank."
        elif fact.rank in first.ranks or first.id == ids.WAITED_IN_VAIN:
            text = f"{log} has a traceback, which may have been caught: {told}."
        else:
            continue
        return replace(first, text=f"{first.text} {text}")
    return first


def with_all_evidence(first: Finding, hearing: Hearing) -> Finding:
    of_ranks = evidence_of(hearing.accounts.values())
    lines = (*hearing.contradictions[:4], *first.evidence, *of_ranks)
    hints = [
        f"{fact.condition_text} [{fact.cite}]"
        for fact in hearing.evidence.facts
        if fact.condition_kind == conditions.HINT
    ]
    text = first.text
    if hints and (first.id in _BESIDE_HINTS or conditions.UNTOLD in text):
        text += f" Beside that: {'; '.join(hints[:_MOST_HINTS])}."
    return replace(first, text=text, evidence=shown_lines(lines))


def not_enough(hearing: Hearing) -> Finding:
    accounts = hearing.accounts.values()
    unseen = sorted(set(range(hearing.world_size)) - hearing.accounts.keys())
    of_others = f"; of {named(unseen)} nothing is told" if unseen else ""
    logged = hearing.having(conditions.LOGGED, conditions.THREAD)
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
