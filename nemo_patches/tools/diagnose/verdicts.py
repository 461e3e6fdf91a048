"""The table of verdicts: for each id its text and what to do, whatever the source."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging.judge import Seat
from nemo_patches.judging.kinds import (
    CHECKPOINT,
    COMPILATION,
    DEBUGGER,
    EXPORT,
    PERHAPS,
    is_guess,
)
from nemo_patches.text import named
from nemo_patches.tools.diagnose import fates
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account
from nemo_patches.tools.diagnose.facts import NOT_TOLD, Fact, Fate
from nemo_patches.tools.diagnose.findings import CRITICAL, NOTE, WARNING, Finding

# Activities that only stacks show, beside those of judging/kinds.py.
LOADER, LOCK, ENDING = "its data loader", "a lock", "the end of its script"
CHILD, LAST_THREADS = "a child process", "threads at the end of its script"

_Key = TypeVar("_Key")
_Member = TypeVar("_Member")
_MOST_RANKS = 64  # of a finding
_MOST_EVIDENCE = 12
_MOST_DETAILED = 4  # ranks of a group
_MOST_PLACES = 3  # that a sentence tells
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
_NEXT_STEPS = {
    ids.STOPPED: "`kill -CONT {pid}` on {host}, once you know who stopped it.",
    ids.TRACED: "Detach the debugger from process {pid} on {host}.",
    ids.KILLED: (
        "Look who killed it on {host}: an out-of-memory kill (`dmesg`), the scheduler,"
        " or a user; the job cannot go on without it."
    ),
    ids.NODE_FAILED: (
        "Look at that node (`scontrol show node`, its console, `dmesg`), leave it out"
        " (`--exclude`), and start the job again from its last checkpoint; the code is"
        " not the reason."
    ),
    ids.OUT_OF_MEMORY: (
        "Give the job more host memory, or use less: data loader workers, caches,"
        " pinned memory. Which process was killed, the host's `dmesg` shows; ranks that"
        " time out after it waited for it."
    ),
    ids.ENDED: (
        "Look at the end of this rank's stderr for an error; if there is none, it had"
        " fewer batches: make their number equal on all ranks (drop_last,"
        " DistributedSampler)."
    ),
    ids.EXCEPTION: (
        "Fix what the traceback shows; the other ranks only waited for this one."
    ),
    ids.SILENT: (
        "Look at {host}: is process {pid} stopped (`ps` says T), gone, or the host"
        " unreachable? `py-spy dump` shows a thread that holds Python's lock."
    ),
    ids.MISSING_RANK: (
        "Look at what it does there; on {host}, with C frames: `py-spy dump --native"
        " --pid {pid}`. Then its data, a checkpoint, the end of its stderr."
    ),
    ids.OUT_OF_STEP: (
        "One rank made one collective more or fewer: look for uneven batches, and for"
        " code that only some ranks run. nemo_patches helps if the extra one is the"
        " encoder's length sync (uneven evaluation)."
    ),
    ids.SKIPPED: (
        "Look for what was skipped between these two: a backward, a swallowed"
        " exception, one batch fewer in an evaluation, a collective that only some"
        " ranks call."
    ),
    ids.FEWER_BATCHES: (
        "Make the number of batches equal on all ranks (drop_last, DistributedSampler,"
        " a limit); nemo_patches: NEMO_PATCHES_STOP_TOGETHER=training,"
        " NEMO_PATCHES_METRICS=deferred."
    ),
    ids.SIZES: (
        "Look for a tensor whose size depends on the rank: modules that run in another"
        " order or only on some ranks, unlike parameters, or unused ones."
    ),
    ids.CROSSED: (
        "Look for the ranks without any evidence here, and for code that runs"
        " collectives of several groups in an order that depends on the rank."
    ),
    ids.ALL_IN: (
        "No rank is missing: look at the network and the GPUs (NCCL_DEBUG=INFO); Flight"
        " Recorder dumps (TORCH_FR_BUFFER_SIZE=2000) show which call each rank is in."
    ),
    ids.NO_RANK_MOVES: (
        "They wait for something outside: a server, a file, a lock. Look at the place."
    ),
    ids.NOT_SEEN: (
        "Collect on every host of the job (`nemo-patches stacks --json >"
        " $(hostname).json`), and give the folder; a rank that was stopped or killed"
        " leaves nothing: look at its stderr."
    ),
    ids.WAITED_IN_VAIN: (
        "Look for the rank without such an error, and for the first error of any rank;"
        " `nemo-patches diagnose` on each host while it hangs names the rank, and so"
        " does a trace (NEMO_PATCHES_TRACE) of a NeMo job."
    ),
    ids.START_UP: (
        "Look at the ranks without any evidence here, and their stderr: a process that"
        " was not started, one that ended at once, another MASTER_ADDR or MASTER_PORT,"
        " or a firewall."
    ),
    ids.STUCK_WATCHDOG: (
        "Look at the stacks of all ranks (`py-spy dump --native`); with"
        " NEMO_PATCHES_TRACE the next run tells whether all ranks came out of the"
        " encoder."
    ),
    ids.FIRST_FAILURE: "Look at the end of that rank's stderr.",
    ids.UNEVEN_CALLS: (
        "Make the number of batches equal on all ranks (drop_last, DistributedSampler)."
    ),
    ids.STRAGGLER: (
        "Compare its host with the others: disk, network, processors, the GPU's clock;"
        " and its share of the data."
    ),
    ids.LATE: (
        "Look at what held it up then: a slow file system, a checkpoint, a log that only"
        " one rank writes. No number of the model was changed by it."
    ),
    ids.NOT_ENOUGH: (
        "Collect this from all ranks, while the job hangs: `nemo-patches stacks"
        " --json`, traces, stall reports, every rank's stderr."
    ),
}
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
_SEVERITIES = {
    ids.UNEVEN_CALLS: WARNING,
    ids.STRAGGLER: WARNING,
    ids.LATE: WARNING,
    ids.NOT_ENOUGH: NOTE,
    ids.NOT_SEEN: WARNING,
    ids.FIRST_FAILURE: WARNING,
}


@dataclass(frozen=True)
class Wait:
    """What the others wait in, in words."""

    ranks: tuple[int, ...]
    title: str
    still_s: float | None = None
    how: str = ""  # instead of "are in"


def finding(
    kind: str,
    text: str,
    ranks: Iterable[int] = (),
    evidence: Iterable[str] = (),
    of: Account | None = None,
    severity: str = "",
    next_step: str = "",
) -> Finding:
    """A finding with the table's severity and next step, unless given. of: the rank whose process
    the step names.
    """
    pid, host = (
        (of.member.pid or "PID", of.host or "its host")
        if of is not None
        else ("PID", "its host")
    )
    return Finding(
        id=kind,
        severity=severity or _SEVERITIES.get(kind, CRITICAL),
        ranks=tuple(rank for rank in ranks if rank != NOT_TOLD)[:_MOST_RANKS],
        text=capital(text),
        next_step=(next_step or _NEXT_STEPS[kind]).format(pid=pid, host=host),
        evidence=tuple(dict.fromkeys(evidence))[:_MOST_EVIDENCE],
    )


def parties(members: Iterable[tuple[_Key, _Member]]) -> dict[_Key, list[_Member]]:
    """Members grouped by key, the smallest group first."""
    found: dict[_Key, list[_Member]] = defaultdict(list)
    for key, member in members:
        found[key].append(member)
    return dict(sorted(found.items(), key=lambda item: len(item[1])))


def step_of(kind: str) -> str:
    return _NEXT_STEPS[kind]


def who(ranks: Iterable[int]) -> str:
    """Ranks in words, also where the rank of a fact is not known."""
    ranks = sorted(set(ranks))
    told = [rank for rank in ranks if rank != NOT_TOLD]
    if not told:
        return "a rank (which, is not told)"
    return named(told) + (" and one that is not told" if len(told) < len(ranks) else "")


def reading_of(seat: Seat, patched: bool) -> tuple[str, str]:
    """What NeMo uses such a collective for, by its kind and size, and the next step for that; both
    may be empty.

    patched: nemo_patches is on, so it is not the length sync.
    """
    kind, size = (
        re.sub("[^a-z]", "", seat.kind.lower().rpartition(":")[2]),
        seat.size.strip("[]"),
    )
    if seat.group not in ("", "0"):
        return "", ""
    if kind == "allreduce" and size == "1" and not patched:
        return (
            "as the encoder's length sync is",
            (
                "The encoder's length sync is such a reduce, of one number:"
                " nemo_patches bounds this wait and names the missing rank"
                " (`nemo-patches run -- COMMAND`). That rank is held up elsewhere; if"
                " it never comes, the gradients' all-reduce waits for it all the same."
                " (Other reduces of one number: a logged loss with sync_dist,"
                " skip_nan_grad.)"
            ),
        )
    if kind == "allreduce" and size == "1":
        return (
            "and with nemo_patches on it is not the encoder's length sync",
            (
                "Look for a logged value with sync_dist, skip_nan_grad, or an early"
                " stop: their reduces are of one number, too. nemo_patches cannot bound"
                " those."
            ),
        )
    if kind == "allreduce" and not size:
        return (
            "",
            (
                "The encoder's length sync is such an all-reduce, and so are DDP's"
                " gradients: a trace (NEMO_PATCHES_TRACE) and its stall reports name"
                " the rank that does not come."
            ),
        )
    if kind == "broadcast" and size.isdigit() and int(size) >= _LARGE_BROADCAST:
        return (
            "as DDP makes of a model's buffers before each training step",
            (
                "A rank has not come to that step: its data, or an evaluation that is"
                " longer on it. nemo_patches does not bound DDP's broadcast; a trace"
                " (NEMO_PATCHES_TRACE) and its stall reports name the rank."
            ),
        )
    return "", ""


_KINDS_OF_ABSENT = {  # by fate; of any other fate a rank is missing
    fates.STOPPED: ids.STOPPED,
    fates.TRACED: ids.TRACED,
    fates.RAISED: ids.EXCEPTION,
    fates.KILLED: ids.KILLED,
    fates.GONE: ids.KILLED,
    fates.ENDED: ids.ENDED,
    fates.SILENT: ids.SILENT,
}


def all_absent(
    accused: Sequence[Account], wait: Wait | None, evidence: Iterable[str] = ()
) -> list[Finding]:
    """A finding for each kind of absent rank."""
    by_kind: dict[str, list[Account]] = defaultdict(list)
    for account in accused:
        by_kind[_KINDS_OF_ABSENT.get(account.fate_kind, ids.MISSING_RANK)].append(
            account
        )
    return [
        _absent(kind, accounts, wait, evidence) for kind, accounts in by_kind.items()
    ]


def _absent(
    kind: str, accounts: Sequence[Account], wait: Wait | None, evidence: Iterable[str]
) -> Finding:
    """Ranks of one kind that are not where the others wait; or, where nobody waits, that hold the
    job up.
    """
    ranks = [account.rank for account in accounts]
    absent = who(ranks)
    told = doings(accounts)
    text = f"{absent}: {told}." if told else ""
    if wait is not None:
        it = ("It" if len(ranks) == 1 else "They") if told else absent
        have = "has" if len(ranks) == 1 else "have"
        is_ = "is" if len(ranks) == 1 else "are"
        entered = (
            f"{it} {have} not entered {wait.title}, which {who(wait.ranks)}"
            f" {_are_in(wait)}."
        )
        if is_guess(wait.title):
            there = it.lower() if told else absent
            entered = (
                f"{capital(who(wait.ranks))} {_waits_for(wait)}, and {there} {is_} not"
                " there."
            )
        text = f"{text} {entered}".strip()
    step = (
        _NEXT_STEPS_AT.get(accounts[0].place.activity, "")
        if kind == ids.MISSING_RANK
        else ""
    )
    text = text or f"{absent}."
    return finding(
        kind,
        text,
        ranks,
        [*evidence_of(accounts), *evidence],
        accounts[0],
        next_step=step,
    )


def doings(accounts: Sequence[Account]) -> str:
    """What these ranks do; where that differs, with their ranks."""
    told: dict[str, list[int]] = {}
    for account in accounts:
        if text := doing(account):
            told.setdefault(text, []).append(account.rank)
    text, ranks = next(iter(told.items()), ("", []))
    if len(told) < 2 and len(ranks) in (0, len(accounts)):
        return _plural(text) if len(accounts) > 1 else text
    return "; ".join(
        f"{named(ranks)}: {text}" for text, ranks in list(told.items())[:_MOST_PLACES]
    )


def in_no_collective(accounts: Sequence[Account]) -> str:
    """ "rank 1 is in no collective: it waits for its data loader: select (selectors.py:415)"."""
    is_ = "is" if len(accounts) == 1 else "are"
    told = doings(accounts)
    return f"{who(account.rank for account in accounts)} {is_} in no collective" + (
        f": {told}" if told else ""
    )


def doing(account: Account) -> str:
    """How a rank that others wait for ended, or where it is."""
    fate, place = account.fate, account.place
    if fate.kind == fates.UNSEEN and fate.text:
        return f"there is no sign of it: {fate.text}"
    if fate.kind in _ENDS:
        more = (
            f"{' ' if fate.kind == fates.MISSING else ', '}{fate.text}"
            if fate.text
            else ""
        )
        spot = place.worker or (
            f"it was in {inner(place.where)}" if place.where else ""
        )
        # Which came after it had held the others up.
        if spot and fate.kind in (fates.TERMINATED, fates.ABORTED):
            return f"{spot}; in the end {_ENDS[fate.kind]}{more}"
        at = f"; last seen in {inner(place.where)}" if place.where else ""
        return f"{_ENDS[fate.kind]}{more}{at}"
    spot = place.worker or inner(place.where)
    if place.activity in _DOES:
        text = _DOES[place.activity] + (
            f": {spot}" if spot and place.activity != ENDING else ""
        )
    else:
        text = place.worker or (f"it is in {spot}" if spot else "")
    told = "worker" if place.worker else text  # what the sentence has already
    details = [
        detail for detail in place.details if detail not in text and told not in detail
    ]
    return "; ".join([*([text] if text else []), *details[:3]])


_ENDS = {
    fates.STOPPED: "it is stopped (state T, SIGSTOP or Ctrl-Z)",
    fates.TRACED: "a debugger holds it",
    fates.RAISED: "it raised an exception",
    fates.KILLED: "it was killed",
    fates.GONE: "it was killed or crashed: no record tells of its end",
    fates.ENDED: (
        "it has ended: fewer batches, or an error that something caught (Hydra does)"
    ),
    fates.FAILED: "it failed",
    fates.SILENT: (
        "it does not answer: stopped, killed, its host unreachable, or Python's lock"
        " (GIL) held"
    ),
    fates.MISSING: "it had not come",
    fates.UNSEEN: "there is no sign of it: not started, not patched, or not yet there",
    fates.TERMINATED: "somebody ended it",
    fates.ABORTED: "it aborted, as ranks do that waited in vain",
    fates.STUCK: "its NCCL watchdog got stuck",
}
_STACK_UNREAD = "its stack could not be read"
# The fates that have a line of evidence.
_FATES = {
    **_ENDS,
    fates.WAITED: "a time-out: a consequence, it waited",
    fates.CUT: "a connection closed: a consequence, another rank had gone",
    fates.PASSED_ON: "a consequence: it passed on",
    fates.UNRESOLVED: "it cannot resolve the address at which the ranks meet",
    fates.HEARD: "it was told of another rank's time-out, and had none itself",
    fates.GONE: "no record tells of its end",
    fates.LOGGED: "a traceback, which may have been caught",
}


def raised(
    accounts: Sequence[Account], first: Fact, others: Sequence[Account]
) -> Finding:
    """An exception that ended ranks. first: the one that the text quotes."""
    assert isinstance(first.value, Fate)
    ranks = [account.rank for account in accounts]
    where = f" in {inner(first.value.where)}" if first.value.where else ""
    text = f"{who(ranks)} raised {first.value.text}{where} [{first.cite}]."
    evidence = [*first.value.details, *evidence_of(accounts), *evidence_of(others)]
    return finding(
        ids.EXCEPTION, text, ranks, evidence, next_step=_cure_of(first.value.text)
    )


def killed(
    accounts: Sequence[Account], facts: Sequence[Fact], others: Sequence[Account]
) -> Finding:
    """facts: for each account the one that shows the kill."""
    first = facts[0]
    assert isinstance(first.value, Fate)
    ranks = [account.rank for account in accounts]
    at = accounts[0].place.where
    how = f" ({first.value.text})" if first.value.text else ""
    was = "was" if len(ranks) == 1 else "were"
    place = f", in {inner(at)}" if at else ""
    kind = ids.OUT_OF_MEMORY if is_for_memory(first) else ids.KILLED
    # A data loader's worker, or a program that a rank has started, may have been the one.
    killed_one = (
        "a process of the job"
        if kind == ids.OUT_OF_MEMORY and ranks == [NOT_TOLD]
        else who(ranks)
    )
    text = f"{killed_one} {was} killed{how}{place} [{first.cite}]."
    evidence = [*(cited(fact, fact.fate_text) for fact in facts), *evidence_of(others)]
    return finding(
        kind, text, ranks, evidence, accounts[0], next_step=_cure_of(first.value.text)
    )


def node_failed(facts: Sequence[Fact], others: Sequence[Account]) -> Finding:
    """The job ended because a node did. The fact that names the node comes first."""
    ordered = sorted(facts, key=lambda fact: " node " not in fact.fate_text)
    first = ordered[0]
    text = f"A node of the job failed ({first.fate_text}) [{first.cite}]."
    evidence = [
        *(cited(fact, fact.fate_text) for fact in ordered),
        *evidence_of(others),
    ]
    return finding(ids.NODE_FAILED, text, evidence=evidence)


def is_for_memory(fact: Fact) -> bool:
    return fact.fate_text.startswith(fates.FOR_MEMORY)


def _cure_of(error: str) -> str:
    """The next step for an error whose message decides it."""
    return next((step for words, step in _CURES if words in error), "")


_CURES = (
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


def out_of_step(
    by_title: dict[str, list[int]],
    evidence: Iterable[str],
    why: str = "",
    kind: str = ids.OUT_OF_STEP,
) -> Finding:
    """why, kind: the explanation, if any, and its id."""
    sizes = [len(ranks) for ranks in by_title.values()]
    odd = next(iter(by_title.values())) if sizes[0] < sizes[-1] else []
    is_ = "is the odd one" if len(odd) == 1 else "are the odd ones"
    remark = f" {why}" if why else f" {capital(named(odd))} {is_} out." if odd else ""
    told = "; ".join(f"{named(ranks)} in {title}" for title, ranks in by_title.items())
    text = f"The ranks are in different collectives, so none can end: {told}.{remark}"
    return finding(kind, text, evidence=evidence)


def most_told(facts: Iterable[Fact]) -> Seat:
    """Of one collective's seats, the one with the most details."""
    known = [fact.seat for fact in facts if fact.seat]
    return max(known, key=lambda seat: (bool(seat.kind), bool(seat.size)))


def title_of(seat: Seat) -> str:
    """A collective in words, and where it was called; without a number where that is below 0."""
    if seat.kind == LENGTH_SYNC and seat.caller:
        return f"the length sync of {seat.caller}"
    kind = seat.kind or "a collective"
    size = (
        f" {seat.size}"
        if seat.size.startswith("[")
        else f" of {seat.size}"
        if seat.size
        else ""
    )
    number = f", number {seat.number}" if seat.number >= 0 else ""
    number += f" of group {seat.group}" if seat.group and number else ""
    return f"{kind}{size}{number}{f', from {seat.caller}' if seat.caller else ''}"


def same_kind(one: str, other: str) -> bool:
    """Whether two sources may mean the same collective: "nccl:all_reduce", "ALLREDUCE", "all_reduce
    of ...".
    """
    first, second = (
        re.sub(r"[^a-z]", "", text.lower().rpartition(":")[2]) for text in (one, other)
    )
    return bool(first and second) and (
        first.startswith(second) or second.startswith(first) or second in first
    )


def inner(where: str) -> str:
    """The innermost two places, of which the first may be a library's."""
    return " < ".join(where.split(" < ")[:2])


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def cited(fact: Fact, text: str) -> str:
    return f"{who([fact.rank])} [{fact.cite}]: {text}"


def evidence_of(accounts: Iterable[Account]) -> list[str]:
    """Lines of evidence, one for the ranks at each place: ranks in no collective first, then the
    fewest.
    """
    groups: dict[tuple[str, str, str, bool], list[Account]] = {}
    for account in accounts:
        fate, place = account.fate, account.place
        at = place.seat or place.where
        if fate.kind == fates.UNREADABLE:
            at = f"{fate.details} {account.still_s or 0:.0f}"
        groups.setdefault((fate.kind, fate.text, at, account.moved), []).append(account)
    ordered = sorted(
        groups.values(), key=lambda group: (bool(group[0].place.collective), len(group))
    )
    return [line for group in ordered for line in _of_group(group)]


def _of_group(group: list[Account]) -> Iterable[str]:
    first, ranks = group[0], who(account.rank for account in group)
    others = ", ..." if len(group) > 1 else ""
    if first.fate_fact is not None and first.fate_kind == fates.UNREADABLE:
        told = "; ".join((_STACK_UNREAD, *first.fate.details))
        yield f"{ranks} [{first.fate_fact.cite}{others}]: {told}{_when(first)}"
    elif first.fate_fact is not None and first.fate_kind in _FATES:
        text = f" ({first.fate.text})" if first.fate.text else ""
        yield (
            f"{ranks} [{first.fate_fact.cite}{others}]: {_FATES[first.fate_kind]}{text}"
        )
    if first.place_fact is not None:
        yield (
            f"{ranks} [{first.place_fact.cite}{others}]:"
            f" {_where(first, len(group))}{_when(first)}"
        )
        yield from _details(group)


def _details(group: Sequence[Account]) -> Iterable[str]:
    """What explains the ranks' place; with the ranks, where it is not told of all of them."""
    of_detail = [
        (detail, account.rank)
        for account in group[:_MOST_DETAILED]
        for detail in account.place.details
    ]
    for detail, ranks in parties(of_detail).items():
        yield (
            f"  {detail}"
            if len(set(ranks)) == len(group)
            else f"  {who(ranks)}: {detail}"
        )


def _where(account: Account, ranks: int) -> str:
    place = account.place
    state = (
        f"{_ENDS[account.fate_kind]}; "
        if account.fate_kind in (fates.STOPPED, fates.TRACED)
        else ""
    )
    if place.collective:
        waits = "waits" if ranks == 1 else "wait"
        if is_guess(place.collective):
            return f"{state}{waits}, perhaps for {place.seat.removeprefix(PERHAPS)}"
        return f"{state}{waits} in {place.seat}"
    return (
        f"{state}in {place.where}"
        if place.where
        else state.rstrip("; ") or "where is not known"
    )


def _when(account: Account) -> str:
    if account.moved:
        return f" (moved: {account.motion.by})"
    steps = ", ".join(
        f"{name} = {value}" for name, value in list(account.place.counters.items())[:4]
    )
    still = f"has not moved for {account.still_s:.0f} s" if account.still_s else ""
    told = "; ".join(filter(None, (still, steps)))
    return f" ({told})" if told else ""


def _are_in(wait: Wait) -> str:
    if wait.how:
        return wait.how
    if wait.still_s:
        return (
            f"{'has' if len(wait.ranks) == 1 else 'have'} waited in for"
            f" {wait.still_s:.0f} s"
        )
    return "is in" if len(wait.ranks) == 1 else "are in"


def _waits_for(wait: Wait) -> str:
    """For a wait that is a guess."""
    for_ = f", perhaps for {wait.title.removeprefix(PERHAPS)}"
    if wait.still_s:
        return (
            f"{'has' if len(wait.ranks) == 1 else 'have'} waited for {wait.still_s:.0f}"
            f" s{for_}"
        )
    return f"{'waits' if len(wait.ranks) == 1 else 'wait'}{for_}"


def _plural(text: str) -> str:
    """ "it waits for its data loader": "they wait for their data loader"."""
    it, _, rest = text.partition(" ")
    verb, _, rest = rest.partition(" ")
    if it != "it":
        return text
    irregular = {"is": "are", "has": "have", "was": "were", "does": "do"}
    return f"they {irregular.get(verb, verb.removesuffix('s'))} {rest}".replace(
        " for its ", " for their "
    ).rstrip()
