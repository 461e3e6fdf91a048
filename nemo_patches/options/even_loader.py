"""A data loader whose passes end on all ranks when the first rank runs out of batches."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

from nemo_patches.options.agreement import (
    Agreement,
    Position,
    StopTogetherError,
    agreement_of,
)
from nemo_patches.options.cut_pass import PassEnds
from nemo_patches.sync.rank_log import rank_and_size, report
from nemo_patches.sync.settings import DISABLE_VARIABLE

T = TypeVar("T")


class EvenLoader:
    """Changes only the end of a pass; other attributes are read from the wrapped loader, and set on
    it.
    """

    __slots__ = (
        "_agreement",
        "_ends",
        "_loader",
        "_may_be_empty",
        "_passes",
        "agreed_length",
        "limit",
    )

    def __init__(
        self, loader: Any, agreement: Agreement, may_be_empty: bool = False
    ) -> None:
        """may_be_empty: on all ranks. Waits for every rank; raises StopTogetherError."""
        self._loader = loader
        self._agreement = agreement
        self._may_be_empty = may_be_empty
        self._ends = PassEnds(loader, agreement.title)
        self._passes = 0
        # Most batches of the pass that begins.
        self.limit: Callable[[], int | None] = lambda: None
        length = _length(loader)
        # The smallest length of all ranks' loaders; None if one has none.
        self.agreed_length, rank, all_alike = agreement.least_length(length)
        if self.agreed_length == 0:
            self._no_batch(rank, all_alike)
        elif self.agreed_length is not None and length != self.agreed_length:
            least = f"rank {rank} has {self.agreed_length} batches: no rank's pass is longer"
            report(
                logging.WARNING, f"{agreement.title}: {least}; this rank has {length}"
            )

    def __getattr__(self, name: str) -> Any:
        # Of an empty copy, before its attributes are there.
        if name in EvenLoader.__slots__:
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
        return min(self.agreed_length, *self._limits())

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._pass()
        except StopTogetherError:
            self._ends.cut()  # a thread of its sampler would keep this process from exiting
            raise

    def _pass(self) -> Iterator[Any]:
        agreement = self._agreement
        self._passes += 1
        limit = min(self._limits(), default=None)
        agreement.settle()
        if limit is not None and limit <= 0:  # a resumed pass that had ended
            return
        source, here, ended_by, all_ended = self._begun(limit)
        if ended_by is not None:
            # A rank may have continued a pass with nothing left, one that was left at a limit or by
            # a break. Only a
            # pass from the beginning shows that.
            self._ends.cut()
            source, here, ended_by, all_ended = self._begun(limit)
        if ended_by is not None:
            self._no_batch(ended_by, all_ended)
            return
        batch = 1
        # One batch ahead: the round completes while the previous batch computes.
        while ended_by is None:
            (current,) = here
            here = _next(source)
            batch += 1
            agreement.say(Position(self._passes, batch, ended=not here))
            yield current
            ended_by, all_ended = agreement.ended_by()
        if limit is not None and batch > limit:
            return  # on all ranks: the next pass may go on with it, as without us
        title = f"{agreement.title}: pass {self._passes}"
        title += f" ends on every rank after {batch - 1} batches"
        if here:
            self._ends.cut()
            text = f"rank {ended_by} has no more; this rank's others are left out"
            report(logging.WARNING, f"{title}: {text}")
        else:
            self._ends.note_end()
            if not all_ended:
                report(logging.INFO, f"{title}: this rank has no more, others have")

    def _begun(
        self, limit: int | None
    ) -> tuple[Iterator[Any], tuple[Any, ...], int | None, bool]:
        """A pass's batches after the first, and the first (empty: there is none); then as
        Agreement.ended_by().
        """
        source = itertools.islice(self._loader, limit)
        here = _next(source)
        self._agreement.say(Position(self._passes, 1, ended=not here))
        return (source, here, *self._agreement.ended_by())

    def _limits(self) -> list[int]:
        return [
            limit for limit in (self.limit(), self.agreed_length) if limit is not None
        ]

    def _no_batch(self, rank: int, all_are: bool) -> None:
        """rank: one that has none. all_are: none has any, and nobody would go on alone."""
        if not (all_are and self._may_be_empty):
            of = f" in pass {self._passes}" if self._passes > 1 else ""
            raise StopTogetherError(
                f"{self._agreement.title}: rank {rank} has no batch at all{of}, and no rank may "
                "go on alone. Each needs one: use fewer ranks or more shards, or see what filters "
                "leave"
            )


class EvenLoaders:
    """Makes the loaders of this process."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def make(
        self,
        loader: Iterable[T],
        kind: str,
        may_be_empty: bool = False,
    ) -> EvenLoader | Iterable[T]:
        """The loader itself without other ranks.

        Waits for every rank, without limit; raises StopTogetherError.
        """
        if os.environ.get(DISABLE_VARIABLE) == "1":
            self._say_once(
                f"ranks do not end their passes together: {DISABLE_VARIABLE}=1"
            )
            return loader
        # Lightning passes a CombinedLoader with it twice.
        if isinstance(loader, EvenLoader):
            loader = loader._loader
        dataset = loader.dataset if isinstance(loader, DataLoader) else loader
        agreement = agreement_of(kind, type(dataset).__name__)
        if agreement is not None:
            return EvenLoader(loader, agreement, may_be_empty)
        if rank_and_size()[1] > 1:
            why = "torch.distributed is not initialized (yet), or nemo_patches has said an error"
            self._say_once(f"ranks do not end their passes together: {why}")
        return loader

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            report(logging.WARNING, text)


even_loaders = EvenLoaders()  # of this process


def stop_together(loader: Iterable[T]) -> Iterable[T]:
    """The loader, with passes that end on all ranks when the first rank runs out; further batches
    are dropped.

    For training loops outside Lightning: `for batch in nemo_patches.stop_together(loader):`. Every
    rank must call it, equally often and in the same order: it waits for every rank, without limit.
    It and the passes raise StopTogetherError.
    """
    return cast("Iterable[T]", even_loaders.make(loader, "data"))


def _length(loader: Any) -> int | None:
    """The loader's length; that of an iterable dataset is a guess, and does not count."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _next(source: Iterator[Any]) -> tuple[Any, ...]:
    """The next batch; empty if there is none."""
    return tuple(itertools.islice(source, 1))
