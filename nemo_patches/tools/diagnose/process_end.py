"""How a rank's process ended, as its own trace or dump tells: the evidence that comes after the stall reports."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nemo_patches.channel.safe_text import safe
from nemo_patches.tools.diagnose.rank_trace import RankTrace

# A rank that one of these ended was in a collective, or in the store: another rank is the reason.
_WAITED_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "LengthSyncTimeout"})
_WAITED = re.compile(
    r"gloo|NCCL|Timed out waiting \d+ ?ms|Connection (?:closed|reset) by|Connection was likely closed|Broken pipe|"
    r"[Aa]pplication timeout|monitoredBarrier|wait timeout after|Socket Timeout|"
    r"the ranks (?:cannot end together any more|are out of step)",  # StopTogetherError
)
_TIMED_OUT = re.compile(r"[Tt]imed? ?out|did not come", re.IGNORECASE)
_OWN_FAULT = re.compile(r"out of memory|device-side assert|illegal memory access|no kernel image")
BY_HAND = frozenset({"KeyboardInterrupt", "SIGTERMException", "SignalException"})
_ENDED_WITH_IT = re.compile(r"DataLoader worker .{0,80}killed by signal: Terminated")  # by the SIGTERM to all
_FRAME = re.compile(r'  File "(.{1,1000})", line (\d{1,9}) in (.{1,200})')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|^<")
_COLLECTIVE = re.compile(r"/torch/distributed/distributed_c10d\.py$|/torch/nn/parallel/distributed\.py$")
_BACKWARD = frozenset({"_engine_run_backward"})
_STALL_EXIT = 83  # stall/job_stall.py: every rank ends so, whoever is the reason
_INNERMOST = 12  # frames of a stack in which a collective is looked for
_OWN_FRAMES = 3


@dataclass(frozen=True)
class ProcessEnd:
    """What is known of one rank's end; all empty where its trace has none."""

    ordinary: bool = False  # its interpreter came to its end, and no exception is known; or its trace was stopped
    error: str = ""  # the exception that ended it, in one line
    waited: bool = False  # that is one of a collective, which another rank did not come to, or left
    timed_out: bool = False  # likewise, which had lasted too long
    terminated: bool = False  # by SIGTERM, or Ctrl-C: somebody else ended it
    where: str = ""  # where SIGTERM found it
    in_collective: bool = False  # likewise
    in_good_order: bool = False  # its interpreter came to its end, and no exception or exit code speaks against it

    @property
    def own_error(self) -> str:
        """The exception, where nobody else is the reason for it."""
        return "" if self.waited or self.terminated else self.error

    @property
    def unknown(self) -> bool:
        """Whether it was killed, crashed, or still runs."""
        return not (self.ordinary or self.error or self.terminated)


def process_end(trace: RankTrace) -> ProcessEnd:
    """How this rank's process ended."""
    if trace.sigterm_stack is not None:
        frames = [match.groups() for match in map(_FRAME.fullmatch, trace.sigterm_stack) if match]
        return ProcessEnd(terminated=True, where=_place(frames), in_collective=_in_collective(frames))
    error = trace.dumped.error if trace.dumped is not None else trace.end.error if trace.end is not None else ""
    if trace.end is not None and trace.end.exit_code == _STALL_EXIT:
        return ProcessEnd(error="stall_exit", terminated=True)
    if not error:
        in_good_order = trace.end is not None and not trace.end.exit_code
        return ProcessEnd(ordinary=trace.is_over, in_good_order=in_good_order)
    kind = error.partition(":")[0]
    if kind in BY_HAND or _ENDED_WITH_IT.search(error):
        return ProcessEnd(error=safe(error), terminated=True)
    waited = is_of_a_collective(kind, error)
    return ProcessEnd(error=safe(error), waited=waited, timed_out=waited and _TIMED_OUT.search(error) is not None)


def is_of_a_collective(kind: str, message: str) -> bool:
    """Whether an exception is that of a rank which waited for others."""
    if _OWN_FAULT.search(message):
        return False
    return kind.rpartition(".")[2] in _WAITED_TYPES or _WAITED.search(message) is not None


def _place(frames: list[tuple[str, ...]]) -> str:
    """The user's own code, innermost first; that of libraries where there is no other."""
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])] or frames
    texts = [f"{function} ({'/'.join(file.split('/')[-2:])}:{line})" for file, line, function in own[:_OWN_FRAMES]]
    return safe(" < ".join(texts))


def _in_collective(frames: list[tuple[str, ...]]) -> bool:
    innermost = frames[:_INNERMOST]
    return any(_COLLECTIVE.search(file) or function in _BACKWARD for file, _, function in innermost)
