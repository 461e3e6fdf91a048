"""The words that verdicts are made of: who is absent from what, titles, lines of evidence."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging.kinds import (
    CHECKPOINT,
    COMPILATION,
    DEBUGGER,
    EXPORT,
    GONE,
    PERHAPS,
    SILENT,
    is_guess,
)
from nemo_patches.judging.waits import remedy
from nemo_patches.text import named
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account, still_s
from nemo_patches.tools.diagnose.entries import Entry
from nemo_patches.tools.diagnose.findings import CRITICAL, Finding
from nemo_patches.tools.diagnose.rank_facts import NOT_TOLD, Fact, Place

# Activities that only stacks show, beside those of judging/kinds.py.
LOADER, LOCK, ENDING = "its data loader", "a lock", "the end of its script"
CHILD, LAST_THREADS = "a child process", "threads at the end of its script"

_Key = TypeVar("_Key")
_Member = TypeVar("_Member")
_MOST_RANKS = 64  # of a finding
_MOST_EVIDENCE = 12
_MOST_DETAILED = 4  # ranks of a group
_MOST_PLACES, _MOST_PARTIES = 3, 8  # that a sentence tells
_LIGHTNINGS_BATCH = "batch_idx of advance (training_epoch_loop.py)"  # in Place.counters
_LAST_BATCH = re.compile(r"last batch \d+ of epoch")  # in Place.details
_LARGE_BROADCAST = 1 << 16  # elements; DDP's buffers are more, a metric is less

_DOES = {
    LOADER: "it waits for its data loader",
    LOCK: "it waits for a lock or a thread of its own",
    CHILD: "it waits for a process that it has started",
    LAST_THREADS: "its script has come to its end, and waits for its other threads",
    CHECKPOINT: "it writes a checkpoint",
    DEBUGGER: "it is in a debugger",
    COMPILATION: "it compiles",
    EXPORT: "it exports a model",
    ENDING: "its script has come to its end",
}
# Texts of conditions that say no more than their words do.
_SAID = (SILENT, GONE, "it left: it ended, or destroyed its process group")
# For a missing rank, by its activity.
_NEXT_STEPS_AT = {
    LOADER: (
        "Look at what its data loader waits for there: a file, a mount, a server; then"
        " at that batch. On {host}, with C frames: `py-spy dump --native --pid PID` of"
        " its worker."
    ),
    LOCK: (
        "Look at its threads' places: which of them holds what the others want. On"
        " {host}, with C frames: `py-spy dump --native --pid {pid}`."
    ),
    CHILD: (
        "Look at that process on {host}, and at the file or server that it waits for:"
        " `ls -l /proc/PID/fd`; for one that was killed, at `dmesg` (memory)."
    ),
    LAST_THREADS: (
        "Find out why its script ended before the others': an error at the end of its"
        " stderr, fewer batches. Then at what that thread waits for."
    ),
    CHECKPOINT: (
        "Let it finish if the file grows (`ls -l`); otherwise look at that file system"
        " on {host}."
    ),
    DEBUGGER: "Leave the debugger of process {pid} on {host} (`c`), or end the job.",
}


@dataclass(frozen=True)
class Wait:
    """What the others wait in, in words."""

    ranks: tuple[int, ...]
    title: str
    still_s: float | None = None
    how: str = ""  # instead of "are in"
    may_be_inside: bool = False  # the absent rank, in the call for it

    @classmethod
    def of(cls, waiting: Sequence[Account]) -> Wait:
        ranks = tuple(one.rank for one in waiting)
        return cls(ranks, titles(waiting), still_s(waiting))


def finding(
    kind: str,
    text: str,
    ranks: Iterable[int] = (),
    evidence: Iterable[str] = (),
    of: Account | None = None,
    next_step: str = "",
) -> Finding:
    """A finding with the table's severity and next step, unless given. of: the rank whose process
    the step names.
    """
    of = of or Account(NOT_TOLD)
    step = next_step or ids.NEXT_STEPS.get(kind, "")
    host = (of.member_fact and of.member_fact.host) or "its host"
    if of.member.in_container and "{pid}" in step:
        host += ", in its container"
    return Finding(
        id=kind,
        severity=ids.SEVERITIES.get(kind, CRITICAL),
        ranks=tuple(rank for rank in ranks if rank != NOT_TOLD)[:_MOST_RANKS],
        text=capital(text),
        next_step=step.format(pid=of.member.pid or "PID", host=host),
        evidence=shown_lines(evidence),
    )


def parties(members: Iterable[tuple[_Key, _Member]]) -> dict[_Key, list[_Member]]:
    """Members grouped by key, the smallest group first."""
    found: dict[_Key, list[_Member]] = defaultdict(list)
    for key, member in members:
        found[key].append(member)
    return dict(sorted(found.items(), key=lambda item: len(item[1])))


def shown_lines(evidence: Iterable[str]) -> tuple[str, ...]:
    """The lines of evidence that are shown: each once, the first ones."""
    return tuple(dict.fromkeys(evidence))[:_MOST_EVIDENCE]


def by_party(members: Iterable[tuple[str, int]], words: str = "{who} in {what}") -> str:
    """ "rank 0 in barrier; ranks 1-2 in all_reduce"; empty if there is one party only."""
    found = parties(members).items()
    told = [words.format(who=who(ranks), what=what) for what, ranks in found]
    return "; ".join(told[:_MOST_PARTIES]) if len(told) > 1 else ""


def who(ranks: Iterable[int]) -> str:
    """Ranks in words, also where the rank of a fact is not known."""
    ranks = set(ranks)
    told = sorted(ranks - {NOT_TOLD})
    if not told:
        return "a rank (which, is not told)"
    return named(told) + (" and one that is not told" if NOT_TOLD in ranks else "")


def names(accounts: Iterable[Account]) -> str:
    return who(one.rank for one in accounts)


def others(accounts: Iterable[Account]) -> str:
    """Whom a sentence begins with; those of which the rank is not told only where no other is."""
    told = {one.rank for one in accounts} - {NOT_TOLD}
    return capital(named(told)) if told else "Others"


def reading_of(entry: Entry, patched: bool) -> tuple[str, str]:
    """What NeMo uses such a collective for, by its kind and size, and the next step for that; both
    may be empty.

    patched: nemo_patches is on, so it is not the length sync.
    """
    kind = re.sub("[^a-z]", "", entry.kind.lower().rpartition(":")[2])
    size = entry.size.strip("[]")
    if entry.group not in ("", "0"):
        return "", ""
    if kind == "allreduce" and size == "1":
        return _OF_ANOTHER if patched else _OF_THE_SYNC
    if kind == "allreduce" and not size:
        return "", _PERHAPS_OF_THE_SYNC
    if kind == "broadcast" and size.isdigit() and int(size) >= _LARGE_BROADCAST:
        return _OF_BUFFERS
    return "", ""


_OF_THE_SYNC = (
    "as the encoder's length sync is",
    "The encoder's length sync is such a reduce, of one number: nemo_patches bounds this"
    " wait and names the missing rank (`nemo-patches run -- COMMAND`). That rank is held"
    " up elsewhere; if it never comes, the gradients' all-reduce waits for it all the"
    " same. (Other reduces of one number: a logged loss with sync_dist, skip_nan_grad.)",
)
_PERHAPS_OF_THE_SYNC = (
    "The encoder's length sync is such an all-reduce, and so are DDP's gradients: a"
    " trace (NEMO_PATCHES_TRACE) and its stall reports name the rank that does not come."
)
_OF_ANOTHER = (
    "and with nemo_patches on it is not the encoder's length sync",
    "Look for a logged value with sync_dist, skip_nan_grad, or an early stop: their"
    " reduces are of one number, too. nemo_patches cannot bound those.",
)
_OF_BUFFERS = (
    "as DDP makes of a model's buffers before each training step",
    "A rank has not come to that step: its data, or an evaluation that is longer on it."
    " nemo_patches does not bound DDP's broadcast; a trace (NEMO_PATCHES_TRACE) and its"
    " stall reports name the rank.",
)
_KINDS_OF_ABSENT = {  # by condition; of any other condition a rank is missing
    conditions.STOPPED: ids.STOPPED,
    conditions.TRACED: ids.TRACED,
    conditions.RAISED: ids.EXCEPTION,
    conditions.KILLED: ids.KILLED,
    conditions.GONE: ids.KILLED,
    conditions.ENDED: ids.ENDED,
    conditions.SILENT: ids.SILENT,
}


def all_absent(
    accused: Sequence[Account], wait: Wait | None, evidence: Iterable[str] = ()
) -> list[Finding]:
    """A finding for each kind of absent rank."""
    by_kind: dict[str, list[Account]] = defaultdict(list)
    for one in accused:
        by_kind[_KINDS_OF_ABSENT.get(one.condition.kind, ids.MISSING_RANK)].append(one)
    return [_absent(kind, some, wait, evidence) for kind, some in by_kind.items()]


def _absent(
    kind: str, accounts: Sequence[Account], wait: Wait | None, evidence: Iterable[str]
) -> Finding:
    """Ranks of one kind that are not where the others wait; or, where nobody waits, that hold the
    job up.
    """
    ranks = names(accounts)
    told = doings(accounts)
    text = f"{ranks}: {told}." if told else ""
    if wait is not None:
        absent = ("It" if len(accounts) == 1 else "They") if told else ranks
        text += f" {_not_entered(wait, absent, has(accounts))}"
    are_first_hand = all(one.is_first_hand for one in accounts)
    if kind == ids.ENDED and len(accounts) > 1 and not are_first_hand:
        text += " Those that left after the first may have been cut off by it."
    step = _NEXT_STEPS_AT.get(accounts[0].place.activity, "")
    return finding(
        kind,
        text.strip() or f"{ranks}.",
        [one.rank for one in accounts],
        evidence,
        accounts[0],
        next_step=step if kind == ids.MISSING_RANK else "",
    )


def _not_entered(wait: Wait, absent: str, has_: str) -> str:
    others = who(wait.ranks)
    is_in = f"{is_(wait.ranks)} in"
    if wait.title.startswith(LENGTH_SYNC):  # each rank gives that up by itself
        is_in = "waited in"
    for_s = f" for {wait.still_s:.0f} s" if wait.still_s else ""
    if is_guess(wait.title):
        return (
            f"{capital(others)} {has(wait.ranks)} waited{for_s}, perhaps for"
            f" {wait.title.removeprefix(PERHAPS)}, and {absent.lower()} {has_} not come."
        )
    how = wait.how or (f"{has(wait.ranks)} waited in{for_s}" if for_s else is_in)
    if wait.may_be_inside:
        return (
            f"{absent} {has_} not got past {wait.title}, which {others} {how}: not"
            " entered, or inside the call for it."
        )
    return f"{absent} {has_} not entered {wait.title}, which {others} {how}."


def doings(accounts: Sequence[Account]) -> str:
    """What these ranks do; where that differs, with their ranks."""
    told = parties((doing(one), one.rank) for one in accounts)
    if len(told) == 1:
        text = next(iter(told))
        return text.replace("it ", "each ", 1) if len(accounts) > 1 else text
    known = [f"{named(ranks)}: {text}" for text, ranks in told.items() if text]
    return "; ".join(known[:_MOST_PLACES])


def in_no_collective(accounts: Sequence[Account]) -> str:
    """ "rank 1 is in no collective: it waits for its data loader: select (selectors.py:415)"."""
    return f"{names(accounts)} {is_(accounts)} in no collective: {doings(accounts)}"


def doing(account: Account) -> str:
    """How a rank that others wait for ended, or where it is."""
    condition, place = account.condition, account.place
    if condition.kind == conditions.UNSEEN and condition.text:
        is_heard = condition.text.startswith(conditions.NO_TIME_OUT)
        return f"{'' if is_heard else 'there is no sign of it: '}{condition.text}"
    if condition.kind in conditions.WORDS:
        text = conditions.in_words(condition.kind, condition.text)
        if condition.text and condition.text not in _SAID:
            text += f"{' ' if condition.kind == conditions.MISSING else ', '}{condition.text}"
        if condition.kind == conditions.THREAD:
            text += at(condition.where)
        # Which came after it had held the others up.
        if condition.kind in (conditions.TERMINATED, conditions.ABORTED) and (
            place.worker or place.where
        ):
            spot = place.worker or f"it was{at(place.where)}"
            return f"{spot}; in the end {text}"
        return f"{text}; last seen{at(place.where)}" if place.where else text
    spot = place.worker or inner(place.where)
    text = place.worker or (f"it is in {spot}" if spot else "")
    if place.activity in _DOES:
        text = _DOES[place.activity]
        text += f": {spot}" if spot and place.activity != ENDING else ""
    told = "worker" if place.worker else text  # what the sentence has already
    details = [one for one in place.details if one not in text and told not in one]
    return "; ".join(filter(None, (text, *details[:3])))


def out_of_step(
    by_title: dict[str, list[int]],
    places: Mapping[int, Place],
    evidence: Iterable[str] = (),
    why: str = "",
    kind: str = ids.OUT_OF_STEP,
    out: Collection[int] = (),
    cure: str = "",
    alone: Mapping[int, str] | None = None,
) -> Finding:
    """places: by rank. why, kind: the explanation, if any, and its id. out: the ranks that are out
    of a loop in which the others are. cure: what the running job has said of uneven batches.
    alone: by rank, what no other rank has printed.
    """
    few, *_, most = by_title.values()
    told = "; ".join(f"{named(ranks)} in {title}" for title, ranks in by_title.items())
    if why:
        told = f"{why} {capital(told)}"
    elif len(few) < len(most):
        is_odd = "is the odd one" if len(few) == 1 else "are the odd ones"
        told = f"{named(few)} {is_odd} out: {told}"
    so = "so none can end"
    if any(title.startswith(LENGTH_SYNC) for title in by_title):
        # Each rank gives that up by itself, and others tell of it when it has gone on.
        so = "of which the length sync ends by its timeout: its ranks may be elsewhere now"
    step = ids.NEXT_STEPS[kind]
    if kind == ids.OUT_OF_STEP or out:
        told_of = [
            _told(rank, places.get(rank, Place()), title, is_out=rank in out)
            for title, ranks in by_title.items()
            for rank in ranks
        ]
        step += f" {capital(cure or remedy(told_of))}."
    text = f"{told}: different collectives, {so}."
    if len(few) == 1 < len(most) and (printed := (alone or {}).get(few[0])):
        text += f" {capital(named(few))} alone printed {printed}."
    return finding(kind, text, evidence=evidence, next_step=step)


def _told(
    rank: int, place: Place, title: str, *, is_out: bool
) -> tuple[list[int], list[str], str]:
    """What remedy() reads. title: where no place is known."""
    caller, _, hook = place.caller.partition(", in ")  # so does a line of ours end
    hooks = [place.hook] if place.hook else place.way[::-1]
    out = ["train_end"] * (is_out and not place.hook)
    names = [*hooks, *out, hook, place.collective or title, caller]
    batch = place.counters.get(_LIGHTNINGS_BATCH)
    told = next(filter(_LAST_BATCH.match, place.details), "")
    told = told.removeprefix("last batch ") if batch is None else f"{batch} of epoch"
    return [rank], names, told


def titles(waiting: Sequence[Account]) -> str:
    """Those that are no guess come first."""
    told = sorted({one.place.wait for one in waiting}, key=lambda t: (is_guess(t), t))
    others = len(told) - 1
    more = f" (and {others} other place{'s' if others > 1 else ''})" if others else ""
    return told[0] + more


def most_told(facts: Iterable[Fact]) -> Entry:
    """Of one collective's entries, the one with the most details."""
    known = (fact.entered for fact in facts)
    return max(known, key=lambda entry: (bool(entry.kind), bool(entry.size)))


def title_of(entry: Entry) -> str:
    """A collective in words, and where it was called; without a number where that is below 0."""
    if entry.kind == LENGTH_SYNC and entry.caller:
        return f"the length sync of {entry.caller}"
    text = entry.kind or "a collective"
    if entry.size:
        text += f" {entry.size}" if entry.size.startswith("[") else f" of {entry.size}"
    if entry.number >= 0:
        text += f", number {entry.number}"
        text += f" of group {entry.group}" if entry.group else ""
    return f"{text}, from {entry.caller}" if entry.caller else text


def inner(where: str) -> str:
    """The innermost two places, of which the first may be a library's."""
    return " < ".join(where.split(" < ")[:2])


def at(where: str) -> str:
    return f" in {inner(where)}" if where else ""


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def has(ranks: Sized) -> str:
    return "has" if len(ranks) == 1 else "have"


def is_(ranks: Sized) -> str:
    return "is" if len(ranks) == 1 else "are"


def was(ranks: Sized) -> str:
    return "was" if len(ranks) == 1 else "were"


def cited(fact: Fact, text: str) -> str:
    return f"{who([fact.rank])} [{fact.cite}]: {text}"


def evidence_of(accounts: Iterable[Account]) -> list[str]:
    """Lines of evidence, one for the ranks at each place: ranks in no collective first, then the
    fewest.
    """
    groups = parties(
        (
            (
                one.condition.kind,
                one.condition.text,
                one.place.wait or one.place.where,
                one.moved,
            ),
            one,
        )
        for one in accounts
    )
    ordered = sorted(
        groups.values(),
        key=lambda some: (
            some[0].condition.kind not in conditions.CAUSES,
            bool(some[0].place.collective),
        ),
    )
    return [line for group in ordered for line in _of_group(group)]


def _of_group(group: list[Account]) -> Iterable[str]:
    first = group[0]
    ranks = names(group)
    others = ", ..." if len(group) > 1 else ""
    # All that is told of ranks that are not told.
    told = first.conditions if first.rank == NOT_TOLD else [first.condition_fact]
    for fact in told:
        if fact is None or fact.condition_kind not in conditions.EVIDENCE:
            continue
        told_of = fact.condition_text if fact.condition_text not in _SAID else ""
        told_of += at(fact.condition.where)
        text = f" ({told_of})" if told_of else ""
        if fact.condition_kind == conditions.UNREADABLE:
            text = "".join(f"; {detail}" for detail in fact.condition.details)
            text += _when(first)
        how = conditions.in_words(
            fact.condition_kind, fact.condition_text, conditions.EVIDENCE
        )
        yield f"{ranks} [{fact.cite}{others}]: {how}{text}"
    if first.place_fact is not None:
        told_of = where(first.place, "waits" if len(group) == 1 else "wait")
        yield f"{ranks} [{first.place_fact.cite}{others}]: {told_of}{_when(first)}"
        details = (
            (detail, account.rank)
            for account in group[:_MOST_DETAILED]
            for detail in account.place.details
        )
        yield from (f"  {text}" for text in of_ranks(details, len(group)))


def of_ranks(told: Iterable[tuple[str, int]], count: int) -> list[str]:
    """Each text; with the ranks, where it is not told of all of so many."""
    return [
        text if len(ranks) == count else f"{who(ranks)}: {text}"
        for text, ranks in parties(told).items()
    ]


def where(place: Place, waits: str) -> str:
    if is_guess(place.collective):
        return f"{waits}, perhaps for {place.wait.removeprefix(PERHAPS)}"
    if place.collective:
        _, *own = place.where.split(" < ")  # of which the caller may be a library's
        is_caller = not own or own[0].rpartition(" (")[2] in place.caller
        way = "" if is_caller or not place.caller else f" < {own[0]}"
        return f"{waits} in {place.wait}{way}"
    return f"in {place.where}" if place.where else "where is not known"


def _when(account: Account) -> str:
    if account.moved:
        return f" (moved: {account.motion.by})"
    told = [f"{name} = {value}" for name, value in account.place.counters.items()][:4]
    if account.still_s:
        told.insert(0, f"has not moved for {account.still_s:.0f} s")
    return f" ({', '.join(told)})" if told else ""
