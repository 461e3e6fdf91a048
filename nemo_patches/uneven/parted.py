"""What is said of ranks whose parameters differ after the same number of optimizer steps. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nemo_patches.text import named

UNKNOWN = 0  # in place of a number of batches
_MOST_CLASSES = 4
_CAUSES = "a skipped step, another learning rate or config, or gradients that were not synchronized"
_COUNTS = "ranks skip steps, or accumulate gradients over different numbers of batches"


class Account(NamedTuple):
    """What one rank says at a comparison. All are at least 0, and less than 2^62."""

    step: int  # of this optimizer, from 1
    batches: int  # that Lightning has begun to train on since the first, and one; UNKNOWN
    layout: int  # a hash of names and shapes; 0: they cannot be compared there
    checksum: int  # a hash of the parameters' checksums


class Parted(NamedTuple):
    """What a comparison has found. is_last: nothing is to be compared any more."""

    text: str
    is_last: bool = True


def judged(accounts: Sequence[Account], title: str, first: str, equal_at: int) -> Parted | None:
    """By the accounts of all ranks, which were made after the same number of steps; None: there is no difference.

    first: the first parameter that differs. equal_at: the last step after which there was none, 0 before the first.
    """
    unable = [rank for rank, account in enumerate(accounts) if not account.layout]
    if unable:
        return Parted(f"{title}: parameters are not compared: {named(unable)} cannot, and says why")
    layouts = _classes([account.layout for account in accounts])
    if len(layouts) > 1:
        text = f"{title}: parameters are not compared: the ranks' optimizers have different ones, by name or shape"
        return Parted(f"{text} ({'; '.join(_listed(layouts))}): they are sharded, as by ZeRO, or the configs differ")
    counts = _batches_text(accounts)
    versions = _classes([account.checksum for account in accounts])
    when = f"after optimizer step {accounts[0].step} ({title})"
    if len(versions) == 1:
        return Parted(f"{when} the parameters are equal, but {counts}: {_COUNTS}", is_last=False) if counts else None
    details = f", first in {first}" if first else ""
    details += f"; {counts}" if counts else ""
    after = f"they were equal after step {equal_at}: go on from a checkpoint of then" if equal_at else ""
    to_do = f"Training goes on; {after or 'compare the configs of the ranks'}."
    if len(versions[0]) * 2 > len(accounts):
        others = named(sorted(rank for ranks in versions[1:] for rank in ranks))
        rest = f"the other {len(versions[0])} ranks" + ("" if len(versions) == 2 else ", and among themselves")
        differ, of = f"of {others} differ from those of {rest}", f"A guess, as most ranks agree: {_CAUSES}, on {others}"
    elif len(accounts) == 2:
        differ, of = "of ranks 0 and 1 differ", f"Which of them is wrong cannot be told; possible: {_CAUSES}"
    else:
        differ = f"differ between {' and '.join(_listed(versions))}"
        of = f"Which are wrong cannot be told; possible: {_CAUSES}"
    return Parted(f"{when} the parameters {differ}{details}. {to_do} {of}")


def _batches_text(accounts: Sequence[Account]) -> str:
    """On how many batches each rank has trained; empty where all numbers are the same, or one is not known."""
    counts = [account.batches - 1 for account in accounts]
    if min(counts) < 0 or len(set(counts)) == 1:
        return ""
    told = "; ".join(f"{counts[ranks[0]]:,} on {named(ranks)}" for ranks in _classes(counts)[:_MOST_CLASSES])
    return f"the ranks have taken different numbers of training batches ({told})"


def _classes(values: Sequence[int]) -> list[list[int]]:
    """The ranks of each value, the largest class first."""
    by_value: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    return sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks))


def _listed(classes: Sequence[Sequence[int]]) -> list[str]:
    listed = [named(ranks) for ranks in classes[:_MOST_CLASSES]]
    return listed if len(classes) <= _MOST_CLASSES else [*listed, f"{len(classes) - _MOST_CLASSES} more versions"]
