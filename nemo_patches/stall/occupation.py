"""What a thread is doing, from its stack: a collective that it waits in, or something that ends by itself.

A collective is told by the innermost frames only, so that user code which a collective's library calls back is itself.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import dis
import os
from collections.abc import Sequence
from itertools import pairwise
from types import CodeType
from typing import NamedTuple

import torch

from .rank_kinds import CHECKPOINT
from .waits import Call, activity, collective, of_method

_TORCH = os.path.dirname(torch.__file__).replace(os.sep, "/") + "/"
SAVING = "saving a checkpoint"
# Functions of Lightning's (2.0 to 2.6) that call hooks of the user's and of NeMo's.
_HOOK_CALLS = {"_call_lightning_module_hook", "_call_callback_hooks", "_call_strategy_hook"}
_HOOK_CALLS |= {"_call_lightning_datamodule_hook", "_call_callbacks_on_save_checkpoint"}
_LIGHTNING = ("/lightning/pytorch/", "/pytorch_lightning/")


class Frame(NamedTuple):
    """One frame of a stack. last_instruction: as of types.FrameType's f_lasti."""

    code: CodeType
    last_instruction: int

    @property
    def file(self) -> str:
        return self.code.co_filename.replace(os.sep, "/")


class Occupation(NamedTuple):
    """collective: what it waits in, empty where that is nothing known.

    activity: what it does that ends by itself: CHECKPOINT, DEBUGGER, COMPILATION, EXPORT or empty. caller: where in the
    user's code, or in NeMo's. hook: of Lightning's, or SAVING.
    """

    collective: str = ""
    activity: str = ""
    caller: str = ""
    hook: str = ""


def occupation(frames: Sequence[Frame]) -> Occupation:
    """Of the thread whose stack this is, innermost first; but for the caller."""
    calls = [_call(frame) for frame in frames]
    doing = activity(calls)
    waits_in = collective(calls) or (of_method(_method_being_called(frames[0])) if frames else "")
    return Occupation(waits_in, doing, hook=SAVING if doing == CHECKPOINT else _hook(frames))


def _call(frame: Frame) -> Call:
    file = frame.file
    return Call(frame.code.co_name, file, file[len(_TORCH) :] if file.startswith(_TORCH) else "")


def _hook(frames: Sequence[Frame]) -> str:
    """The innermost Lightning hook that is running."""
    for frame, caller in pairwise(frames):
        if caller.code.co_name in _HOOK_CALLS and any(part in caller.file for part in _LIGHTNING):
            return frame.code.co_name
    return ""


def _method_being_called(frame: Frame) -> str:
    name = ""
    for instruction in dis.get_instructions(frame.code):
        if instruction.offset > frame.last_instruction:
            break
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            name = str(instruction.argval)
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            name = ""
    return name
