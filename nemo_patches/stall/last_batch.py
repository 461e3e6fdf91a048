"""The current or last batch of a Lightning trainer: its index and its samples' ids.

Lightning's own loop tells the batch. Of the batch, which is the user's, nothing is run: no property, no __getattr__, no
method of a subclass of dict. Tensors on a device are not read: that would wait for it.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from ..text import safe

_ID_FIELDS = ("cuts", "sample_ids", "sample_id", "ids", "id")
_SAMPLE_IDS = 4  # in NeMo's tuples of signals, their lengths, transcripts and their lengths, the ids come last
_SHOWN = 4  # ids
_LONGEST = 60  # characters of one


class _Ids(NamedTuple):
    """of: what they are of. shown: the first ones."""

    of: str
    shown: tuple[str, ...]
    total: int


def last_batch(trainer: Any) -> str:
    """ "1041: cuts a, b, +30"; empty where this trainer does not say, or is None."""
    try:
        loop = trainer._active_loop
        loop = getattr(loop, "epoch_loop", loop)  # training's
        index = int(loop.batch_progress.current.ready) - 1
        batch = getattr(getattr(loop, "_results", None), "batch", None)  # None between two batches
    except Exception:  # Lightning's, of another version
        return ""
    return f"{index}{_ids_text(batch)}" if index >= 0 else ""


def _ids_text(batch: object) -> str:
    found = next(filter(None, map(_ids, _fields(batch))), None)
    if found is None:
        return ""
    shown = ", ".join(safe(one, _LONGEST) for one in found.shown)
    more = f", +{found.total - len(found.shown)}" if found.total > len(found.shown) else ""
    return f": {found.of} {shown}{more}"


def _fields(batch: object) -> Iterator[object]:
    """Those that may have the ids, by their names or their places."""
    if type(batch) is dict:
        yield from (batch.get(name) for name in _ID_FIELDS)
    elif type(batch) is tuple or type(batch) is list:
        yield from (field for field in batch if _cuts(field) is not None)
        yield from batch[_SAMPLE_IDS : _SAMPLE_IDS + 1]
    elif isinstance(batch, tuple):
        names = _names(batch)
        yield from (tuple.__getitem__(batch, names.index(name)) for name in _ID_FIELDS if name in names)
    elif not issubclass(type(batch), dict | list):
        yield from (inspect.getattr_static(batch, name, None) for name in _ID_FIELDS)


def _names(batch: tuple[object, ...]) -> tuple[str, ...]:
    """Of a named tuple's fields; empty for any other tuple."""
    names = inspect.getattr_static(type(batch), "_fields", ())
    are_names = type(names) is tuple and all(type(name) is str for name in names)
    return names if are_names and len(names) == tuple.__len__(batch) else ()


def _ids(field: object) -> _Ids | None:
    if (cuts := _cuts(field)) is not None:
        first = cuts.values() if isinstance(cuts, dict) else cuts
        return _if_ids("cuts", (inspect.getattr_static(cut, "id", None) for cut in islice(first, _SHOWN)), len(cuts))
    if type(field) is torch.Tensor:
        if field.device.type != "cpu" or field.dim() != 1 or field.is_floating_point():
            return None
        return _if_ids("samples", field[:_SHOWN].tolist(), len(field))
    if type(field) is tuple or type(field) is list:
        return _if_ids("samples", field[:_SHOWN], len(field))
    return None


def _if_ids(of: str, shown: Iterable[object], count: int) -> _Ids | None:
    texts = tuple(one if type(one) is str else str(one) for one in shown if type(one) is str or type(one) is int)
    return _Ids(of, texts, count) if len(texts) == min(count, _SHOWN) > 0 else None


def _cuts(field: object) -> dict[str, Any] | list[Any] | tuple[Any, ...] | None:
    """Those of Lhotse's CutSet, where they are in memory: a lazy one would read files."""
    lhotse = sys.modules.get("lhotse.cut.set")
    if lhotse is None or type(field) is not getattr(lhotse, "CutSet", None):
        return None
    cuts = inspect.getattr_static(field, "cuts", None)
    if type(cuts) is dict or type(cuts) is list or type(cuts) is tuple:
        return cuts
    return None
