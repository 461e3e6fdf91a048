"""The one judge over all evidence of a job, whatever its sources: small rules, in their order.

Causes before consequences, numbers before kinds, own before hearsay, later before earlier. A place
explains, and never accuses. Nobody whom any fact shows waiting is accused; what contradicts is
printed with both citations, and takes the accusation away. Each rule's sentences are in
sentences.py.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from nemo_patches.judging.kinds import CHECKPOINT, is_guess
from nemo_patches.tools.diagnose import conditions, entries, sentences, verdicts
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import (
    Account,
    Hearing,
    accounts_of,
    begins_of,
    first_of,
    is_after,
    is_before,
    still_s,
)
from nemo_patches.tools.diagnose.collect.host_jobs import STUCK_AFTER_S
from nemo_patches.tools.diagnose.findings import (
    CRITICAL,
    WARNING,
    Diagnosis,
    Finding,
)
from nemo_patches.tools.diagnose.rank_facts import (
    ALL_WELL,
    NOT_TOLD,
    Evidence,
    Fact,
    ProcessRank,
)
from nemo_patches.tools.diagnose.sources.dumps import RUNS
from nemo_patches.tools.diagnose.sources.lines import DEFAULT_GROUPS
from nemo_patches.tools.diagnose.verdicts import ENDING, Wait, all_absent
from nemo_patches.tools.diagnose.ways import apart, further_on, parting

_MOST_RANKS = 1 << 20  # whatever world size a file claims
_MOST_SHOWN = 20
_MOST_CAUSES = 6
_UNLIKE_CLOCKS_S = 10.0  # of hosts
_OUT = (
    *conditions.HELD,
    *conditions.NOT_HEARD,
    conditions.ENDED,
    conditions.KILLED,
    conditions.RAISED,
    conditions.UNREADABLE,
)
# Collectives that pair wrongly wait in vain, or crash a rank.
_OF_UNEVEN_CALLS = (ids.OUT_OF_STEP, ids.LATE, ids.KILLED)
_NOT_COME = (conditions.GONE, conditions.SILENT, conditions.MISSING)
_SILENT = (conditions.GONE, conditions.SILENT)
_LEFT = (conditions.GONE, conditions.ENDED)


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
    if not findings and not no_hang and not _is_healthy(evidence):
        findings = [sentences.with_all_evidence(sentences.not_enough(hearing), hearing)]
    elif findings and findings[0] in ruled:
        findings[0] = sentences.with_all_evidence(findings[0], hearing)
    uneven = [one for one in findings if one.id == ids.UNEVEN_CALLS]
    if uneven and findings[0].id in _OF_UNEVEN_CALLS:
        step = f"{uneven[0].text} {uneven[0].next_step}"
        if findings[0].id == ids.KILLED:
            step += f" {findings[0].next_step}"
        findings[0] = replace(findings[0], next_step=step)
    if findings and evidence.past:
        text = f"{evidence.past} {findings[0].text}"
        findings[0] = replace(findings[0], text=text, next_step="")
    if findings and findings[0].ranks and evidence.is_numbered:
        text = f"{findings[0].text} {sentences.ARE_NUMBERED}"
        findings[0] = replace(findings[0], text=text)
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
    """What ended ranks, then the first rule that finds anything. What a cause explains comes behind
    it.
    """
    causes = ended_first(hearing)
    rules = _OF_A_HANG if causes else RULES
    found = next(filter(None, (rule(hearing) for rule in rules)), [])
    if causes:
        # The rank is not known: the launcher's tables may name it.
        if not any(one.ranks for one in causes):
            causes += first_failure(hearing, of_ranks_that_waited=True)
        explained = {rank for one in causes for rank in one.ranks}
        rest = [one for one in found if not set(one.ranks) <= explained]
        if causes[0].severity == CRITICAL:
            because = causes[0].id
            rest = [replace(o, because=because, severity=WARNING) for o in rest]
        return [*causes, *rest]
    if found and found[0].id in ids.NO_HANG:
        return found
    if not any(one.ranks for one in found):
        words = by_words(hearing)
        is_waited = hearing.having(conditions.WAITED, conditions.CUT)
        if is_waited and words and words[0].ranks:
            return _borne_out(words[0], found)
        found = [*found, *words]
    if not found:
        return []
    first, *rest = sorted(found, key=_place)
    if rest and rest[-1].ranks and not first.ranks:
        first = replace(first, text=f"{first.text} {rest[-1].text}")
    return [sentences.with_the_log(first, hearing), *rest]


def _borne_out(words: Finding, waited: list[Finding]) -> list[Finding]:
    """Hearsay of a rank that others waited for: an accusation, and what follows from it."""
    text = " ".join([words.text, *(one.text for one in waited[:1])])
    first = replace(words, text=text, severity=CRITICAL)
    return [first, *(replace(o, because=words.id, severity=WARNING) for o in waited)]


def _place(one: Finding) -> tuple[bool, bool, int]:
    """By which findings are sorted: those that explain others first."""
    return bool(one.because), one.severity != CRITICAL, ids.ORDER.index(one.id)


def _is_healthy(evidence: Evidence) -> bool:
    """Whether all ended in good order, or a source knows the job and reports no trouble of any
    rank.
    """
    if all(isinstance(fact.value, ProcessRank) for fact in evidence.facts):
        return evidence.is_well or ALL_WELL in evidence.summary
    kinds = {fact.condition_kind for fact in evidence.facts} - {"", conditions.HINT}
    return kinds == {conditions.ENDED}


# What ended ranks


def ended_first(hearing: Hearing) -> list[Finding]:
    """Exceptions, kills and a node's failure are causes, and of several the first one. Those that
    came after another rank had waited in vain are none.
    """
    # Time-outs only: a closed connection may be logged before the error of the rank that closed it.
    time_outs = begins_of(hearing.told(conditions.WAITED))
    facts = [
        one.condition_fact
        for one in hearing.having(*conditions.CAUSES)
        if one.condition_fact and not is_after(one.condition_fact, time_outs)
    ]
    reported = [fact for fact in facts if hearing[fact.rank].reported]
    firsts = first_of(reported or facts)
    # The launcher kills what runs on the other nodes.
    if nodes := hearing.told(conditions.NODE):
        killed = (conditions.KILLED, False)
        firsts = [fact for fact in firsts if _error(fact) != killed] + nodes
    by_error: dict[tuple[str | bool, ...], list[Fact]] = defaultdict(list)
    for fact in sorted(firsts, key=lambda one: (one.at, one.rank)):
        by_error[_error(fact)].append(fact)
    known = {id(fact) for fact in firsts}
    # Of an exception all that raised it.
    for fact in facts:
        alike = by_error.get(_error(fact), [fact])
        if fact.condition_kind == conditions.RAISED and id(fact) not in known:
            alike.append(fact)
    causes = list(by_error.values())[:_MOST_CAUSES]
    return [sentences.cause(some, hearing) for some in causes]


def _error(fact: Fact) -> tuple[str | bool, ...]:
    """By what errors are told apart: by their type and innermost frame, since messages differ from
    rank to rank.
    """
    if fact.condition_kind == conditions.RAISED:
        kind = fact.condition_text.partition(":")[0]
        return conditions.RAISED, kind, fact.condition.where.partition(" < ")[0]
    return fact.condition_kind, fact.condition_text.startswith(conditions.FOR_MEMORY)


# Who is missing


def by_numbers(hearing: Hearing) -> list[Finding]:
    """In one group who is behind has not entered what the others are in, unless another fact shows
    that rank waiting, or moving. Unlike kinds or sizes of one number accuse nobody.
    """
    groups = hearing.evidence.groups
    facts = {
        (fact.entered.group, fact.entered.number, fact.rank): fact
        for one in hearing.accounts.values()
        for fact in one.entered
        if fact.rank in groups.get(fact.entered.group, ())
    }
    known = (fact.entered for fact in facts.values())
    found: list[Finding] = []
    for one in entries.judge(known, groups, hearing.evidence.begins):
        group = one.entry.group
        # A rank of which nothing is known may be missing.
        if one.id == entries.ALL_IN and group in hearing.evidence.partly_known:
            continue
        there = [facts[group, one.entry.number, rank] for rank in one.waiting]
        accused = [hearing[rank] for rank in one.accused]
        if one.id == entries.MISSING:
            accused = [each for each in accused if _shows(each) is None]
            hearing.contradictions += (
                sentences.contradiction(hearing[rank], one, there[0], shows)
                for rank in one.accused
                if (shows := _shows(hearing[rank])) is not None
            )
            elsewhere = [
                hearing[rank]
                for rank in one.accused
                if _is_seen_in_another(hearing[rank], there, hearing)
            ]
            if len(elsewhere) == len(one.accused):
                found.append(sentences.by_two_sources(one, there, elsewhere))
        found += sentences.by_number(one, hearing, there, accused)
    if found and hearing.unseen:
        found.append(sentences.nothing_known(hearing.unseen))
    return found


def _shows(account: Account) -> Fact | None:
    """The fact that shows the rank waiting or moving."""
    return account.motion_fact if account.moved else account.waits


def _is_seen_in_another(one: Account, there: Sequence[Fact], hearing: Hearing) -> bool:
    """Whether its stack shows it in a collective of another kind than that which the others are in,
    of which there are records alone. A barrier of NCCL's is recorded as an all_reduce.
    """
    if one.moved or any(hearing[fact.rank].place_fact for fact in there):
        return False
    name, of = (
        re.sub("[^a-z]", "", text.lower().rpartition(":")[2])
        for text in (one.place.collective, there[0].entered.kind)
    )
    if name.startswith(of) or of.startswith(name) or name == "barrier":
        return False
    return re.fullmatch("[a-z_]+", one.place.collective) is not None


def by_places(hearing: Hearing) -> list[Finding]:
    """Where some wait in a collective, who is in none is missing. Where all wait, in unlike ones:
    who went on without the others. All in one: nobody. Where nobody waits: all go on, or none.
    """
    seen = [
        one
        for one in hearing.accounts.values()
        if one.place_fact or one.condition.kind in _OUT
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
        return [sentences.goes_on(moving)]
    in_one = {NOT_TOLD, *going, *(one.rank for one in waiting)}
    absent = [one for one in seen if one.rank not in in_one]
    waits = {one.place.wait for one in waiting if not is_guess(one.place.collective)}
    unseen = sorted(set(range(hearing.world_size)) - {one.rank for one in seen})
    both = [one for one in seen if one.has_two_at_work]
    if both and all(one in both or not one.is_readable for one in absent):
        found = sentences.two_threads(both)
    elif early := _seen_before(waiting, absent):
        return [sentences.seen_before(early)]
    elif any(o.is_readable for o in absent) or (absent and len(waits) < 2):
        missing = _missing(absent, waiting, unseen, hearing)
        return _aged(missing, waiting, hearing)
    elif unseen:
        found = sentences.not_seen(waiting, unseen)
    elif len(waits) > 1:
        found = _different(waiting, hearing.evidence.cure)
    else:
        is_guessed = any(is_guess(one.place.collective) for one in waiting)
        told = apart(waiting) or ("" if is_guessed else parting(waiting))
        found = sentences.all_in(waiting, hearing, told)
    return _aged([found], waiting, hearing)


def _seen_before(waiting: list[Account], absent: list[Account]) -> list[Account]:
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
        return []
    by_host = {host: begin for begin, _, host in sorted(waits)}
    last, for_s, _ = max(waits)

    def is_early(one: Account, fact: Fact) -> bool:
        if fact.at < by_host.get(fact.host, -math.inf) - _UNLIKE_CLOCKS_S:
            return True
        ran_since = one.still_s is not None and one.still_s < for_s - _UNLIKE_CLOCKS_S
        works = any(text.startswith("it computes") for text in one.place.details)
        return fact.at < last - _UNLIKE_CLOCKS_S and ran_since and not works

    return [one for one, fact in known if is_early(one, fact)]


def _missing(
    absent: list[Account],
    waiting: list[Account],
    unseen: list[int],
    hearing: Hearing,
) -> list[Finding]:
    unreadable = [o for o in absent if not o.is_readable and o.reported is None]
    if unreadable:
        return [sentences.unreadable(unreadable)]
    # Not those whose end shows that they waited as well.
    absent = [o for o in absent if o.condition.kind not in conditions.CONSEQUENCES]
    # A rank held up in a collective is accused only if no rank is elsewhere.
    elsewhere = [one for one in absent if not one.place.collective]
    wait = Wait.of(waiting)
    evidence = [sentences.not_known(unseen)] * bool(unseen)
    accused = _first_to_leave(elsewhere or absent, hearing)
    return all_absent(accused, wait, evidence)


def _first_to_leave(absent: list[Account], hearing: Hearing) -> list[Account]:
    """Without ranks that left after another one, where lines tell of closed connections, or others
    tell of all that left: these may have been cut off.
    """
    left = {
        one.rank: one.condition_fact
        for one in absent
        if one.condition.kind in _LEFT and one.condition_fact
    }
    firsts = first_of(left.values())
    is_by_others = not any(fact.own for fact in left.values())
    if not firsts or not (is_by_others or hearing.told(conditions.CUT)):
        return absent
    return [one for one in absent if left.get(one.rank, firsts[0]) in firsts]


def _different(waiting: list[Account], cure: str) -> Finding:
    by_place = verdicts.parties((each.place.wait, each) for each in waiting)
    first, *_, last = by_place.values()
    why = further_on(first, last)
    by_title = {title: [one.rank for one in ranks] for title, ranks in by_place.items()}
    places = {one.rank: one.place for one in waiting}
    kind = why.id or ids.OUT_OF_STEP
    return verdicts.out_of_step(
        by_title, places, why=why.text, kind=kind, out=why.out, cure=cure
    )


def _nobody_waits(
    hearing: Hearing, seen: list[Account], moving: list[Account]
) -> list[Finding]:
    placed = [one for one in seen if one.place_fact]
    bad = [one for one in seen if one.condition.kind in (*conditions.HELD, *_SILENT)]
    goes_on = any(one.moved for one in hearing.accounts.values())
    if bad and (
        goes_on or placed or any(one.condition.kind not in _SILENT for one in bad)
    ):
        return all_absent(bad, None)
    if bad or not seen:
        return []  # how they ended says more, if it is known
    if not any(one.is_readable for one in seen):
        return [sentences.unreadable(seen)]
    if moving:
        return [sentences.goes_on(moving)]
    looked_at = [
        one
        for one in placed
        if one.motion_fact and one.condition.kind not in conditions.OVER
    ]
    stuck = [
        one
        for one in looked_at
        if one.motion.is_hang or (one.still_s or 0.0) >= hearing.stuck_after_s
    ]
    if stuck and (hearing.unseen or len(stuck) == len(looked_at)):
        return [sentences.no_rank_moves(stuck, hearing)]
    if looked_at:
        return [sentences.so_far(verdicts.in_no_collective(looked_at))]
    # The others' may be busy in a collective, where nothing shows them elsewhere.
    idle = [one for one in placed if one.rank in hearing.evidence.idle]
    idle = idle if len(idle) == len(placed) else []
    return [
        sentences.idles(one, hearing.evidence.idle[idle[0].rank])
        for one in all_absent(idle, None)
    ]


def _aged(
    findings: list[Finding], waiting: list[Account], hearing: Hearing
) -> list[Finding]:
    """Young waits are no hang yet; who moved may still come; and a single look at each rank shows a
    hang for that moment only.
    """
    if not findings:
        return []
    first, *rest = findings
    lower = f"{first.text[0].lower()}{first.text[1:-1]}"
    least = still_s(one for one in waiting if not one.motion.is_hang)
    looked_twice = any(one.motion_fact for one in waiting)
    if least is not None and least < hearing.stuck_after_s and looked_twice:
        return [sentences.so_far(lower)]
    accused = [hearing[rank] for rank in first.ranks]
    moved = [one for one in accused if one.moved]
    writes = [one for one in accused if one.place.activity == CHECKPOINT]
    if moved and moved == accused == writes:
        goes_on = f"{lower}; it goes on{sentences.moved_by(moved)}"
        return [replace(sentences.so_far(goes_on), id=ids.GOES_ON)]
    if moved:  # who waits may wait for these alone
        it = "it" if all(one in moved or one in writes for one in accused) else ""
        works = f"{it or verdicts.names(moved)} works{sentences.moved_by(moved)}"
        text = f"{first.text[:-1]}; {works}, and may come."
        first = replace(first, text=text, severity=WARNING)
    ended = conditions.HELD | conditions.CAUSES | {conditions.GONE}
    is_moment = all(
        one.place_fact and one.place_fact.own and not one.motion_fact for one in waiting
    )
    if is_moment and not any(one.condition.kind in ended for one in accused):
        # So a job looks that goes on.
        run = [one for one in accused if RUNS in one.place.details]
        if run == accused and len({one.place.where for one in run}) > 1:
            return [sentences.so_far(lower)]
        first = replace(first, text=sentences.at_the_moment(first.text))
    return [first, *rest]


# How ranks ended, where no rank is known to be missing


def told_missing(hearing: Hearing) -> list[Finding]:
    """Reports say who had not come, or is gone, and others waited or were cut off: these ranks,
    unless they waited themselves.
    """
    waited = hearing.having(conditions.WAITED)
    cut = hearing.having(conditions.CUT)
    if not waited and not cut:
        return all_absent(hearing.having(conditions.MISSING), None)
    kinds = (*_NOT_COME, conditions.UNSEEN, conditions.ENDED) if waited else _NOT_COME
    suspects = [one for one in hearing.having(*kinds) if one.waits is None]
    # Its stack shows it elsewhere: by others it had not come, or all others waited.
    there = hearing.having(conditions.RUNS) if waited else []
    elsewhere = [one for one in there if _is_seen_elsewhere(one)]
    if not _are_the_rest(elsewhere, hearing):
        elsewhere = [one for one in elsewhere if _is_told_missing(one)]
    suspects += elsewhere
    # By others it had left before they were cut off; by itself, or of several that had left, it may
    # have been cut off as well.
    left = hearing.having(conditions.ENDED)
    if not waited and len(left) == 1 and not left[0].is_first_hand:
        suspects += [one for one in left if one.waits is None]
    # Whose training waits for that thread, if its group is the one that waited
    entered = [fact.entered for one in waited for fact in one.entered]
    if waited and all(entry.group in DEFAULT_GROUPS for entry in entered):
        suspects += [o for o in hearing.having(conditions.THREAD) if o.waits is None]
    more = _were_cut(cut)
    if waited:
        more = f"{verdicts.others(waited)} waited until a time limit."
    lines = [line for one in elsewhere for line in sentences.reported_elsewhere(one)]
    found = all_absent(_first_to_leave(suspects, hearing), None, lines)
    return [replace(one, text=f"{one.text} {more}") for one in found]


def _is_seen_elsewhere(one: Account) -> bool:
    """Whether its own stack shows it in no collective."""
    is_seen = one.place_fact is not None and one.place_fact.own
    return is_seen and one.waits is None and not one.moved


def _is_told_missing(one: Account) -> bool:
    return (
        one.reported is not None and one.reported.condition_kind == conditions.MISSING
    )


def _are_the_rest(few: Sequence[Account], hearing: Hearing) -> bool:
    """Whether these few are all ranks that nothing shows waiting; their numbers are told."""
    rest = {r for r in range(hearing.world_size) if hearing[r].waits is None}
    is_few = 2 * len(rest) < hearing.world_size
    are_all = rest == {one.rank for one in few}
    return are_all and is_few and not hearing.evidence.is_numbered


def mispaired(hearing: Hearing) -> list[Finding]:
    """A rank got another collective's message; which rank is in the wrong one, it does not tell."""
    found = hearing.having(conditions.MISPAIRED)
    return [sentences.mispaired(found, hearing)] if found else []


def behind_by_calls(hearing: Hearing) -> list[Finding]:
    """Ranks make encoder calls in step: who made fewer than one that waited is missing."""
    waited = hearing.having(conditions.WAITED)
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


def left_first(hearing: Hearing) -> list[Finding]:
    """Connections closed and no time-out: the rank that failed first, if only one comes into
    question, or whatever else ended the job.
    """
    cut = hearing.having(conditions.CUT)
    if not cut or hearing.having(conditions.WAITED):
        return []
    ended = [
        fact
        for fact in _terminated(hearing)
        if fact.rank == NOT_TOLD or fact.condition_text == conditions.FROM_OUTSIDE
    ]
    of_cut = [fact for one in cut for fact in one.conditions]
    if ended and not any(is_before(fact, ended[0]) for fact in of_cut):
        return _ended_by_others(hearing)
    found = first_failure(hearing)
    if len(found) != 1 or len(found[0].ranks) != 1 or hearing.unseen:
        return []
    [one] = found
    if hearing[one.ranks[0]].waits is not None:
        return []
    return [replace(one, text=f"{one.text} {_were_cut(cut)}", severity=CRITICAL)]


def _were_cut(cut: list[Account]) -> str:
    is_one = len({one.rank for one in cut} - {NOT_TOLD}) == 1
    how = "its connection" if is_one else "their connections"
    return f"{verdicts.others(cut)} had {how} closed."


def waited_in_vain(hearing: Hearing) -> list[Finding]:
    """Ranks waited until a limit, or were cut off, and no fact names the reason: accuse nobody."""
    waited = hearing.having(conditions.WAITED)
    cut = hearing.having(conditions.CUT)
    both = [*waited, *cut]
    if not both:
        return []
    if all(one.condition.text.startswith(conditions.AT_START) for one in both):
        first = sentences.start_up(both, hearing)
    else:
        first = sentences.in_vain(waited, cut, hearing)
    return [first, *first_failure(hearing, of_ranks_that_waited=True)]


def stuck(hearing: Hearing) -> list[Finding]:
    """A watchdog without a heartbeat, and no time-out: a call of CUDA or NCCL does not return."""
    if not (found := hearing.having(conditions.STUCK)):
        return []
    more = first_failure(hearing, of_ranks_that_waited=True)
    return [sentences.stuck(found), *more]


def first_failure(
    hearing: Hearing, of_ranks_that_waited: bool = False
) -> list[Finding]:
    """The first failure in the launchers' tables. of_ranks_that_waited: the exit code may be that
    of a waiting rank.
    """
    failed = hearing.told(conditions.FAILED, conditions.ABORTED)
    if firsts := [fact for fact in first_of(failed) if not fact.own]:
        return [sentences.failed_first(firsts, hearing, of_ranks_that_waited)]
    if of_ranks_that_waited:
        return []
    gone = [one for one in hearing.having(conditions.GONE) if not one.is_first_hand]
    return all_absent(gone, None) or _ended_by_others(hearing)


def _terminated(hearing: Hearing) -> list[Fact]:
    """What launchers and schedulers say about ranks, or a job, that somebody else ended."""
    return [
        fact
        for fact in hearing.told(conditions.TERMINATED)
        if not fact.own and not fact.condition_text.startswith(conditions.BY_MONITOR)
    ]


def _ended_by_others(hearing: Hearing) -> list[Finding]:
    facts = _terminated(hearing)
    return [sentences.ended_by_others(facts, hearing)] if facts else []


def by_words(hearing: Hearing) -> list[Finding]:
    """By general words of lines that no table knows: hearsay, told with its line.

    Nothing is told of ranks that say themselves that they waited, or where most are told so.
    """
    for kind, id_ in (
        (conditions.TOLD_ABSENT, ids.MISSING_RANK),
        (conditions.TOLD_APART, ids.MISSING_RANK),
        (conditions.TOLD_DEAD, ids.FIRST_FAILURE),
    ):
        facts = [
            fact
            for fact in hearing.told(kind)
            if fact.rank == NOT_TOLD or hearing[fact.rank].waits is None
        ]
        facts.sort(key=lambda fact: fact.at)  # the others may follow from the first
        ranks = {fact.rank for fact in facts} - {NOT_TOLD}
        if facts and not 2 * len(ranks) > max(hearing.world_size, 1) > 2:
            return [sentences.by_words(id_, facts, hearing)]
    return []


_OF_A_HANG: tuple[Callable[[Hearing], list[Finding]], ...] = (by_numbers, by_places)
# The first that finds anything speaks.
RULES = (
    *_OF_A_HANG,
    mispaired,
    told_missing,
    behind_by_calls,
    left_first,
    waited_in_vain,
    stuck,
    first_failure,
)
