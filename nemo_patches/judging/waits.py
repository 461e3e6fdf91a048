"""What a thread waits in, or does that ends by itself, by its frames' names.

Needs no torch, so tools use it, too.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
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
# new_group is one: all ranks make a group together
_NO_COLLECTIVES = {"wrapper", *SET_UP}
DEVICE_WAITS = re.compile(
    "item|tolist|cpu|numpy|synchronize|to|cuda|copy_|equal|nonzero|masked_select|unique|"
    "repeat_interleave"
)
_WORK_WAIT, _MOST_NAMES = "wait", 3
# By torch's file, or another, and the function; the first that any frame matches. A function that
# has been compiled runs without torch's.
_ACTIVITIES = (
    (r"/(?:pdb|bdb)\.py|/debugpy/|/pydevd|/IPython/core/debugger", DEBUGGER),
    (
        r":(?:_?save_checkpoint|save_to|_save_to_state)$|"
        r"^torch/(?:serialization\.py|distributed/checkpoint/.*):save",
        CHECKPOINT,
    ),
    (r"/nemo/core/classes/exportable\.py:_?export", EXPORT),
    (
        r"^torch/(?:_dynamo/convert_frame\.py|"
        r"_inductor/compile_fx\.py:(_?compile_fx|fx_codegen|fw_compiler|bw_compiler)|"
        r"_inductor/runtime/triton_heuristics\.py:"
        r"(precompile|autotune|benchmark|coordinate))",
        COMPILATION,
    ),
    (
        r"^torch/(?:(onnx|export)/.*:(_?export|draft_export)|jit/_trace\.py:_?trace|"
        r"jit/_script\.py:_?script|jit/_freeze\.py:(freeze|optimize_for_inference))",
        EXPORT,
    ),
)
# NeMo 3.0's loader under tensor or context parallelism: only the first rank of a group reads.
_BROADCASTING = "/lhotse/broadcasting.py"
_ANOTHERS_BATCH = "a batch from another rank's BroadcastingDataLoader"
SAVING = "saving a checkpoint"
_REQUEUES = "_slurm_sigusr_handler_fn"  # Lightning's
REQUEUING = "in a handler of SIGUSR1 (Lightning's requeue)"
# Lightning's functions (2.0 to 2.6) that call hooks of the user's and of NeMo's, and its loops.
_LIGHTNING = re.compile(
    r"(?:^|/)(?:lightning/pytorch|pytorch_lightning)/.*(?:"
    r"_call_(?:callback|lightning|strategy)\w*>(\w+)|/(\w+_loop\.py:\w+)>|:_run>(_teardown))"
)
_TRAINING_HAS_ENDED = re.compile("on_train_end|fit_loop.py:on_run_end|^_?teardown")
# What ranks are at, by words of where they wait; the first that is found.
EVALUATION, ITS_END, END, TRAINING = "evaluation", "its end", "end", "training"
_STAGES = {
    ITS_END: r"(?<!in)(?:valid|evaluat).*(?:(?<!batch)_end\b|compute)",
    EVALUATION: r"(?<!in)valid|evaluat|\beval_|_eval\b|\bval_|sanity_check|test_step",
    END: r"(?:train(?:ing)?|fit|epoch|fit_loop.*)_end\b|(?<!:)teardown|the end of its script",
    TRAINING: r"backward|gradients|train(?:ing)?_(?:step|batch|epoch_loop)|optimizer_step",
}


class NamedFrame(NamedTuple):
    """A frame by its names, with "/" in them. in_torch: its path within torch/, empty where it is
    not torch's.
    """

    function: str
    file: str
    in_torch: str = ""

    @property
    def at(self) -> str:
        file = f"torch/{self.in_torch}" if self.in_torch else self.file
        return f"{file}:{self.function}"


def collective(calls: Iterable[NamedFrame]) -> str:
    """What a thread waits in, by its frames, innermost first; empty if unknown."""
    outermost_name = ""  # of c10d's functions: all_gather_object calls all_gather
    for call in calls:
        if outermost_name and call.file.endswith(_BROADCASTING):
            return _ANOTHERS_BATCH
        if not call.in_torch or (not outermost_name and _title(call.at, _ACTIVITIES)):
            break  # a compilation within backward waits for no rank
        name = call.function
        if call.in_torch == C10D:
            if not name.startswith("_") and name not in _NO_COLLECTIVES:
                outermost_name = name
        elif not outermost_name and (title := _title(call.at, _WAITS)):
            return title
    return outermost_name


def of_method(method: str) -> str:
    """What a call of C or C++ waits for: a guess by its name, since it has no frame."""
    if method == _WORK_WAIT:
        return PERHAPS + "a collective's wait()"
    return PERHAPS + f"the GPU, in {method}()" if DEVICE_WAITS.fullmatch(method) else ""


def of_names(names: Sequence[str]) -> str:
    """The same, where only the names are known that the calling function has, of which one is the
    method's.
    """
    if _WORK_WAIT in names:
        return of_method(_WORK_WAIT)
    methods = [f"{name}()" for name in names if DEVICE_WAITS.fullmatch(name)]
    return (
        PERHAPS + f"the GPU, in {' or '.join(methods[:_MOST_NAMES])}" if methods else ""
    )


def activity(calls: Sequence[NamedFrame]) -> str:
    """CHECKPOINT, DEBUGGER, COMPILATION, EXPORT or empty."""
    return _title("\n".join(call.at for call in calls), _ACTIVITIES)


def _title(at: str, table: Iterable[tuple[str, str]]) -> str:
    """What a table says of frames, by their files and functions; empty if none is in it."""
    return next((title for words, title in table if re.search(words, at, re.M)), "")


def hook(calls: Sequence[NamedFrame], doing: str) -> str:
    """ "validation_step", "saving a checkpoint during on_train_end": Lightning's innermost hook or
    loop that tells what the rank is at. doing: as activity() has it.
    """
    if any(call.function == _REQUEUES for call in calls):
        return REQUEUING
    found = (
        _LIGHTNING.search(f"{caller.at}>{call.function}")
        for call, caller in pairwise(calls)
    )
    names = [one[one.lastindex or 0] for one in found if one]
    ended = list(filter(_TRAINING_HAS_ENDED.search, names))
    if doing == CHECKPOINT:
        return " during ".join([SAVING, *ended[:1]])
    return next(iter([*ended, *filter(stage, names), *names]), "")


def stage(place: str) -> str:
    """What a rank is at, by the name of a hook, a collective or a function."""
    name = place.partition(" (")[0]
    return next((one for one, words in _STAGES.items() if re.search(words, name)), "")


def remedy(places: Iterable[tuple[Iterable[int], Iterable[str], str]]) -> str:
    """What to switch on where all ranks wait, in unlike collectives. places: ranks; the names of
    where they wait, of which the first that tells counts: a hook, a collective, its caller, any may
    be empty; and their batch: "3 of epoch 1 (train)".

    A rank in an evaluation, or at the end of its loop, beside one in a training step ran out of
    batches; beside one in its first batch, it evaluates longer, and that may be where no batch is
    told. Lightning's hook decides before the user's names do.
    """
    ranks_at = defaultdict[str, list[int]](list)
    is_told = True
    for ranks, names, batch in places:
        at = next(filter(None, map(stage, names)), "")
        if at == TRAINING:
            is_told &= " of epoch" in batch
            at = ITS_END if batch.startswith("0 of epoch") else at
        ranks_at[at] += ranks
    ended = ranks_at[ITS_END] + ranks_at[END]
    past = ranks_at[EVALUATION] + ended
    if past and ranks_at[TRAINING]:
        ran_out = f"{named(past)} ran out of training batches: {OF_TRAINING}"
        if not is_told and past != ranks_at[END]:
            return f"if {ran_out}; if it is {OF_EVALUATION}"
        return f"most likely {ran_out}"
    if ranks_at[EVALUATION] and ended and not ranks_at[""]:
        return f"most likely {OF_EVALUATION}"
    return IF_UNEVEN
