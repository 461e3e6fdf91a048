"""A data loader whose passes end on all ranks after the same number of batches: when the first rank runs out."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from nemo_patches.options.agreement import Agreement, Agreements, LoaderCounters, Position, StopTogetherError
from nemo_patches.options.left_pass import LeftPass
from nemo_patches.sync.rank_log import rank_and_size, report
from nemo_patches.sync.settings import PREFIX

_DISABLE_VARIABLE = PREFIX + "DISABLE"
_OWN_ATTRIBUTES = {
    "_loader",
    "_agreement",
    "_may_be_empty",
    "_said_left_out",
    "_left_pass",
    "_goes_on",
    "_is_left",
    "_is_lightnings",
    "_taken_back",
    "_cut_after",
    "agreed_length",
    "announced_length",
    "counts",
    "limit",
    "skipped",
}
T = TypeVar("T")


class Counts:
    """What a loader has yielded and dropped on this rank."""

    def __init__(self) -> None:
        self.passes = self.batches = self.passes_cut = self.left_out = 0

    def cut(self, left_out: int) -> None:
        self.passes_cut, self.left_out = self.passes_cut + 1, self.left_out + left_out


class EvenLoader:
    """Changes only the end of a pass; attributes are read from the wrapped loader, and set on it.

    Where every rank's loader has a length, the least is agreed on here, once; else each pass has a round a batch.
    """

    def __init__(
        self, loader: Any, agreement: Agreement, may_be_empty: bool = False, is_lightnings: bool = True
    ) -> None:
        """may_be_empty: on all ranks."""
        self._loader, self._agreement, self._may_be_empty = loader, agreement, may_be_empty
        self.counts = Counts()
        self.limit: int | None = None  # most batches of a pass
        self.skipped = 0  # batches that the next pass skips: those before a resume
        self._left_pass = LeftPass(loader)
        self._is_left = False  # the last pass, on all ranks, at its limit or by a break: the next one may go on with it
        self._is_lightnings = is_lightnings  # otherwise a loop's, where a pass of one batch is a normal pass
        self._taken_back: tuple[Any, ...] = ()  # the last pass's first batch, if there was no second one
        self._cut_after = 0  # after this many batches, while this rank had another one
        length = _length(loader)
        least, rank, all_have = agreement.least_length(length)
        self._said_left_out = (length or 0) - (least or 0)
        # The smallest length of all ranks' loaders; None if one has none, and passes are agreed on batch by batch.
        self.agreed_length = least
        # The same of what they announce, for an iterable dataset a guess: what follows from it is to be the same on all
        # ranks, such as limits, and when to validate.
        self.announced_length = agreement.least_length(_sized(loader))[0] if least is None else least
        # Whether any rank's loader continues an abandoned pass: then all check where a pass begins.
        self._goes_on = least is None and agreement.least_length(int(not self._left_pass.goes_on))[0] == 0
        if least == 0:
            self._without_batch(rank, all_have)
        if least is not None and length is not None and length > least:
            report(
                logging.WARNING,
                f"{agreement.title}: rank {rank} has {least} batches: no rank's pass is longer; "
                f"{_share(length - least, length)} of this rank's left out in each",
            )
        even_loaders.add(self)
        if least is None and (name := self._left_pass.own_iterator()):
            even_loaders.say_may_go_on(agreement.title, f"{name} has a __next__, as what is its own iterator")

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
        if self.agreed_length is None:
            raise TypeError("not every rank knows its number of batches")
        return self.agreed_length if self.limit is None else min(self.agreed_length, self.limit)

    def __iter__(self) -> Iterator[Any]:
        self.counts.passes += 1
        batches = self._counted_out() if self.agreed_length is not None else self._agreed_on()
        try:
            for batch in batches:
                self.counts.batches += 1
                yield batch
        except StopTogetherError:
            self._left_pass.end()  # a thread of its sampler would keep this process from exiting
            raise

    def counters(self) -> LoaderCounters:
        agreement, counts = self._agreement, self.counts
        figures = counts.passes, counts.batches, counts.passes_cut, counts.left_out
        return LoaderCounters(agreement.title, *figures, agreement.waited)

    def _counted_out(self) -> Iterator[Any]:
        given, most, least, length = 0, len(self), self.agreed_length or 0, len(self._loader)
        left_out = length - least
        if most == least and left_out > max(self._said_left_out, 0):  # a sampler has made the pass longer
            self._said_left_out = left_out
            since = f"it has {length} batches now, and the ranks agreed on {least} when it was set up"
            report(
                logging.WARNING, f"{self._agreement.title}: {since}; {_share(left_out, length)} left out in each pass"
            )
        for batch in itertools.islice(self._loader, most):
            given += 1
            if given == least and left_out > 0:  # now, because no batch may be requested after the last
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
        is_used_up, ahead = agreement.settle(), even_loaders.take_ahead(self._loader)
        if most is not None and most <= 0:  # a resumed pass that had ended
            return
        was_left, self._is_left = self._is_left and self._goes_on, True
        source = itertools.islice(self._source(ahead, is_used_up), most)
        here, place = _next(source), Position(number, 1, False)
        ended_by, all_ended = self._say_and_ask(place, here)
        if ended_by is not None and self._goes_on and not (was_left and all_ended):
            # A rank may have continued a pass with nothing left. Only a pass from the beginning shows that.
            if here and was_left:
                self._cut_short(0, ended_by)
            if self._left_pass.goes_on:
                if here:
                    self._left_pass.end()
                source = itertools.islice(self._loader, most)
                here = _next(source)
            ended_by, all_ended = self._say_and_ask(place, here)
        if ended_by is not None:
            self._is_left = False
            self._without_batch(ended_by, all_ended, was_left)
            return
        # When Lightning reloads loaders, it takes one batch, and starts again. Up to here none is read ahead.
        self._taken_back = here if self._is_lightnings and most != 1 else ()
        yield here[0]
        self._check_newest(number)
        self._taken_back = ()
        here, place = _next(source), place._replace(batch=2)
        ended_by, all_ended = self._say_and_ask(place, here)
        while ended_by is None:  # one batch ahead: the round completes while the previous batch computes
            (batch,), here, place = here, _next(source), place._replace(batch=place.batch + 1)
            agreement.say(place._replace(ended=not here))
            if self._left_pass.goes_on and not self._is_lightnings:
                even_loaders.keep_ahead(self._loader, here)
            yield batch
            self._check_newest(number)
            ended_by, all_ended = agreement.ended_by()
        self._is_left = most is not None and place.batch > most
        even_loaders.take_ahead(self._loader)
        if not all_ended:
            even_loaders.note_uneven(self._loader)
        if here:
            self._left_pass.end()
            self._cut_short(place.batch - 1, ended_by)
        elif not self._is_left:
            self._ran_out(place.batch - 1, all_ended)

    def _source(self, ahead: tuple[Any, ...], is_used_up: bool) -> Iterable[Any]:
        """The batches of a new pass, with one that the last pass has taken and not given.

        ahead: the batch after a break. is_used_up: some rank had nothing left of that pass.
        """
        loader = cast("Iterable[Any]", self._loader)
        again, self._taken_back = self._taken_back, ()
        if again and even_loaders.is_uneven(loader):
            self._left_pass.end()
        elif again and self._left_pass.goes_on:
            return itertools.chain(again, loader)
        elif ahead and is_used_up:
            self._left_pass.end()
        elif ahead:
            return itertools.chain(ahead, loader)
        return loader

    def _say_and_ask(self, place: Position, here: tuple[Any, ...]) -> tuple[int | None, bool]:
        """Tell the others whether this rank has the batch at this place, and wait for what they have."""
        self._agreement.say(place._replace(ended=not here))
        return self._agreement.ended_by()

    def _check_newest(self, number: int) -> None:
        if number != self.counts.passes:  # the outstanding round is that pass's
            raise StopTogetherError(
                f"{self._agreement.title}: pass {number} cannot go on, since pass {self.counts.passes} has begun: "
                "ranks agree on one pass over a loader at a time"
            )

    def _without_batch(self, rank: int, all_are: bool, was_left: bool = False) -> None:
        """rank: one that has none. all_are: none has any, and nobody would go on alone. was_left: the last pass."""
        title, number = self._agreement.title, self.counts.passes
        if all_are and was_left:
            why = "the last one was left when none had another; the next one begins anew"
            report(logging.WARNING, f"{title}: pass {number} has no batch on any rank, as without StopTogether: {why}")
        elif all_are and self._may_be_empty:
            report(logging.WARNING, f"{title}: no rank has a batch")
        else:
            of = f" in pass {number}" if number > 1 else ""
            raise StopTogetherError(
                f"{title}: rank {rank} has no batch at all{of}, and no rank may go on alone. Every rank needs one: use "
                "fewer ranks or more shards, or see what filters leave"
            )

    def _ran_out(self, given: int, all_have: bool) -> None:
        title, number, cut_after = self._agreement.title, self.counts.passes, self._cut_after
        if not all_have:
            text = "this rank has no more, others have"
            report(logging.INFO, f"{title}: pass {number} ends on every rank after {given} batches: {text}")
        if given <= cut_after and not self._left_pass.is_lhotses:
            seen = f"pass {number} had {given} batches here, and the one before more than {cut_after}"
            even_loaders.say_may_go_on(title, f"{seen}, with which it perhaps went on")
        self._cut_after = 0

    def _cut_short(self, given: int, rank: int) -> None:
        length, announced = _length(self._loader), _sized(self._loader) or 0
        most = announced if self.limit is None else min(announced, self.limit)
        if length is not None:
            left_out = max(most - given, 1)
            text = f"{_share(left_out, given + left_out)} left out here"
        else:
            left_out, text = 1, "at least 1 batch left out here"
            if most > given:
                text += f"; by the length that it announces, a guess, {_share(most - given, most)}"
        self._cut_after = given
        self.counts.cut(left_out)
        passed = f"pass {self.counts.passes} ends on every rank after {given} batches"
        report(logging.WARNING, f"{self._agreement.title}: {passed}: rank {rank} has no more; {text}")


class EvenLoaders:
    """The loaders of this process: makes them for loops outside Lightning, and has the counters of all live ones."""

    def __init__(self) -> None:
        self._agreements = Agreements()
        self._said_disabled = self._said_alone = False
        self._said_may_go_on: set[str] = set()
        self._uneven: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ahead: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._loaders: weakref.WeakSet[EvenLoader] = weakref.WeakSet()

    def make(self, loader: Iterable[T], kind: str, may_be_empty: bool = False) -> EvenLoader | Iterable[T]:
        """The loader itself without other ranks. Waits for every rank, without limit; raises StopTogetherError."""
        if os.environ.get(_DISABLE_VARIABLE) == "1":
            if not self._said_disabled:
                report(logging.WARNING, f"ranks do not end their passes together: {_DISABLE_VARIABLE}=1")
            self._said_disabled = True
            return loader
        if isinstance(loader, EvenLoader):  # Lightning passes a CombinedLoader with it twice
            loader = loader._loader
        agreement = self._agreements.make(kind, type(getattr(loader, "dataset", loader)).__name__)
        return loader if agreement is None else EvenLoader(loader, agreement, may_be_empty, kind != "data")

    def say_alone(self) -> None:
        """Log once that a loader stays unchanged although there are other ranks."""
        size = rank_and_size()[1]
        if size > 1 and not self._said_alone and os.environ.get(_DISABLE_VARIABLE) != "1":
            self._said_alone = True
            why = "torch.distributed is not initialized (yet), or nemo_patches has said an error"
            report(logging.WARNING, f"stop_together() does nothing, and the launcher says {size} ranks: {why}")

    def say_may_go_on(self, title: str, why: str) -> None:
        """Log that a loader may not start again. Once for each reason: a loader may be created for every epoch."""
        if why not in self._said_may_go_on:
            self._said_may_go_on.add(why)
            text = "if its next pass goes on with one that was ended early, that is short: have its __iter__ begin anew"
            report(logging.WARNING, f"{title}: {why}; {text}")

    def note_uneven(self, loader: Any) -> None:
        """A pass over this loader has ended before its end on some rank; all ranks know. Also a new EvenLoader asks."""
        with contextlib.suppress(TypeError):  # one that has no weak references
            self._uneven.add(loader)

    def is_uneven(self, loader: Any) -> bool:
        with contextlib.suppress(TypeError):
            return loader in self._uneven
        return False

    def keep_ahead(self, loader: Any, batch: tuple[Any, ...]) -> None:
        """The batch after the current one: a pass that continues an abandoned one begins with it."""
        with contextlib.suppress(TypeError):
            self._ahead[loader] = batch

    def take_ahead(self, loader: Any) -> tuple[Any, ...]:
        with contextlib.suppress(TypeError):
            return self._ahead.pop(loader, ())
        return ()

    def add(self, loader: EvenLoader) -> None:
        self._loaders.add(loader)

    def counters(self) -> tuple[LoaderCounters, ...]:
        return tuple(sorted((loader.counters() for loader in self._loaders), key=lambda counters: counters.loader))


even_loaders = EvenLoaders()  # of this process


def stop_together(loader: Iterable[T]) -> Iterable[T]:
    """The loader, with passes that end on all ranks when the first rank runs out; further batches are dropped.

    For training loops outside Lightning: `for batch in nemo_patches.stop_together(loader):`. Every rank must call it,
    equally often and in the same order: it waits for every rank, without limit. It and the passes raise
    StopTogetherError.
    """
    even = even_loaders.make(loader, "data")
    if even is loader:
        even_loaders.say_alone()
    return cast("Iterable[T]", even)


def _length(loader: Iterable[Any]) -> int | None:
    """The loader's length; that of an iterable dataset is a guess, and does not count."""
    is_iterable = isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)
    return None if is_iterable else _sized(loader)


def _sized(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _next(source: Iterator[Any]) -> tuple[Any, ...]:
    """The next batch; empty if there is none."""
    return tuple(itertools.islice(source, 1))


def _share(left_out: int, of: int) -> str:
    return f"{left_out} of {of} batches ({left_out / of:.0%})"
