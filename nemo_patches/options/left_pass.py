"""Ends a pass that is abandoned on this rank, so that the next one starts again instead of continuing it.

Lhotse's IterableDatasetWrapper, which NeMo puts around tarred data, goes on with what is left. Its bucketing sampler
has a thread that reads ahead: left alone, that keeps the interpreter from exiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_PARTS = ("samplers", "cuts", "data", "iterator", "iterators")  # attributes of Lhotse's samplers and CutSets


class LeftPass:
    """Of one loader. Nothing here changes one whose batches are not chosen by Lhotse's samplers."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader = getattr(loader, "_source", loader)  # NeMo's BroadcastingDataLoader has one
        self._datasets = tuple(_datasets(loader))
        self._wrapper = wrapper = _wrapper(self._datasets)
        self._sampler = getattr(loader if wrapper is None else wrapper, "sampler", None)
        self.is_lhotses = _is_of(self._sampler, "lhotse")
        self.goes_on = wrapper is not None and not wrapper.reset_on_iter
        self._in_workers = wrapper is not None and getattr(loader, "num_workers", 0) > 0
        self._older_workers = None  # their copies of the wrapper have no ResetOnIter
        if self._in_workers and self.goes_on and not isinstance(wrapper.reset_on_iter, ResetOnIter):
            self._older_workers = getattr(loader, "_iterator", None)
            wrapper.reset_on_iter = ResetOnIter(self._sampler)

    def end(self) -> None:
        """End the pass."""
        if not self._in_workers:
            if self.is_lhotses:
                _end(self._sampler)
            if self._wrapper is not None:
                self._wrapper._sampler_iter = None
        elif self.goes_on:
            self._wrapper.reset_on_iter.at_next_iter()
            if self._older_workers is not None and self._loader._iterator is self._older_workers:
                self._loader._iterator = None  # ends them
            self._older_workers = None

    def own_iterator(self) -> str:
        """The name of a dataset that is its own iterator, and may continue an abandoned pass; otherwise empty."""
        own = (dataset for dataset in self._datasets if hasattr(dataset, "__next__") and dataset is not self._wrapper)
        return next((type(dataset).__name__ for dataset in own), "")


class ResetOnIter:
    """The value of Lhotse's switch of this name, which each worker's copy of the wrapper reads as a pass begins.

    True at the first pass after one that was left: the number of these is in memory that all workers share.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler, self._seen = sampler, 0
        self._left = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def at_next_iter(self) -> None:
        """In the process that has the loader."""
        self._left += 1
        self._seen = int(self._left)  # workers that are forked from now on start again without it

    def __bool__(self) -> bool:
        left = int(self._left)
        if left == self._seen:
            return False
        self._seen = left
        _end(self._sampler)
        return True


def _datasets(loader: Any) -> Iterator[Any]:
    """The loader's, and those that it wraps."""
    seen, part = set[int](), getattr(loader, "dataset", None)
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        yield part
        part = getattr(part, "dataset", None)


def _wrapper(datasets: Iterable[Any]) -> Any:
    """Lhotse's IterableDatasetWrapper; None without."""
    return next((dataset for dataset in datasets if hasattr(dataset, "reset_on_iter")), None)


def _end(sampler: Any) -> None:
    """As if the pass had been read to its end: the threads end, and the sources of cuts count it, by which they shuffle
    the next one."""
    for part in _parts(sampler):
        if hasattr(part, "set_epoch"):  # a sampler: its epoch is Lightning's to count
            if (close := getattr(getattr(part, "cuts_iter", None), "close", None)) is not None:
                close()
        elif _is_of(part, "lhotse", "nemo") and isinstance(getattr(part, "epoch", None), int):
            part.epoch += 1


def _parts(of: Any) -> Iterator[Any]:
    """A sampler, those within it, and the sources of its cuts, which are nested."""
    yield of
    for name in _PARTS:
        held = vars(of).get(name)
        for part in held if isinstance(held, (list, tuple)) else [held]:
            if hasattr(part, "__dict__") and hasattr(part, "__iter__"):  # not the cuts themselves
                yield from _parts(part)


def _is_of(part: Any, *packages: str) -> bool:
    return any(base.__module__.partition(".")[0] in packages for base in type(part).__mro__)
