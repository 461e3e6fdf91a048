"""Which ranks are missing, by the numbers of the collectives that each has entered."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.text import named
from nemo_patches.tools.diagnose import entries as judging
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.accounts import Account, Hearing
from nemo_patches.tools.diagnose.entries import Judgement
from nemo_patches.tools.diagnose.facts import OF_MODEL, Fact
from nemo_patches.tools.diagnose.findings import Finding
from nemo_patches.tools.diagnose.verdicts import (
    Wait,
    all_absent,
    cited,
    finding,
    has,
    most_told,
    out_of_step,
    parties,
    reading_of,
    title_of,
)

_MOST_OF_BUFFERS = 1 << 26  # elements
_OF_BUFFERS = (
    "With sync_max_audio_length=false, DDP's buffer broadcast meets positional encodings"
    " of different sizes: nemo_patches keeps their shapes equal. Else look for a buffer"
    " whose size depends on the rank."
)


def by_numbers(hearing: Hearing) -> list[Finding]:
    groups = hearing.evidence.groups
    facts = {
        (fact.entered.group, fact.entered.number, fact.rank): fact
        for one in hearing.accounts.values()
        for fact in one.entered
        if fact.rank in groups.get(fact.entered.group, ())
    }
    known = (fact.entered for fact in facts.values())
    found: list[Finding] = []
    for one in judging.judge(known, groups, hearing.evidence.begins):
        # A rank of which nothing is known may be missing.
        if (
            one.id == judging.ALL_IN
            and one.entry.group in hearing.evidence.partly_known
        ):
            continue
        there = [facts[one.entry.group, one.entry.number, rank] for rank in one.waiting]
        found += _of_judgement(one, hearing, there)
    if found and hearing.unseen:
        text = (
            f"Nothing is known of {named(hearing.unseen)}: it left no record, or its"
            " files are elsewhere."
        )
        found.append(finding(ids.NOT_SEEN, text))
    return found


def _of_judgement(
    one: Judgement, hearing: Hearing, there: Sequence[Fact]
) -> list[Finding]:
    title = title_of(one.entry)
    evidence = [cited(fact, title_of(fact.entered)) for fact in there]
    if one.id == judging.MISSING:
        return _missing(one, hearing, there, evidence)
    by_title = parties(
        (
            f"{fact.entered.kind or 'a collective'} {fact.entered.size}".strip(),
            fact.rank,
        )
        for fact in there
    )
    if one.id == judging.OUT_OF_STEP:
        return [out_of_step(by_title, evidence)]
    kind, step = one.id, ""
    if one.id == judging.SIZES:
        told = "; ".join(f"{key} on {named(of)}" for key, of in by_title.items())
        text = f"The ranks give the same collective different sizes: {told}."
        if one.entry.group == OF_MODEL:
            text = (
                f"The ranks have different models: {told.replace('a collective ', '')}."
            )
            step = (
                "Make the model the same on all ranks before DDP wraps it: parameters"
                " that only some ranks add or freeze, another config or checkpoint."
            )
        elif all(map(_may_be_buffers, there)):
            step = _OF_BUFFERS
    elif one.id == judging.DRIFTED:
        kind = ids.SKIPPED
        earlier = [_last(hearing[rank], one.entry.group) for rank in one.absent]
        titles = [title_of(fact.entered) for fact in earlier if fact]
        lines = [cited(fact, title_of(fact.entered)) for fact in earlier if fact]
        evidence = [*lines, *evidence]
        text = (
            f"{named(one.absent)} in {titles[0]}, {named(one.waiting)} in {title}: all"
            " wait, and their collectives have drifted apart."
        )
    elif one.id == judging.CROSSED:
        text = (
            f"Ranks wait in collectives of different groups: {named(one.waiting)} in"
            f" {title}, and {named(one.absent)}, which {has(one.absent)} not entered"
            " that, in one of another group. Which rank is missing, this does not tell."
        )
    elif one.id == judging.ALL_IN:
        text = (
            f"All {len(one.waiting)} ranks have entered {title}, and none has"
            " completed it"
        )
        if hearing.unseen:
            unseen = named(hearing.unseen)
            is_few = 2 * len(hearing.unseen) < hearing.world_size
            some = "of which some may be missing"
            if is_few and one.entry.kind:
                # A record is made where a failure is seen; who is missing sees none.
                text = f"{unseen} may be missing: no record of {_it(unseen)} is here. {text}"
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
        step = "Take the dumps of all ranks while the job hangs."
    return [finding(kind, text, evidence=evidence, next_step=step)]


def _it(ranks: str) -> str:
    return "it" if ranks.startswith("rank ") else "them"


def _may_be_buffers(fact: Fact) -> bool:
    numbers = re.findall(r"\d{1,18}", fact.entered.size)
    size = math.prod(map(int, numbers))
    return "broadcast" in fact.entered.kind.lower() and size <= _MOST_OF_BUFFERS


def _missing(
    one: Judgement, hearing: Hearing, there: Sequence[Fact], evidence: list[str]
) -> list[Finding]:
    how = "gave up" if one.entry.done and one.entry.kind == LENGTH_SYNC else ""
    accused = [
        hearing[rank]
        for rank in one.accused
        if not _has_come_since(hearing[rank], one, there[0], hearing)
    ]
    lines = [_last_entered(account) for account in accused]
    last = [fact.entered for fact in map(_last, accused) if fact]
    inside = any(each.counted and each.number == one.entry.number - 1 for each in last)
    wait = Wait(one.waiting, title_of(one.entry), how=how, may_be_inside=inside)
    step = reading_of(most_told(there), hearing.evidence.patched)[1]
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


def _has_come_since(
    account: Account, one: Judgement, there: Fact, hearing: Hearing
) -> bool:
    """Whether another fact shows the rank waiting or moving; if so, keep the contradiction."""
    waits = account.motion_fact if account.moved else account.waits
    if waits is None:
        return False
    what = f"it waited ({account.condition.text})"
    if account.moved:
        what = f"it goes on ({account.motion.by})"
    elif account.place.collective:
        what = f"it waits in {account.place.wait}"
    hearing.contradictions.append(
        f"contradiction: by {there.cite} rank {account.rank} had not entered"
        f" {title_of(one.entry)}; by {waits.cite} {what}"
    )
    return True
