"""Verdicts from what ended ranks, and is no consequence: exceptions, kills, a node's failure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Hearing, first_of, is_before
from nemo_patches.tools.diagnose.facts import NOT_TOLD, Fact
from nemo_patches.tools.diagnose.findings import WARNING, Finding
from nemo_patches.tools.diagnose.verdicts import at, finding, inner, who

_MOST_CAUSES = 6
# Words of an error that decide what to do.
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


def by_causes(hearing: Hearing) -> list[Finding]:
    """The first exceptions and kills. Those that came after another rank had waited in vain are no
    causes.
    """
    # Time-outs only: a closed connection may be logged before the error of the rank that closed it.
    time_outs = hearing.told(conditions.WAITED)
    facts = [
        one.condition_fact
        for one in hearing.having(*conditions.CAUSES)
        if one.condition_fact
        and not any(is_before(t, one.condition_fact) for t in time_outs)
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
    # Of an exception all that raised it.
    for fact in facts:
        alike = by_error.get(_error(fact), [fact])
        if fact.condition_kind == conditions.RAISED and fact not in alike:
            alike.append(fact)
    return [_cause(some, hearing) for some in list(by_error.values())[:_MOST_CAUSES]]


def _error(fact: Fact) -> tuple[str | bool, ...]:
    """By what errors are told apart: by their type and innermost frame, since messages differ from
    rank to rank.
    """
    if fact.condition_kind == conditions.RAISED:
        kind = fact.condition_text.partition(":")[0]
        return conditions.RAISED, kind, fact.condition.where.partition(" < ")[0]
    return fact.condition_kind, fact.condition_text.startswith(conditions.FOR_MEMORY)


def _cause(facts: list[Fact], hearing: Hearing) -> Finding:
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
        told = f"A node of the job failed ({text})"
        ranks = set()
    else:
        kind = ids.KILLED
        victim = who(ranks)
        if text.startswith(conditions.FOR_MEMORY):
            kind = ids.OUT_OF_MEMORY
            # A data loader's worker, or a program that a rank has started, may have been the one.
            victim = "a process of the job" if ranks == {NOT_TOLD} else victim
        where = own[0].place.where
        place = f", in {inner(where)}" if where else ""
        was = "was" if len(ranks) == 1 else "were"
        told = f"{victim} {was} killed{f' ({text})' if text else ''}{place}"
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
