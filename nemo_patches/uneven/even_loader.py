"""A data loader whose passes end on all ranks after the same number of batches: where the first rank's ends."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from nemo_patches.sync.rank_log import report
from nemo_patches.sync.settings import PREFIX
from nemo_patches.tracing.trace_header import rank_and_size
from nemo_patches.uneven.agreement import Agreement, Agreements, LoaderCounters, StopTogetherError
from nemo_patches.uneven.extremes import Place

_DISABLE_VARIABLE = PREFIX + "DISABLE"
_OWN_ATTRIBUTES = {
    "_loader",
    "_agreement",
    "_may_be_empty",
    "_least",
    "_least_announced",
    "_said_left_out",
    "counts",
    "limit",
    "skipped",
}
T = TypeVar("T")


class Counts:
    """What a loader has given, and left out, on this rank."""

    def __init__(self) -> None:
        self.passes = self.batches = self.passes_cut = self.left_out = 0

    def cut(self, left_out: int) -> None:
        self.passes_cut, self.left_out = self.passes_cut + 1, self.left_out + left_out


class EvenLoader:
    """All but the end of a pass is the loader's own: its attributes are read from it, and set on it.

    Where every rank's loader has a length, the least is agreed on here, once; else each pass has a round a batch.
    """

    def __init__(self, loader: Any, agreement: Agreement, may_be_empty: bool = False) -> None:
        """may_be_empty: on all ranks."""
        self._loader, self._agreement, self._may_be_empty = loader, agreement, may_be_empty
        self.counts = Counts()
        self.limit: int | None = None  # batches of a pass, at most
        self.skipped = 0  # batches by which the next pass is shorter: those before a resumed one
        length = _length(loader)
        least, rank, all_have = agreement.least_length(length)
        self._least, self._said_left_out = least, (length or 0) - (least or 0)
        self._least_announced = agreement.least_length(_sized(loader))[0] if least is None else least
        if least == 0:
            self._without_batch(rank, all_have)
        if least is not None and length is not None and length > least:
            report(
                logging.WARNING,
                f"{agreement.title}: rank {rank} has {least} batches: no rank's pass is longer; "
                f"{_share(length - least, length)} of this rank's left out in each",
            )
        even_loaders.add(self)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN_ATTRIBUTES:  # an empty copy, before its attributes are there
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        if self._least is None:
            raise TypeError("not every rank knows its number of batches")
        return self._least if self.limit is None else min(self._least, self.limit)

    def __iter__(self) -> Iterator[Any]:
        self.counts.passes += 1
        batches = self._counted_out() if self._least is not None else self._agreed_on()
        for batch in batches:
            self.counts.batches += 1
            yield batch

    @property
    def agreed_length(self) -> int | None:
        """The least of all ranks' loaders; None if a rank's has none, and passes are agreed on batch by batch."""
        return self._least

    def announced_length(self) -> int | None:
        """The least that any rank's loader says of its length, for an iterable dataset a guess; None if one says none.

        The same on all ranks, since so must be what follows from it: limits, and when to validate.
        """
        return self._least_announced

    def counters(self) -> LoaderCounters:
        agreement, counts = self._agreement, self.counts
        figures = counts.passes, counts.batches, counts.passes_cut, counts.left_out
        return LoaderCounters(agreement.title, *figures, agreement.waited)

    def _counted_out(self) -> Iterator[Any]:
        given, most, least, length = 0, len(self), self._least or 0, len(self._loader)
        left_out = length - least
        if most == least and left_out > max(self._said_left_out, 0):  # a sampler has made it longer
            self._said_left_out = left_out
            since = f"it has {length} batches now, and the ranks agreed on {least} when it was set up"
            report(
                logging.WARNING, f"{self._agreement.title}: {since}; {_share(left_out, length)} left out in each pass"
            )
        for batch in itertools.islice(self._loader, most):
            given += 1
            if given == least and left_out > 0:  # now: nobody may ask for a batch after the last
                self.counts.cut(left_out)
            yield batch
        if given < most:
            raise StopTogetherError(
                f"{self._agreement.title}: its length said {most} or more batches, and it ended after {given}; the "
                "other ranks go on. Use a loader that has no length, or the right one"
            )

    def _agreed_on(self) -> Iterator[Any]:
        agreement, number = self._agreement, self.counts.passes
        most = None if self.limit is None else self.limit - self.skipped
        self.skipped = 0
        agreement.settle()
        if most is not None and most <= 0:  # a resumed pass that had ended
            return
        # A batch ahead: while the one before computes, the round comes.
        source = itertools.islice(self._loader, most)
        here, place = _next(source), Place(number, 1, False)
        agreement.say(place._replace(ended=not here))
        while True:
            if number != self.counts.passes:  # what is outstanding is that one's
                raise StopTogetherError(
                    f"{agreement.title}: pass {number} cannot go on, since pass {self.counts.passes} has begun: ranks "
                    "agree on one pass over a loader at a time"
                )
            ended_by, all_ended = agreement.ended_by()
            if ended_by is not None:
                if place.batch == 1:
                    self._without_batch(ended_by, all_ended)
                elif not all_ended:
                    self._cut_short(place.batch - 1, ended_by, bool(here))
                return
            (batch,), here, place = here, _next(source), place._replace(batch=place.batch + 1)
            agreement.say(place._replace(ended=not here))
            yield batch

    def _without_batch(self, rank: int, all_are: bool) -> None:
        """rank: one that has none. all_are: none has any, and nobody would go on alone."""
        if not (self._may_be_empty and all_are):
            raise StopTogetherError(
                f"{self._agreement.title}: rank {rank} has no batch at all, and no rank may go on alone. Every rank "
                "needs one: use fewer ranks or more shards, or see what filters leave"
            )
        report(logging.WARNING, f"{self._agreement.title}: no rank has a batch")

    def _cut_short(self, given: int, rank: int, has_more: bool) -> None:
        text = f"{self._agreement.title}: pass {self.counts.passes} ends on every rank after {given} batches: "
        if not has_more:
            report(logging.INFO, text + "this rank has no more, others have")
            return
        announced = _sized(self._loader) or 0
        most = announced if self.limit is None else min(announced, self.limit)
        left_out = max(most - given, 1)
        self.counts.cut(left_out)
        least = "at least " if most <= given + 1 else ""
        report(
            logging.WARNING, f"{text}rank {rank} has no more; {least}{_share(left_out, given + left_out)} left out here"
        )


class EvenLoaders:
    """Those of this process: makes them for loops outside Lightning, and has the counters of all that live."""

    def __init__(self) -> None:
        self._agreements = Agreements()
        self._said_disabled = self._said_alone = False
        self._loaders: weakref.WeakSet[EvenLoader] = weakref.WeakSet()

    def make(self, loader: Iterable[T], kind: str, may_be_empty: bool = False) -> EvenLoader | Iterable[T]:
        """The loader itself without other ranks. Waits for every rank, without limit; raises StopTogetherError."""
        if os.environ.get(_DISABLE_VARIABLE) == "1":
            if not self._said_disabled:
                report(logging.WARNING, f"ranks do not end their passes together: {_DISABLE_VARIABLE}=1")
            self._said_disabled = True
            return loader
        if isinstance(loader, EvenLoader):  # Lightning leaves it in a CombinedLoader that is given to it twice
            loader = loader._loader
        agreement = self._agreements.make(kind, type(getattr(loader, "dataset", loader)).__name__)
        return loader if agreement is None else EvenLoader(loader, agreement, may_be_empty)

    def say_alone(self) -> None:
        """Once, where a loader stays as it is although there are other ranks."""
        size = rank_and_size()[1]
        if size > 1 and not self._said_alone and os.environ.get(_DISABLE_VARIABLE) != "1":
            self._said_alone = True
            why = "torch.distributed is not initialized (yet), or nemo_patches has said an error"
            report(logging.WARNING, f"stop_together() does nothing, and the launcher says {size} ranks: {why}")

    def add(self, loader: EvenLoader) -> None:
        self._loaders.add(loader)

    def counters(self) -> tuple[LoaderCounters, ...]:
        return tuple(sorted((loader.counters() for loader in self._loaders), key=lambda counters: counters.loader))


even_loaders = EvenLoaders()  # of this process


def stop_together(loader: Iterable[T]) -> Iterable[T]:
    """The loader, with passes that end on every rank where the first rank's does: what the others have is left out.

    For training loops outside Lightning: `for batch in nemo_patches.stop_together(loader):`. Every rank calls it, as
    often and in the same order: it waits for every rank, without limit. Raises StopTogetherError, as the passes do.
    """
    even = even_loaders.make(loader, "data")
    if even is loader:
        even_loaders.say_alone()
    return cast("Iterable[T]", even)


def _length(loader: Iterable[Any]) -> int | None:
    """Of an iterable dataset the length is a guess, and counts as none."""
    is_iterable = isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)
    return None if is_iterable else _sized(loader)


def _sized(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _next(source: Iterator[Any]) -> tuple[Any, ...]:
    """The next batch; empty where there is none."""
    return tuple(itertools.islice(source, 1))


def _share(left_out: int, of: int) -> str:
    return f"{left_out} of {of} batches ({left_out / of:.0%})"
