"""What a thread is occupied with, told from its stack: a collective that it waits in, or what ends by itself.

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

from .rank_text import CHECKPOINT, COMPILATION, DEBUGGER, EXPORT, PERHAPS

# What a caller waits in, by torch's file (2.6 to 2.15), and by how the names of its functions begin.
_TORCH = os.path.dirname(torch.__file__).replace(os.sep, "/") + "/"
_C10D = _TORCH + "distributed/distributed_c10d.py"
_WAITS = (
    ("nn/parallel/distributed.py", ("_distributed_broadcast_coalesced", "_sync_"), "DDP's buffer broadcast"),
    ("nn/parallel/distributed.py", ("__init__", "_ddp_init_helper"), "DDP's construction"),
    ("nn/parallel/distributed.py", ("_pre_forward",), "DDP's second step, which makes its buckets anew"),
    ("distributed/utils.py", ("_sync_module_states", "_verify_param_shape"), "DDP's construction"),
    ("autograd/graph.py", ("_engine_run_backward",), "backward, which reduces the gradients"),
    ("distributed/_functional_collectives.py", ("",), "a functional collective"),
    ("distributed/fsdp/", ("",), "FSDP"),
    ("nn/modules/_functions.py", ("",), "SyncBatchNorm"),
    ("cuda/", ("synchronize",), PERHAPS + "the GPU"),
)
_NO_COLLECTIVES = {"wrapper", "_wrapper", "init_process_group", "destroy_process_group", "new_group"}
_DEVICE_WAITS = {
    *("item", "tolist", "cpu", "numpy", "synchronize", "to", "cuda", "copy_", "equal"),
    *("nonzero", "masked_select", "unique", "repeat_interleave"),
}
_WORK_WAIT = "wait"
_CHECKPOINT_FUNCTIONS = {"save_checkpoint", "_save_checkpoint", "save_to", "_save_to_state"}
_CHECKPOINT_FILES = (_TORCH + "serialization.py", _TORCH + "distributed/checkpoint/")
# By torch's file, and by how the names of its functions begin. A function that has been compiled runs without them.
_ACTIVITIES = (
    ("_dynamo/convert_frame.py", ("",), COMPILATION),
    ("_inductor/compile_fx.py", ("compile_fx", "_compile_fx", "fx_codegen", "fw_compiler", "bw_compiler"), COMPILATION),
    ("_inductor/runtime/triton_heuristics.py", ("precompile", "autotune", "benchmark", "coordinate"), COMPILATION),
    ("onnx/", ("export", "_export"), EXPORT),
    ("export/", ("export", "_export", "draft_export"), EXPORT),
    ("jit/_trace.py", ("trace", "_trace"), EXPORT),
    ("jit/_script.py", ("script", "_script"), EXPORT),
    ("jit/_freeze.py", ("freeze", "optimize_for_inference"), EXPORT),
)
_NEMO_EXPORT = ("/nemo/core/classes/exportable.py", ("export", "_export"))
SAVING = "saving a checkpoint"
# Functions of Lightning's (2.0 to 2.6) that call hooks of the user's and of NeMo's.
_HOOK_CALLS = {"_call_lightning_module_hook", "_call_callback_hooks", "_call_strategy_hook"}
_HOOK_CALLS |= {"_call_lightning_datamodule_hook", "_call_callbacks_on_save_checkpoint"}
_LIGHTNING = ("/lightning/pytorch/", "/pytorch_lightning/")
_DEBUGGER_FILES = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/IPython/core/debugger")


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
    activity = _activity(frames)
    return Occupation(_collective(frames), activity, hook=SAVING if activity == CHECKPOINT else _hook(frames))


def _hook(frames: Sequence[Frame]) -> str:
    """The innermost of Lightning's hooks that is being run."""
    for frame, caller in pairwise(frames):
        if caller.code.co_name in _HOOK_CALLS and any(part in caller.file for part in _LIGHTNING):
            return frame.code.co_name
    return ""


def _collective(frames: Sequence[Frame]) -> str:
    outermost_name = ""  # of c10d's functions: all_gather_object calls all_gather
    for frame in frames:
        if not frame.file.startswith(_TORCH) or (not outermost_name and _torch_activity(frame)):
            break  # a compilation within backward waits for nobody
        name = frame.code.co_name
        if frame.file == _C10D:
            outermost_name = name if not name.startswith("_") and name not in _NO_COLLECTIVES else outermost_name
        elif not outermost_name:
            for path, functions, title in _WAITS:
                if frame.file.startswith(_TORCH + path) and name.startswith(functions):
                    return title
    return outermost_name or _called(frames)


def _called(frames: Sequence[Frame]) -> str:
    """What the innermost frame's call waits for: a guess by the method's name, since C functions have no frame."""
    method = _method_being_called(frames[0]) if frames else ""
    if method == _WORK_WAIT:
        return PERHAPS + "a collective's wait()"
    return PERHAPS + f"the GPU, in {method}()" if method in _DEVICE_WAITS else ""


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


def _activity(frames: Sequence[Frame]) -> str:
    if any(part in frame.file for frame in frames for part in _DEBUGGER_FILES):
        return DEBUGGER
    saves = (
        frame.code.co_name in _CHECKPOINT_FUNCTIONS
        or (frame.code.co_name.startswith("save") and any(part in frame.file for part in _CHECKPOINT_FILES))
        for frame in frames
    )
    if any(saves):
        return CHECKPOINT
    path, functions = _NEMO_EXPORT
    exports = any(frame.file.endswith(path) and frame.code.co_name.startswith(functions) for frame in frames)
    return EXPORT if exports else next(filter(None, map(_torch_activity, frames)), "")


def _torch_activity(frame: Frame) -> str:
    if frame.file.startswith(_TORCH):
        for path, functions, activity in _ACTIVITIES:
            if frame.file.startswith(path, len(_TORCH)) and frame.code.co_name.startswith(functions):
                return activity
    return ""
