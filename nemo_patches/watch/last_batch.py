"""The current or last batch of a Lightning trainer: its index and its samples' ids.

Lightning's own loop tells the batch. Of the batch, which is the user's, nothing is run: no
property, no __getattr__, no method of a subclass of dict. Tensors on a device are not read: that
would wait for it.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from ..sync.places import stored
from ..text import safe

_ID_FIELDS = ("cuts", "sample_ids", "sample_id", "ids", "id")
# In NeMo's tuples of signals, their lengths, transcripts and their lengths, the ids come last
_SAMPLE_IDS = 4
_SHOWN = 4  # ids
_LONGEST = 60  # characters of one


def last_batch(trainer: Any) -> str:
    """ "1041 of epoch 3 (train): cuts a, +30"; empty where a trainer does not say."""
    try:
        loop = trainer._active_loop
        loop = getattr(loop, "epoch_loop", loop)  # training's
        index = int(loop.batch_progress.current.ready) - 1
        of = f"epoch {trainer.current_epoch:d} ({trainer.state.stage.value})"
        # None between two batches.
        batch = getattr(getattr(loop, "_results", None), "batch", None)
    except Exception:  # Lightning's, of another version
        return ""
    return f"{index} of {of}{_ids_text(batch)}" if index >= 0 else ""


def _ids_text(batch: object) -> str:
    for field in _fields(batch):
        of, ids, total = _ids(field)
        if ids:
            more = f", +{total - len(ids)}" if total > len(ids) else ""
            return f": {of} {', '.join(safe(str(one), _LONGEST) for one in ids)}{more}"
    return ""


def _fields(batch: object) -> Iterable[object]:
    """Those that may have the ids, by their names or their places."""
    if type(batch) is tuple or type(batch) is list:
        return [
            *(field for field in batch if _cuts(field) is not None),
            *batch[_SAMPLE_IDS : _SAMPLE_IDS + 1],
        ]
    names = stored(batch, "_fields")
    if type(batch) is dict:
        named = batch
    elif issubclass(type(batch), tuple) and type(names) is tuple and _plain(names):
        named = dict(zip(names, tuple.__iter__(batch), strict=False))  # type: ignore[arg-type]
    else:
        named = {name: stored(batch, name) for name in _ID_FIELDS}
    return [named.get(name) for name in _ID_FIELDS]


def _ids(field: Any) -> tuple[str, Sequence[Any], int]:
    """What they are of, the first of them, and how many there are."""
    if (cuts := _cuts(field)) is not None:
        first = islice(cuts.values() if isinstance(cuts, dict) else cuts, _SHOWN)
        return "cuts", _plain([stored(cut, "id") for cut in first]), len(cuts)
    if type(field) is torch.Tensor and field.device.type == "cpu" and field.dim() == 1:
        return "samples", _plain(field[:_SHOWN].tolist()), len(field)
    if type(field) is tuple or type(field) is list:
        return "samples", _plain(field[:_SHOWN]), len(field)
    return "", (), 0


def _plain(values: Sequence[Any]) -> Sequence[Any]:
    """The same, if all are texts or whole numbers, and of no class of the user's; else none."""
    return (
        values
        if all(type(value) is str or type(value) is int for value in values)
        else ()
    )


def _cuts(field: object) -> dict[str, Any] | list[Any] | tuple[Any, ...] | None:
    """Those of Lhotse's CutSet, where they are in memory: a lazy one would read files."""
    lhotse = sys.modules.get("lhotse.cut.set")
    if type(field) is not getattr(lhotse, "CutSet", None):
        return None
    cuts = stored(field, "cuts")
    is_plain = type(cuts) is dict or type(cuts) is list or type(cuts) is tuple
    return cuts if is_plain else None
