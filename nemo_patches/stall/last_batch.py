"""The current or last batch of a training thread: its index and its samples' ids, from the thread's variables.

Looked for only once the thread is long away from the encoder: a look keeps what the variables hold until the function
returns. Tensors on a device are not read: that would wait for it.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from ..text import safe

_INDICES = ("batch_idx", "batch_nb")  # as Lightning's and NeMo's steps and loops call it
_BATCH = "batch"
_LOOP = ("/loops/training_epoch_loop.py", "advance")  # Lightning's: waits for the next batch, and knows the last one
_ID_FIELDS = ("cuts", "sample_ids", "sample_id", "ids", "id")
_SAMPLE_IDS = 4  # in NeMo's tuples of signals, their lengths, transcripts and their lengths, the ids come last
_SHOWN, _LONGEST = 4, 60  # ids, and characters of one


def last_batch(frames: Iterable[FrameType]) -> str:
    """For the thread with these frames, innermost first: "1041: cuts a, b, +30"; empty if none of them says."""
    for frame in frames:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # else a script
        names = code.co_varnames if is_function else code.co_names
        if any(name in names for name in _INDICES):
            variables = frame.f_locals
            found = (variables.get(name) for name in _INDICES)  # the function is running: a variable may soon be gone
            index = next((index for index in found if index is not None), None)
            if index is None and code.co_filename.endswith(_LOOP[0]) and code.co_name == _LOOP[1]:
                index = getattr(variables.get("self"), "batch_idx", None)
            if type(index) is int and index >= 0:
                return f"{index}{_ids_text(variables.get(_BATCH))}"
    return ""


def _ids_text(batch: Any) -> str:
    try:
        word, ids = _ids(batch)
    except Exception:  # a class of the user's: without it, the index is still known
        return ""
    shown = ", ".join(safe(str(one), _LONGEST) for one in ids[:_SHOWN])
    more = f", +{len(ids) - _SHOWN}" if len(ids) > _SHOWN else ""
    return f": {word} {shown}{more}" if shown else ""


def _ids(batch: Any) -> tuple[str, Sequence[str | int]]:
    """What the ids are of, and the ids."""
    fields: list[Any]
    if isinstance(batch, dict):
        fields = [batch.get(name) for name in _ID_FIELDS]
    elif isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        fields = [*(field for field in batch if _is_cuts(field)), *batch[_SAMPLE_IDS : _SAMPLE_IDS + 1]]
    else:
        fields = [getattr(batch, name, None) for name in _ID_FIELDS]
    for field in fields:
        if _is_cuts(field):
            return "cuts", list(field.ids)
        if isinstance(field, torch.Tensor):
            if field.device.type == "cpu" and field.dim() == 1 and not field.is_floating_point():
                return "samples", field.tolist()
        elif isinstance(field, tuple | list) and all(isinstance(one, str | int) for one in field):
            return "samples", field
    return "", ()


def _is_cuts(field: Any) -> bool:
    """Lhotse's CutSet, in memory: a lazy one would read files."""
    return type(field).__module__.partition(".")[0] == "lhotse" and getattr(field, "is_lazy", True) is False
