"""The records of a trace: JSON objects, one a line. The recorder writes them, `diagnose` reads them.

A rank writes a file for each start of its process, in parts (docs/trace.md): the header, then records in the order in
which they were made. `t` is in seconds since the header's `started`, by a clock that never jumps. `e` is the encoder's
number in this file, `n` the number of its call, from 1.
"""

from __future__ import annotations

import json
import traceback as tracebacks
from dataclasses import dataclass, field
from typing import ClassVar

# The outcomes of a length sync.
from nemo_patches.sync.protocol import CAME as CAME
from nemo_patches.sync.protocol import ENDED as ENDED
from nemo_patches.sync.protocol import LOCAL as LOCAL
from nemo_patches.sync.protocol import SERVED as SERVED
from nemo_patches.sync.protocol import TIMEOUT as TIMEOUT
from nemo_patches.sync.protocol import UNWAITED as UNWAITED

# Another number where an older `diagnose` would misread a trace: a field goes or changes, a record needs a new one, or
# there is a new kind of record. It is the header's, whose `k` and `format` stay as they are in every format.
FORMAT = 1

NOT_SET = "NOT SET"
PRE_ENCODE, BYPASS = "pre_encode", "bypass_pre_encode"
LONGEST_MESSAGE, LONGEST_TRACEBACK = 2_000, 8_000  # characters of an exception
_CUT = "\n...\n"


@dataclass(frozen=True)
class Header:
    """The first line of every part."""

    k: ClassVar[str] = "header"
    format: int
    rank: int
    world_size: int
    host: str
    pid: int
    started: float  # seconds since 1970 by the host's clock; the same in every part
    part: int  # from 0
    restart: int  # torchrun's restart count
    bound: int  # bytes; no more is kept of this process start
    versions: dict[str, str]  # nemo_patches, nemo, torch, lightning, python
    settings: dict[str, str]
    checks: list[str]
    job: str = ""  # the same for all ranks of a job, on all hosts; empty if not known
    notes_sigterm: bool = False  # SIGTERM would leave a stack in this file, as text
    gone: int = 0  # records in earlier parts that are not there any more; the exceptions and findings follow as `kept`


@dataclass(frozen=True)
class Encoder:
    """An encoder: at its first call, whenever one of these values has changed, and at the head of every later part."""

    k: ClassVar[str] = "encoder"
    t: float
    e: int
    name: str  # its class, with " #2" and so on for further ones; the same on all ranks
    flag: bool | None  # the effective sync_max_audio_length; None if its class has none
    configured: str  # the value in the model's config: "true", "false", NOT_SET, or "?" if there is no config
    pos_emb_max_len: int | None
    normalisation: str  # of its layers: "batch_norm", "layer_norm", ...; empty if not known
    ddp: bool
    registered: dict[str, list[int]]  # shapes of its length-sized buffers, as registered
    grown: dict[str, list[int]]  # shapes of those that grew for this process only


@dataclass(frozen=True)
class Enter:
    """A call begins."""

    k: ClassVar[str] = "enter"
    t: float
    e: int
    n: int
    training: bool
    grad: bool
    shape: list[int]  # of the signal: batch, features, frames
    dtype: str
    device: str
    in_ddp: float | None = None  # seconds since DDP's forward began, which may wait for other ranks; None if in none
    lengths_shape: list[int] | None = None  # None if the lengths are no tensor
    path: str = ""  # PRE_ENCODE or BYPASS; empty if this class has no pre_encode
    group: bool | None = None  # whether there was a process group
    backwards: int = 0  # of this encoder, begun before this call: so a reader sees whether it has read them all


@dataclass(frozen=True)
class Lengths:
    """The lengths of a call's batch. From a GPU they come when it has got to them, with the time of the call."""

    k: ClassVar[str] = "lengths"
    t: float
    e: int
    n: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class Sync:
    """A call's length sync has returned."""

    k: ClassVar[str] = "sync"
    t: float
    e: int
    n: int
    outcome: str
    round: int  # the latest that this rank has issued, from 1; rounds pair by order
    waited: float  # seconds
    local: int  # frames before subsampling, as the encoder counts
    result: int


@dataclass(frozen=True)
class Grow:
    """The positional encoding, or another length-sized buffer, has grown."""

    k: ClassVar[str] = "grow"
    t: float
    e: int
    n: int
    old: int
    new: int


@dataclass(frozen=True)
class PreEncoded:
    """`pre_encode`, the subsampling, is done."""

    k: ClassVar[str] = "pre"
    t: float
    e: int
    n: int


@dataclass(frozen=True)
class FirstLayer:
    """The first layer is done."""

    k: ClassVar[str] = "layer"
    t: float
    e: int
    n: int


@dataclass(frozen=True)
class Leave:
    """The call has returned; its kernels on a device may still run."""

    k: ClassVar[str] = "leave"
    t: float
    e: int
    n: int
    shape: list[int]  # of the output; empty if torch's checkpointing left the call early, having recomputed enough
    took: float  # seconds
    graph: bool = False  # a backward can follow, and is recorded


@dataclass(frozen=True)
class Backward:
    """A backward has come to the call's output."""

    k: ClassVar[str] = "backward"
    t: float
    e: int
    n: int


@dataclass(frozen=True)
class BackwardEnded:
    """That backward has ended, DDP's wait for the other ranks' gradients included (on NCCL: is enqueued)."""

    k: ClassVar[str] = "backward_ended"
    t: float
    e: int
    n: int


@dataclass(frozen=True)
class Raised:
    """The call has ended by an exception."""

    k: ClassVar[str] = "raised"
    t: float
    e: int
    n: int
    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Missing:
    """A stall report of this rank: who is missing from a call."""

    k: ClassVar[str] = "missing"
    t: float
    name: str  # the encoder's
    n: int  # 0 if the length sync has ended
    ranks: list[int]
    kinds: list[str]  # of each rank; stall/rank_kinds.py names them
    where: list[str]  # what each one's training thread does; empty if not known
    unknown: str  # why it is not known who is missing; empty if it is
    collectives: list[str] = field(default_factory=list)  # what each one waits in itself; empty if in none


@dataclass(frozen=True)
class Stalled:
    """A stall report of this rank: where all ranks are, when it has begun no encoder call for long."""

    k: ClassVar[str] = "stalled"
    t: float
    ranks: list[int]  # that the others wait for, unless they do what is known to end by itself, as a checkpoint
    kinds: list[str]  # as in Missing
    where: list[str]  # likewise
    text: str  # all ranks, in groups
    waited: bool = False  # some rank waited, in a collective, or for one without a heartbeat


@dataclass(frozen=True)
class Memory:
    """A memory sample of every 50th call, and when a stall of the job is reported. Bytes; None if there is no GPU."""

    k: ClassVar[str] = "memory"
    t: float
    rss: int
    allocated: int | None
    reserved: int | None
    used: int | None = None  # on the GPU, by all processes; None without nvidia-ml-py, as the next one
    utilisation: int | None = None  # percent of the time in which a kernel ran on the GPU


@dataclass(frozen=True)
class CheckFinding:
    """A finding of an opt-in check, before or after a call."""

    k: ClassVar[str] = "finding"
    t: float
    e: int
    n: int
    check: str  # inputs, cuda or barrier
    text: str


@dataclass(frozen=True)
class Kept:
    """At the head of a part: an exception or a finding of a part that is gone."""

    k: ClassVar[str] = "kept"
    t: float
    record: str  # as it was written


@dataclass(frozen=True)
class Lost:
    """`count` records were not written, because the disk could not keep up."""

    k: ClassVar[str] = "lost"
    t: float
    count: int


@dataclass(frozen=True)
class Stopped:
    """The trace ends here and the process goes on: revert(), another trace, or an error in the recorder."""

    k: ClassVar[str] = "stopped"
    t: float
    reason: str


@dataclass(frozen=True)
class Failed:
    """An exception that nobody has caught, or that came out of Lightning's trainer: then the process may go on."""

    k: ClassVar[str] = "failed"
    t: float
    thread: str  # only that thread has ended; empty: what trains
    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Sigterm:
    """When SIGTERM came, the first one, by the time of the file that it left a stack in. Written after that stack."""

    k: ClassVar[str] = "sigterm"
    t: float


@dataclass(frozen=True)
class End:
    """The interpreter came to its end. Without this record it was killed, still runs, or the disk was full."""

    k: ClassVar[str] = "end"
    t: float
    error: str = ""  # the exception that ended it, in one line; empty if none is known: Hydra hides them
    exit_code: int | None = None  # None if not known


Record = (
    Header
    | Encoder
    | Enter
    | Lengths
    | Sync
    | Grow
    | PreEncoded
    | FirstLayer
    | Leave
    | Backward
    | BackwardEnded
    | Raised
    | Missing
    | Stalled
    | Memory
    | CheckFinding
    | Kept
    | Lost
    | Stopped
    | Failed
    | Sigterm
    | End
)


def failed(t: float, thread: str, error: BaseException) -> Failed:
    return Failed(t, thread, *_told(error))


def raised(t: float, e: int, n: int, error: BaseException) -> Raised:
    return Raised(t, e, n, *_told(error))


def _told(error: BaseException) -> tuple[str, str, str]:
    """Its type, message and traceback. A long message keeps both ends: a data loader's worker has its error last."""
    message = str(error)
    if len(message) > LONGEST_MESSAGE:
        half = (LONGEST_MESSAGE - len(_CUT)) // 2
        message = message[:half] + _CUT + message[-half:]
    text = "".join(tracebacks.format_exception(error))[-LONGEST_TRACEBACK:]
    return type(error).__name__, message, text


def encode(record: Record) -> bytes:
    """A record as one line."""
    content = {"k": record.k, **vars(record)}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
