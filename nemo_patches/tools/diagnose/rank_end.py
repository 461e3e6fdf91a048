"""How a rank's process ended, as its own trace tells:
the evidence that comes after the stall reports.

Exceptions are told apart by their type and their innermost frames, and by words only where nothing
else has them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nemo_patches.text import safe
from nemo_patches.tracing.records import Raised

# A rank that one of these ended was in a collective, or at the store: another rank is the reason.
_WAITED_TYPES = frozenset(
    {
        "DistBackendError",
        "DistError",
        "DistNetworkError",
        "DistStoreError",
        "LengthSyncTimeout",
        "StopTogetherError",
    }
)
_RENDEZVOUS_TYPES = frozenset(
    {"RendezvousClosedError", "RendezvousConnectionError", "RendezvousTimeoutError"}
)
# Gloo found a message's size unlike its own collective's.
MISPAIRED = re.compile(r"\bop\.preamble\.\w{1,20} ")
# Words of torch's C++ alone, also in a RuntimeError; Gloo names the place:
# ".../gloo/transport/tcp/pair.cc:544". Every vendor has a library like NCCL.
_OF_TORCH = re.compile(
    r"gloo/|\bgloo\b|[A-Z]CCL|\bccl::|BKCL|monitoredBarrier|[Aa]pplication timeout|wait timeout"
    r" after|Connection was likely closed|"
    r"Timed out waiting \d+ ?ms|store based barrier|client socket has timed out|waiting"
    r" for clients|\bEI000[26]: |"
    r"the ranks (?:cannot end together any more|are out of step)",  # StopTogetherError
)
# Whatever program says so of the ranks themselves
_FOR_RANKS = re.compile(
    r"(?i)time(?:d[ -])?out.{0,60}\bwait\w* (?:for|on) (?:the |all |other )?(?:\w{1,20} )?"
    r"(?:rank|worker|peer|replica|process)|"
    r"caused by an? \w{1,20} (?:on|in|of) (?:one of the|another|other) (?:rank|worker|process)"
)
# Downloads use these words, too: then it is the rank's own error.
_OF_ANY_CONNECTION = re.compile(
    r"Connection (?:closed|reset) by|Broken pipe|Socket Timeout"
)
_OWN_FAULT = re.compile(
    # Of Ascend: all but HCCL's own (EI) and inner ones
    r"\bE[A-HJ-Z](?!9999)\d{4}: |"
    r"out of memory|device-side assert|illegal memory access|no kernel image|Duplicate"
    r" GPU|ncclInvalid|"
    r"have NCCL built in|NCCL is not available|EADDRINUSE|[Aa]ddress already in"
    r" use|ncclUnhandledCudaError|"
    r"unhandled cuda error|no socket interface found|Error while (?:creating|attaching"
    r" to) shared memory|failed to extend /dev/shm|[Nn]o space left on device|"
    r"enforce fail at (?!.{0,300}op\.preamble)"  # Gloo's, of its own interface or arguments
)
# "[/pytorch/gl": a message of torch that the end of a log cuts off.
_CUT = re.compile(r"\s*(?:\[[^\]]*)?")
_STARTING = re.compile(
    r"waiting for clients|store based barrier|client socket has timed out|while trying"
    r" to connect to"
)
_STARTS = frozenset(
    {"init_process_group", "_store_based_barrier", "_create_c10d_store", "rendezvous"}
)
BY_HAND = frozenset({"KeyboardInterrupt", "SIGTERMException", "SignalException"})
_FRAME = re.compile(
    r'^ {2,8}File "(.{1,1000})", line (\d{1,9}), in (.{1,200})$', re.MULTILINE
)
# After the last frame, which lines of code and of ^ and ~ may follow.
_ERROR = re.compile(r"^(?![ ^~])(.+?)(?:: (.*?))?\s*\Z", re.MULTILINE | re.DOTALL)
# Without torch/distributed/checkpoint, which may read from the network.
_OF_COLLECTIVES = re.compile(
    r"/torch/(?:distributed/(?!checkpoint/|elastic/)|nn/parallel/|autograd/graph\.py$)"
)
STALL_EXIT = 83  # watch/exits.py: every rank ends with it, whichever is the reason
# Innermost frames of an exception: a logger's wrapper is beneath a collective, torch/_ops.py above
_RAISED_WITHIN = 3
# How torch passes on what was raised in another process or thread: "Caught OSError in DataLoader
# worker process 0."
_PASSED_ON = re.compile(
    r"Caught [\w.]{1,100} [^\n]{1,200}\.\nOriginal Traceback \(most recent call"
    r" last\):\n"
)

# File, line and function of each, innermost first.
Frames = tuple[tuple[str, str, str], ...]


class Error(NamedTuple):
    """An exception; of one that a data loader's worker passed on, the worker's own."""

    type: str
    message: str
    frames: Frames = ()  # none where they are not known
    traceback: str = ""

    @property
    def line(self) -> str:
        first = next(iter(self.message.strip().splitlines()), "")
        return safe(f"{self.type}: {first}" if first else self.type)

    @property
    def name(self) -> str:
        """Its type without the module, of Python or C++: torch.distributed.DistBackendError,
        c10::DistBackendError.
        """
        return re.split(r"[.:]", self.type)[-1]

    @property
    def is_of_a_collective(self) -> bool:
        """Whether the rank waited for others, in a collective or at the start.

        A connection's RuntimeError without frames is taken to be torch's.
        """
        if _OWN_FAULT.search(self.message):
            return False
        if self.name in _WAITED_TYPES or self.name in _RENDEZVOUS_TYPES:
            return True
        is_runtime_error = self.name == "RuntimeError"
        if is_runtime_error and _OF_TORCH.search(self.message):
            return True
        if _FOR_RANKS.search(self.message):
            return True
        is_cut = _CUT.fullmatch(self.message) is not None and (
            is_runtime_error or not self.name.endswith("Error")
        )
        was_in_collective = any(
            _OF_COLLECTIVES.search(file) for file, _, _ in self.frames[:_RAISED_WITHIN]
        )
        if is_cut and was_in_collective:
            return True
        if not _OF_ANY_CONNECTION.search(self.message):
            return False
        return was_in_collective if self.frames else is_runtime_error

    @property
    def is_of_the_start(self) -> bool:
        """Whether the rank waited at the start-up: in the rendezvous, at the store, in
        init_process_group.
        """
        if self.name in _RENDEZVOUS_TYPES or _STARTING.search(self.message):
            return True
        return any(
            "/torch/distributed/" in file and function in _STARTS
            for file, _, function in self.frames
        )


def frames_in(traceback: str) -> Frames:
    return tuple(reversed(_FRAME.findall(traceback)))


def error_of(record: Raised) -> Error:
    """The exception that was raised first: for "Caught ... in DataLoader worker process 0" the
    worker's own.
    """
    is_passed_on = _PASSED_ON.match(record.message) is not None
    for text in (record.message, record.traceback) if is_passed_on else ():
        frames = list(_FRAME.finditer(text))
        if frames and (error := _ERROR.search(text, frames[-1].end())):
            kind, message = error.groups("")
            traceback = text[: error.start()] + error[0].partition("\n")[0]
            name = Error(kind.strip(), "").name
            return Error(name, message, frames_in(traceback), traceback)
    return Error(
        record.type, record.message, frames_in(record.traceback), record.traceback
    )


def error_in(line: str) -> Error:
    kind, _, message = line.partition(": ")
    return Error(kind, message)
