"""What a thread is in, by the names of its frames, so that any dump will do. Needs no torch.

judging/waits.py, which stall reports share, knows what torch's functions wait for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from nemo_patches.facts import LENGTH_SYNC
from nemo_patches.judging import waits
from nemo_patches.judging.kinds import PERHAPS
from nemo_patches.judging.waits import NamedFrame
from nemo_patches.text import safe
from nemo_patches.tools.diagnose import frame_text
from nemo_patches.tools.diagnose.collect.samples import Frame, Thread
from nemo_patches.tools.diagnose.rank_facts import Place
from nemo_patches.tools.diagnose.verdicts import (
    CHILD,
    ENDING,
    LAST_THREADS,
    LOADER,
    LOCK,
)

_NO_FRAME = "the end of its script: no Python frame is left, it waits in C++"
# C++ frames (py-spy --native, pystack --native, gdb); the first that matches, of the innermost.
_NATIVE_WAITS = (
    (r"nccl\w*Abort|ProcessGroupNCCL::abort", "NCCL's abort"),
    (r"ncclCommInit|ncclGetUniqueId|bootstrapInit", "NCCL's construction"),
    (r"TCPStore|PrefixStore|c10d::Store", "the store"),
    (r"gloo::barrier|monitoredBarrier", "barrier"),
    (
        r"c10d::Work(NCCL)?::wait|ProcessGroup\w*::.*wait|gloo::",
        "a collective's wait()",
    ),
    (
        r"cu(da)?(Stream|Event|Device|Ctx)Synchronize|libcuda\.so|cudaMemcpy\b",
        waits.of_method("synchronize"),
    ),
)
_MOST_NATIVE_FRAMES = 25
# JAX's, by the innermost frame: its programs run by themselves, and who reads a result waits for
# the collectives of it; and functions in which all processes meet.
_JAX_READS = re.compile(
    r"(?:^|/)jax/_src/(?:array\.py:(?:_value|__array__|block_until_ready|_copy\w*)|"
    r"api\.py:(?:block_until_ready|device_get)\w*)$"
)
_JAX_MEETS = re.compile(
    r"(?:^|/)jax/experimental/multihost_utils\.py:(?:sync_global_devices|process_allgather|"
    r"broadcast_one_to_all|assert_equal|wait_at_barrier)$"
)
_LOADER_FUNCTIONS = {
    "_try_get_data",
    "_get_data",
    "_next_data",
    "__next__",
    "_MultiProcessingDataLoaderIter",
}
_WORKER_FILES = ("utils/data/_utils/worker.py", "multiprocessing/")
_LOADER_FILES = ("utils/data/", "multiprocessing/queue.py")
# An environment, or code of the user's, may be in a folder of that name.
_TORCH = re.compile(
    r"(?:(?:^|/(?:site|dist)-packages/)torch/|/torch/(?=(?:distributed|nn|autograd|utils|cuda|"
    r"_dynamo|_inductor|onnx|export|jit)/|serialization\.py))(.*)$"
)
_STDLIB_WAITS = re.compile(
    r"threading\.py|selectors\.py|queue\.py|multiprocessing/|concurrent/futures|asyncio/"
)
# Wrappers: the caller of a collective is the first frame outside them.
_PASSES_ON = re.compile(
    r"(lightning|pytorch_lightning|lightning_fabric)/.*(strategies/|utilities/distributed\.py|plugins/|trainer/call\.py)|torchmetrics/|"
    r"lightning_utilities/|(?:^|/)jax/(?:_src|experimental)/|accelerate/|deepspeed/(?:comm|utils)/|wrapt/|functools\.py|contextlib\.py"
)
# Of NeMo's, by their functions.
_CALLERS = {"update_max_seq_length": "the length sync", "sync_gradients": "gradients"}
_OUR_SYNC = re.compile(r"(^|/)sync/length_sync\.py$")
_SERVICE_THREADS = re.compile(
    r"QueueFeederThread|pin_memory|tqdm|MsgRouter|monitor|Thread-monitor|asyncio|pt_|^length sync$"
)
# Code of threads that are no part of the user's program: this package may be a checkout.
_SERVICE_FILES = re.compile(r"(^|/)(tqdm|nemo_patches)/")


def place(
    frames: Sequence[Frame],
    calls: Sequence[str] = (),
    in_futex: bool = False,
    has_gpu: bool = True,
) -> Place:
    """calls: what the innermost line calls, if its source is known. in_futex: according to the
    kernel.
    """
    if not frames:
        return Place(where=_NO_FRAME, collective=ENDING, activity=ENDING)
    python = [frame for frame in frames if not is_native(frame)]
    native = list(takewhile(is_native, frames))
    where, way = _where(python or native), tuple(map(shown, reversed(python)))
    by_name = [_call(frame) for frame in python]
    collective = waits.collective(by_name) or _set_up(by_name) or _of_jax(by_name)
    collective = collective or _our_sync(python)
    in_loader = not collective and _in_loader(python)
    if not collective and not in_loader:
        collective = _of_native(native) or _guess(calls, has_gpu)
    activity = waits.activity(by_name)
    if collective:
        hook = waits.hook(by_name, activity)
        return Place(where, collective, _caller(python), activity, way=way, hook=hook)
    if not activity and in_loader:
        activity = LOADER
    if not activity and any(
        (_function(frame), _base(frame)) == ("_shutdown", "threading.py")
        for frame in python
    ):
        activity = LAST_THREADS
    if not activity and python and _base(python[0]) == "subprocess.py":
        activity = CHILD
    if not activity and _waits_for_lock(python, calls, in_futex):
        activity = LOCK
    return Place(where, activity=activity, way=way)


@functools.lru_cache(maxsize=1 << 14)
def shown(frame: Frame) -> str:
    """ "train (train.py:80)"."""
    return f"{_function(frame)} ({_base(frame)}:{frame.line})"


@functools.lru_cache(maxsize=1 << 14)
def is_native(frame: Frame) -> bool:
    return (
        ".so" in frame.file
        or not frame.file
        or frame.name.startswith("0x")
        or "::" in frame.name
    )


@functools.lru_cache(maxsize=1 << 14)
def is_library(frame: Frame) -> bool:
    return is_native(frame) or frame_text.is_library(frame.file)


def trunk(frames: Sequence[Frame]) -> list[Frame]:
    """The frames without the innermost ones of the standard library, which change while a loop
    polls.
    """
    python = [frame for frame in frames if not is_native(frame)]
    for number, frame in enumerate(python):
        if (
            not is_library(frame)
            or _in_torch(frame)
            or _PASSES_ON.search(frame.file)
            or "/nemo/" in frame.file
        ):
            return python[number:]
    return python


def _function(frame: Frame) -> str:
    return frame.name.rpartition(".")[2]


def _base(frame: Frame) -> str:
    return frame.file.rpartition("/")[2]


@functools.lru_cache(maxsize=1 << 14)
def _in_torch(frame: Frame) -> str:
    found = _TORCH.search(frame.file)
    return found[1] if found else ""


def _call(frame: Frame) -> NamedFrame:
    return NamedFrame(_function(frame), frame.file, _in_torch(frame))


def _where(frames: Sequence[Frame]) -> str:
    """The innermost frame, and the innermost of the user's own."""
    return frame_text.where(
        [(frame.file, str(frame.line), _function(frame)) for frame in frames]
    )


def _set_up(calls: Iterable[NamedFrame]) -> str:
    """The function that makes or destroys a process group, in which all its ranks wait for each
    other.
    """
    for call in calls:
        if not call.in_torch:
            break
        if call.in_torch == waits.C10D and call.function in waits.SET_UP:
            return call.function
    return ""


def _of_jax(calls: Sequence[NamedFrame]) -> str:
    met = (call.function for call in calls if _JAX_MEETS.search(call.at))
    if collective := next(met, ""):
        return collective
    is_read = bool(calls) and _JAX_READS.search(calls[0].at) is not None
    return f"{PERHAPS}the device, in {calls[0].function}()" if is_read else ""


def _our_sync(frames: Sequence[Frame]) -> str:
    """LENGTH_SYNC if it waits in nemo_patches' own length sync, behind frames of the standard
    library.
    """
    inner = next(
        (frame for frame in frames if not _STDLIB_WAITS.search(frame.file)),
        None,
    )
    is_wait = inner is not None and (
        "nemo_patches" in inner.file or _OUR_SYNC.search(inner.file)
    )
    return (
        LENGTH_SYNC
        if is_wait and any(_OUR_SYNC.search(frame.file) for frame in frames[:8])
        else ""
    )


def _of_native(frames: Sequence[Frame]) -> str:
    for frame in frames[:_MOST_NATIVE_FRAMES]:
        for pattern, title in _NATIVE_WAITS:
            if re.search(pattern, frame.name) or re.search(pattern, frame.file):
                return title
    return ""


def _guess(calls: Sequence[str], has_gpu: bool) -> str:
    guesses = (
        waits.of_method(call)
        for call in calls
        if has_gpu or not waits.DEVICE_WAITS.fullmatch(call)
    )
    return next(filter(None, guesses), "")


def _caller(frames: Sequence[Frame]) -> str:
    """The caller of the collective: "the length sync (conformer_encoder.py:794)"."""
    others = [frame for frame in frames if not _in_torch(frame)]
    caller = next(
        (frame for frame in others if not _PASSES_ON.search(frame.file)),
        others[0] if others else None,
    )
    if caller is None:
        return ""
    name = _CALLERS.get(_function(caller), caller.name.replace("<locals>.", ""))
    return f"{name} ({_base(caller)}:{caller.line})"


def _in_loader(frames: Sequence[Frame]) -> bool:
    for frame in frames:
        in_torch = _in_torch(frame)
        if in_torch.startswith(_LOADER_FILES):
            if (
                in_torch.endswith("dataloader.py")
                and _function(frame) in _LOADER_FUNCTIONS
            ):
                return True
        elif not _STDLIB_WAITS.search(frame.file):
            return False
    return False


def _waits_for_lock(
    frames: Sequence[Frame], calls: Sequence[str], in_futex: bool
) -> bool:
    if not frames:
        return False
    function, in_threading = _function(frames[0]), _base(frames[0]) == "threading.py"
    if function in ("acquire", "join", "_wait_for_tstate_lock") or (
        function == "wait" and in_threading
    ):
        return True
    return in_futex and any(
        call in ("with", "join", "acquire") or "lock" in call.lower() for call in calls
    )


def waits_for_work(frames: Sequence[Frame]) -> bool:
    """Whether a data loader's worker is idle. frames: up to its loop."""
    return all(
        _in_torch(frame).startswith(_WORKER_FILES) or _STDLIB_WAITS.search(frame.file)
        for frame in frames
    )


def of_autograd(main: Thread, others: Sequence[Thread]) -> Thread | None:
    """The other thread that runs hooks for a main thread that is in backward, if one does.

    On CUDA, autograd runs the hooks of FSDP, DeepSpeed and recomputation in threads of its own,
    which Python did not start.
    """
    innermost = next((frame for frame in main.frames if not is_native(frame)), None)
    if innermost is None or not _in_torch(innermost).startswith("autograd/"):
        return None
    hooks = [
        one
        for one in others
        if not all(map(is_native, one.frames)) and not any(map(_is_pythons, one.frames))
    ]
    waits_there = (one for one in hooks if place(one.frames).collective)
    return next(waits_there, hooks[0] if hooks else None)


def _is_pythons(frame: Frame) -> bool:
    """Whether Python has started the thread of this frame."""
    return _base(frame) == "threading.py" and _function(frame).startswith("_bootstrap")


def is_users(name: str, frames: Sequence[Frame]) -> bool:
    """Whether a thread stands in the user's code."""
    if _SERVICE_THREADS.match(name):
        return False
    return any(
        not is_library(frame) and not _SERVICE_FILES.search(frame.file)
        for frame in frames
    )


def went_on(before: Thread, now: Thread) -> str:
    for name in sorted(before.counters.keys() & now.counters.keys()):
        if before.counters[name] != now.counters[name]:
            return f"{safe(name, 100)} went from {before.counters[name]} to {now.counters[name]}"
    return "another place" if trunk(before.frames) != trunk(now.frames) else ""
