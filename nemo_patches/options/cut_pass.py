"""Ends the rest of a pass that was cut, so that the next one begins anew; refuses other loaders.

Most loaders begin anew by themselves. Lhotse's IterableDatasetWrapper, which NeMo puts around
tarred data, goes on with what is left, also in persistent workers. Its bucketing sampler has a
thread that reads ahead: left alone, that keeps the interpreter from exiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from nemo_patches.options.agreement import StopTogetherError

_KNOWN = ("torch", "lhotse", "nemo")  # packages
# Attributes of Lhotse's samplers and CutSets.
_PARTS = ("samplers", "cuts", "data", "iterator", "iterators")
_BEGIN_ANEW = "whose __iter__ begins a new pass each time"
_ALLOWED = f"allowed: NeMo's and Lhotse's own, and loaders, data sets and samplers {_BEGIN_ANEW}"


class PassEnds:
    """Of one loader."""

    def __init__(self, loader: Any, title: str) -> None:
        """Raises StopTogetherError for a loader whose next pass may go on with one that was cut."""
        # NeMo's, around another loader.
        if type(loader).__name__ == "BroadcastingDataLoader":
            loader = vars(loader).get("_source", loader)
        parts = list(_parts_of(loader))
        for part in parts:
            _refuse_own_iterator(part, title)
        wrappers = [part for part in parts if _is_a(part, "IterableDatasetWrapper")]
        self._loader = loader
        self._wrapper = wrappers[0] if wrappers else None
        samplers = (
            [vars(self._wrapper)["sampler"]] if self._wrapper is not None else parts
        )
        self._samplers = [
            sampler for sampler in samplers if _is_a(sampler, "CutSampler")
        ]
        self._in_workers = False
        if self._wrapper is not None and isinstance(loader, DataLoader):
            self._in_workers = loader.num_workers > 0

    def note_end(self) -> None:
        """A pass was read to its end here.

        Persistent workers have counted it; so do their copies in this process.
        """
        if self._in_workers and self._loader.persistent_workers:
            self._count()

    def cut(self) -> None:
        """A pass is over, and this rank may have more of it."""
        if self._in_workers:
            self.note_end()
            # Ends persistent workers; new ones begin with this process's samplers.
            self._loader._iterator = None
            return
        self._count()
        if self._wrapper is not None:
            self._wrapper._sampler_iter = None

    def _count(self) -> None:
        """As if the pass had been read to its end: threads end, and the sources of cuts count it,
        by which they shuffle the next one.
        """
        for sampler in self._samplers:
            for part in _inner_parts(sampler):
                # A sampler: its epoch is Lightning's to count.
                if hasattr(part, "set_epoch"):
                    close = getattr(getattr(part, "cuts_iter", None), "close", None)
                    if close is not None:
                        close()
                elif _counts_epochs(part):
                    part.epoch += 1


def _parts_of(loader: Any) -> Iterator[Any]:
    """The loader, and what decides on its batches: its data sets, one in the other, and its
    samplers.
    """
    yield loader
    if not isinstance(loader, DataLoader):
        return
    yield from (
        loader.sampler,
        loader.batch_sampler,
        _held(loader.batch_sampler, "sampler"),
    )
    seen = set[int]()
    part: Any = loader.dataset
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        yield part
        part = _held(part, "dataset")


def _held(part: Any, name: str) -> Any:
    """An attribute of an object of the user's, without calling any code of theirs."""
    return vars(part).get(name) if hasattr(part, "__dict__") else None


def _refuse_own_iterator(part: Any, title: str) -> None:
    owner = next(
        (base for base in type(part).__mro__ if "__next__" in vars(base)), None
    )
    if owner is not None and owner.__module__.partition(".")[0] not in _KNOWN:
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        raise StopTogetherError(
            f"{title}: stop_together does not allow {kind}: it is its own iterator, so its next "
            f"pass would go on with one that was ended early; {_ALLOWED}"
        )


def _inner_parts(of: Any) -> Iterator[Any]:
    """A sampler, those within it, and the sources of its cuts, which are nested."""
    yield of
    for name in _PARTS:
        held = vars(of).get(name)
        for part in held if isinstance(held, (list, tuple)) else [held]:
            # Not the cuts themselves.
            if hasattr(part, "__dict__") and hasattr(part, "__iter__"):
                yield from _inner_parts(part)


def _counts_epochs(part: Any) -> bool:
    return _is_of(type(part), "lhotse", "nemo") and isinstance(
        vars(part).get("epoch"), int
    )


def _is_a(part: Any, name: str) -> bool:
    """Whether its class is, or inherits from, Lhotse's of this name."""
    return any(
        base.__name__ == name and _is_of(base, "lhotse") for base in type(part).__mro__
    )


def _is_of(kind: type, *packages: str) -> bool:
    return any(base.__module__.partition(".")[0] in packages for base in kind.__mro__)
