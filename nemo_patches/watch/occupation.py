"""What a thread is doing, from its stack: what it waits for, or what it does that ends by itself.

A collective is told by the innermost frames only, so that user code which a collective's library
calls back is itself.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from collections.abc import Sequence
from types import CodeType
from typing import NamedTuple

import torch

from ..judging.waits import NamedFrame, activity, collective, hook, of_names
from .kernel_call import KernelCall
from .libraries import PYTHON, origin
from .requests import request

_TORCH = os.path.dirname(torch.__file__).replace(os.sep, "/") + "/"
_NOT_CALLERS = {"torch", "nemo_patches", PYTHON}
_FRAMEWORKS = {"lightning", "pytorch_lightning", "lightning_fabric"}


class KeptFrame(NamedTuple):
    """What is kept of a frame: its own object would keep the function's variables."""

    code: CodeType
    line: int

    @property
    def file(self) -> str:
        return self.code.co_filename.replace(os.sep, "/")

    @property
    def package(self) -> str:
        return origin(self.code.co_filename).package


class Occupation(NamedTuple):
    """collective: what it waits in, empty where that is nothing known.

    activity: what it does that ends by itself: CHECKPOINT, DEBUGGER, COMPILATION, EXPORT or empty.
    caller: where in the user's code, or in NeMo's. hook: as waits.hook() has it.
    request: as requests.py has it.
    """

    collective: str = ""
    activity: str = ""
    caller: str = ""
    hook: str = ""
    request: str = ""


def occupation(frames: Sequence[KeptFrame], kernel: KernelCall) -> Occupation:
    """Of the thread whose stack this is, innermost first."""
    calls = [_call(frame) for frame in frames]
    doing = activity(calls)
    names = frames[0].code.co_names if frames else ()
    waits_in = collective(calls)
    asks = "" if waits_in else request(calls, names, kernel)
    if (
        not waits_in
        and not asks
        and frames
        and frames[0].package != PYTHON
        and kernel.may_wait_for_a_device
    ):
        waits_in = of_names(names)
    return Occupation(
        collective=waits_in,
        activity=doing,
        caller=_caller(frames),
        hook=hook(calls, doing),
        request=asks,
    )


def _call(frame: KeptFrame) -> NamedFrame:
    file = frame.file
    return NamedFrame(
        frame.code.co_name, file, file[len(_TORCH) :] if file.startswith(_TORCH) else ""
    )


def _caller(frames: Sequence[KeptFrame]) -> str:
    """The innermost frame in the user's code or in NeMo's: "file_exists
    (nemo_model_checkpoint.py:540)".
    """
    others = [frame for frame in frames if frame.package not in _NOT_CALLERS]
    best = next(
        (frame for frame in others if frame.package not in _FRAMEWORKS),
        others[0] if others else None,
    )
    if best is None:
        return ""
    return (
        f"{best.code.co_name} ({os.path.basename(best.code.co_filename)}:{best.line})"
    )
