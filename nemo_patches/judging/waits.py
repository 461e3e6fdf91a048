"""What a thread waits in, or does that ends by itself, by its frames' names.

Needs no torch, so tools use it, too.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..text import named
from .kinds import (
    CHECKPOINT,
    COMPILATION,
    DEBUGGER,
    EXPORT,
    IF_UNEVEN,
    OF_EVALUATION,
    OF_TRAINING,
    PERHAPS,
)

# What a caller waits in, by torch's file (2.6 to 2.15), and by how the names of its functions
# begin.
C10D = "distributed/distributed_c10d.py"
_WAITS = (
    (
        r"nn/parallel/distributed\.py:(_distributed_broadcast_coalesced|_sync_)",
        "DDP's buffer broadcast",
    ),
    (
        r"nn/parallel/distributed\.py:(__init__|_ddp_init_helper)|"
        r"distributed/utils\.py:(_sync_module_states|_verify_param_shape)",
        "DDP's construction",
    ),
    (
        r"nn/parallel/distributed\.py:_pre_forward",
        "DDP's second step, which makes its buckets anew",
    ),
    (
        r"autograd/graph\.py:_engine_run_backward",
        "backward, which reduces the gradients",
    ),
    (r"distributed/_functional_collectives\.py", "a functional collective"),
    (r"distributed/fsdp/", "FSDP"),
    (r"nn/modules/_functions\.py", "SyncBatchNorm"),
    (r"cuda/.*:synchronize", PERHAPS + "the GPU"),
)
SET_UP = ("init_process_group", "destroy_process_group")
_NO_COLLECTIVES = {
    "wrapper",
    "_wrapper",
    *SET_UP,
}  # new_group is one: all ranks make a group together
DEVICE_WAITS = {
    *("item", "tolist", "cpu", "numpy", "synchronize", "to", "cuda", "copy_", "equal"),
    *("nonzero", "masked_select", "unique", "repeat_interleave"),
}
_WORK_WAIT, _MOST_NAMES = "wait", 3
_CHECKPOINT_FUNCTIONS = {
    "save_checkpoint",
    "_save_checkpoint",
    "save_to",
    "_save_to_state",
}
_CHECKPOINT_FILES = ("serialization.py", "distributed/checkpoint/")
# By torch's file, and by how the names of its functions begin. A function that has been compiled
# runs without them.
_ACTIVITIES = (
    (
        r"_dynamo/convert_frame\.py|"
        r"_inductor/compile_fx\.py:(_?compile_fx|fx_codegen|fw_compiler|bw_compiler)|"
        r"_inductor/runtime/triton_heuristics\.py:"
        r"(precompile|autotune|benchmark|coordinate)",
        COMPILATION,
    ),
    (
        r"(onnx|export)/.*:(_?export|draft_export)|jit/_trace\.py:_?trace|"
        r"jit/_script\.py:_?script|jit/_freeze\.py:(freeze|optimize_for_inference)",
        EXPORT,
    ),
)
# NeMo 3.0's loader under tensor or context parallelism: only the first rank of a group reads.
_BROADCASTING = (
    "/lhotse/broadcasting.py",
    "a batch from another rank's BroadcastingDataLoader",
)
_NEMO_EXPORT = ("/nemo/core/classes/exportable.py", ("export", "_export"))
_DEBUGGER_FILES = (
    "/pdb.py",
    "/bdb.py",
    "/debugpy/",
    "/pydevd",
    "/IPython/core/debugger",
)
# Words of where ranks wait: in an evaluation, at the end of a loop, in a training step.
_EVALUATES = re.compile(
    r"(?<!in)valid|evaluat|\beval_|_eval\b|\bval_|sanity_check|test_step"
)
_ENDS = re.compile(r"(?:train(?:ing)?|fit|epoch)_end\b|the end of its script")
_TRAINS = re.compile(r"backward|gradients|train(?:ing)?_(?:step|batch)|optimizer_step")


class NamedFrame(NamedTuple):
    """A frame by its names, with "/" in them. in_torch: its path within torch/, empty where it is
    not torch's.
    """

    function: str
    file: str
    in_torch: str = ""


def collective(calls: Iterable[NamedFrame]) -> str:
    """What a thread waits in, by its frames, innermost first; empty if unknown."""
    outermost_name = ""  # of c10d's functions: all_gather_object calls all_gather
    for call in calls:
        if outermost_name and call.file.endswith(_BROADCASTING[0]):
            return _BROADCASTING[1]
        if not call.in_torch or (not outermost_name and _title(call, _ACTIVITIES)):
            break  # a compilation within backward waits for no rank
        name = call.function
        if call.in_torch == C10D:
            outermost_name = (
                name
                if not name.startswith("_") and name not in _NO_COLLECTIVES
                else outermost_name
            )
        elif not outermost_name and (title := _title(call, _WAITS)):
            return title
    return outermost_name


def of_method(method: str) -> str:
    """What a call of C or C++ waits for: a guess by its name, since it has no frame."""
    if method == _WORK_WAIT:
        return PERHAPS + "a collective's wait()"
    return PERHAPS + f"the GPU, in {method}()" if method in DEVICE_WAITS else ""


def of_names(names: Sequence[str]) -> str:
    """The same, where only the names are known that the calling function has, of which one is the
    method's.
    """
    if _WORK_WAIT in names:
        return of_method(_WORK_WAIT)
    methods = [f"{name}()" for name in names if name in DEVICE_WAITS]
    return (
        PERHAPS + f"the GPU, in {' or '.join(methods[:_MOST_NAMES])}" if methods else ""
    )


def activity(calls: Sequence[NamedFrame]) -> str:
    """CHECKPOINT, DEBUGGER, COMPILATION, EXPORT or empty."""
    if any(part in call.file for call in calls for part in _DEBUGGER_FILES):
        return DEBUGGER
    saves = (
        call.function in _CHECKPOINT_FUNCTIONS
        or (
            call.function.startswith("save")
            and call.in_torch.startswith(_CHECKPOINT_FILES)
        )
        for call in calls
    )
    if any(saves):
        return CHECKPOINT
    path, functions = _NEMO_EXPORT
    exports = any(
        call.file.endswith(path) and call.function.startswith(functions)
        for call in calls
    )
    by_torch = (_title(call, _ACTIVITIES) for call in calls if call.in_torch)
    return EXPORT if exports else next(filter(None, by_torch), "")


def _title(call: NamedFrame, table: Iterable[tuple[str, str]]) -> str:
    """What a table of torch's files and functions says of a call; empty if it is not in it."""
    at = f"{call.in_torch}:{call.function}"
    return next((title for words, title in table if re.match(words, at)), "")


def remedy(places: Iterable[tuple[Iterable[int], str]]) -> str:
    """What to switch on where all ranks wait, in unlike collectives. places: ranks, and where they
    wait, in words.

    A rank in an evaluation, or at the end of its loop, beside one in a training step ran out of
    batches.
    """
    past, training, other = list[int](), False, False
    ends_evaluation, evaluates = False, False
    for ranks, place in places:
        is_end = _ENDS.search(place) is not None
        if _EVALUATES.search(place):
            past += ranks
            ends_evaluation |= is_end or "compute" in place
            evaluates |= not is_end
        elif is_end:
            past += ranks
        elif _TRAINS.search(place):
            training = True
        else:
            other = True
    if past and training:
        return f"most likely {named(past)} ran out of training batches: {OF_TRAINING}"
    if evaluates and ends_evaluation and not other:
        return f"most likely {OF_EVALUATION}"
    return IF_UNEVEN
