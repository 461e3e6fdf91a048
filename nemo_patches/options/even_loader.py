"""A data loader whose passes end on all ranks after the same number of batches: when the first rank runs out."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from nemo_patches.options.agreement import Agreement, Agreements, LoaderCounters, Position, StopTogetherError
from nemo_patches.options.cut_pass import PassEnds
from nemo_patches.sync.rank_log import rank_and_size, report
from nemo_patches.sync.settings import PREFIX

_DISABLE_VARIABLE = PREFIX + "DISABLE"
T = TypeVar("T")


class EvenLoader:
    """Changes only the end of a pass; other attributes are read from the wrapped loader, and set on it.

    Where every rank's loader has a length, the least is agreed on once; else each batch has a round.
    """

    __slots__ = (
        "__weakref__",
        "_agreement",
        "_batches",
        "_ends",
        "_loader",
        "_may_be_empty",
        "_passes",
        "_passes_cut",
        "agreed_length",
        "announced_length",
        "limit",
    )

    def __init__(self, loader: Any, agreement: Agreement, may_be_empty: bool = False) -> None:
        """may_be_empty: on all ranks. Waits for every rank; raises StopTogetherError."""
        self._loader = loader
        self._agreement = agreement
        self._may_be_empty = may_be_empty
        self._ends = PassEnds(loader, agreement.title)
        self._passes = self._batches = self._passes_cut = 0
        self.limit: Callable[[], int | None] = lambda: None  # most batches of the pass that begins
        length = _length(loader)
        # The smallest length of all ranks' loaders; None if one has none, and passes are agreed on batch by batch.
        self.agreed_length, rank = agreement.least_length(length)
        # The same of what they announce, for an iterable dataset a guess.
        self.announced_length = self.agreed_length
        if self.agreed_length is None:
            self.announced_length, _ = agreement.least_length(_sized(loader))
        elif length is not None and length > self.agreed_length:
            left_out = f"{length - self.agreed_length} of this rank's {length} left out in each"
            text = f"rank {rank} has {self.agreed_length} batches: no rank's pass is longer; {left_out}"
            report(logging.WARNING, f"{agreement.title}: {text}")
        if self.agreed_length == 0:
            self._no_batch(rank, all_are=agreement.least_length(int(not length))[0] == 1)

    def __getattr__(self, name: str) -> Any:
        if name in EvenLoader.__slots__:  # of an empty copy, before its attributes are there
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in EvenLoader.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        if self.agreed_length is None:
            raise TypeError("not every rank knows its number of batches")
        limit = self.limit()
        return self.agreed_length if limit is None else min(self.agreed_length, limit)

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        batches = self._agreed_on() if self.agreed_length is None else self._counted_out()
        try:
            for batch in batches:
                self._batches += 1
                yield batch
        except StopTogetherError:
            self._ends.cut()  # a thread of its sampler would keep this process from exiting
            raise

    def counters(self) -> LoaderCounters:
        return LoaderCounters(
            loader=self._agreement.title,
            passes=self._passes,
            batches=self._batches,
            passes_cut=self._passes_cut,
            waited=self._agreement.waited,
        )

    def _counted_out(self) -> Iterator[Any]:
        length = len(self)
        given = 0
        for batch in itertools.islice(self._loader, length):
            given += 1
            if given == self.agreed_length and len(self._loader) > given:  # now: no batch may be asked for afterwards
                self._passes_cut += 1
            yield batch
        if given < length:
            raise StopTogetherError(
                f"{self._agreement.title}: its length said {length} or more batches, and it ended after {given}; the "
                "other ranks go on. Use a loader that has no length, or the right one"
            )

    def _agreed_on(self) -> Iterator[Any]:
        agreement = self._agreement
        number = self._passes
        limit = self.limit()
        agreement.settle()
        if limit is not None and limit <= 0:  # a resumed pass that had ended
            return
        source, here, ended_by, all_ended = self._begun(limit)
        if ended_by is not None:
            # A rank may have continued a pass with nothing left, one that was left at a limit or by a break. Only a
            # pass from the beginning shows that.
            self._ends.cut()
            source, here, ended_by, all_ended = self._begun(limit)
        if ended_by is not None:
            self._no_batch(ended_by, all_ended)
            return
        batch = 1
        while ended_by is None:  # one batch ahead: the round completes while the previous batch computes
            (current,) = here
            here = _next(source)
            batch += 1
            agreement.say(Position(number, batch, ended=not here))
            yield current
            if number != self._passes:  # the outstanding round is that pass's
                raise StopTogetherError(
                    f"{agreement.title}: pass {number} cannot go on, since pass {self._passes} has begun: ranks agree "
                    "on one pass over a loader at a time"
                )
            ended_by, all_ended = agreement.ended_by()
        if limit is not None and batch > limit:
            return  # on all ranks: the next pass may go on with it, as without us
        title = f"{agreement.title}: pass {number} ends on every rank after {batch - 1} batches"
        if here:
            self._passes_cut += 1
            self._ends.cut()
            report(logging.WARNING, f"{title}: rank {ended_by} has no more; this rank's others are left out")
        else:
            self._ends.ended()
            if not all_ended:
                report(logging.INFO, f"{title}: this rank has no more, others have")

    def _begun(self, limit: int | None) -> tuple[Iterator[Any], tuple[Any, ...], int | None, bool]:
        """A pass's batches after the first, and the first (empty: there is none); as ended_by()."""
        source = itertools.islice(self._loader, limit)
        here = _next(source)
        self._agreement.say(Position(self._passes, 1, ended=not here))
        return (source, here, *self._agreement.ended_by())

    def _no_batch(self, rank: int, all_are: bool) -> None:
        """rank: one that has none. all_are: none has any, and nobody would go on alone."""
        title = self._agreement.title
        if all_are and self._may_be_empty:
            report(logging.WARNING, f"{title}: no rank has a batch")
            return
        of = f" in pass {self._passes}" if self._passes > 1 else ""
        raise StopTogetherError(
            f"{title}: rank {rank} has no batch at all{of}, and no rank may go on alone. Every rank needs one: use "
            "fewer ranks or more shards, or see what filters leave"
        )


class EvenLoaders:
    """The loaders of this process: makes them, and has the counters of all live ones."""

    def __init__(self) -> None:
        self._agreements = Agreements()
        self._said: set[str] = set()
        self._loaders: weakref.WeakSet[EvenLoader] = weakref.WeakSet()

    def make(self, loader: Iterable[T], kind: str, may_be_empty: bool = False) -> EvenLoader | Iterable[T]:
        """The loader itself without other ranks. Waits for every rank, without limit; raises StopTogetherError."""
        if os.environ.get(_DISABLE_VARIABLE) == "1":
            self._say_once(f"ranks do not end their passes together: {_DISABLE_VARIABLE}=1")
            return loader
        if isinstance(loader, EvenLoader):  # Lightning passes a CombinedLoader with it twice
            loader = loader._loader
        dataset = loader.dataset if isinstance(loader, torch.utils.data.DataLoader) else loader
        agreement = self._agreements.make(kind, type(dataset).__name__)
        if agreement is None:
            size = rank_and_size()[1]
            if size > 1:
                why = "torch.distributed is not initialized (yet), or nemo_patches has said an error"
                self._say_once(f"passes do not end together, and the launcher says {size} ranks: {why}")
            return loader
        even = EvenLoader(loader, agreement, may_be_empty)
        self._loaders.add(even)
        return even

    def counters(self) -> tuple[LoaderCounters, ...]:
        return tuple(sorted((loader.counters() for loader in self._loaders), key=lambda counters: counters.loader))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            report(logging.WARNING, text)


even_loaders = EvenLoaders()  # of this process


def stop_together(loader: Iterable[T]) -> Iterable[T]:
    """The loader, with passes that end on all ranks when the first rank runs out; further batches are dropped.

    For training loops outside Lightning: `for batch in nemo_patches.stop_together(loader):`. Every rank must call it,
    equally often and in the same order: it waits for every rank, without limit. It and the passes raise
    StopTogetherError.
    """
    return cast("Iterable[T]", even_loaders.make(loader, "data"))


def _length(loader: Any) -> int | None:
    """The loader's length; that of an iterable dataset is a guess, and does not count."""
    is_loader = isinstance(loader, torch.utils.data.DataLoader)
    is_guess = is_loader and isinstance(loader.dataset, torch.utils.data.IterableDataset)
    return None if is_guess else _sized(loader)


def _sized(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _next(source: Iterator[Any]) -> tuple[Any, ...]:
    """The next batch; empty if there is none."""
    return tuple(itertools.islice(source, 1))
