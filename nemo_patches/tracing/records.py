"""The records of a trace: JSON objects, one a line.

The recorder writes them, `diagnose` reads them.

A rank writes a file for each start of its process (docs/trace.md): the header, then records in the
order in which they were made. `t` is in seconds since the header's `started`, by a clock that never
jumps. `e` is the encoder: its class, with " #2" and so on for further ones in the order of their
first calls, the same on all ranks. `n` is the number of its call, from 1.
"""

from __future__ import annotations

import json
import traceback as tracebacks
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

# The outcomes of a length sync.
from nemo_patches.sync.protocol import CAME as CAME
from nemo_patches.sync.protocol import ENDED as ENDED
from nemo_patches.sync.protocol import LOCAL as LOCAL
from nemo_patches.sync.protocol import SERVED as SERVED
from nemo_patches.sync.protocol import TIMEOUT as TIMEOUT
from nemo_patches.sync.protocol import UNWAITED as UNWAITED

# Another number where another `diagnose` would misread a trace: a field goes or changes, a record
# needs a new one, or there is a new kind of record. It is the header's, whose `k` and `format` stay
# as they are in every format.
FORMAT = 2

AT_ITS_SIZE = "it ends at its size"  # the reason of an End
MOST_GROUPS = 512  # of ranks, in one record
LONGEST_MESSAGE, LONGEST_TRACEBACK = 2_000, 8_000  # characters of an exception
_CUT = "\n...\n"


@dataclass(frozen=True)
class Header:
    """The first line of a file."""

    k: ClassVar[str] = "header"
    format: int
    rank: int
    world_size: int
    host: str
    pid: int
    started: float  # seconds since 1970 by the host's clock
    restart: int  # torchrun's restart count
    versions: dict[str, str]  # nemo_patches, nemo, torch, lightning, python
    settings: dict[str, str]
    checks: list[str]
    job: str = ""  # the same for all ranks of a job, on all hosts; empty if not known


@dataclass(frozen=True)
class Enter:
    """A call begins."""

    k: ClassVar[str] = "enter"
    t: float
    e: str
    n: int
    training: bool
    shape: list[int]  # of the signal: batch, features, frames; empty if it is no tensor
    dtype: str
    device: str


@dataclass(frozen=True)
class Sync:
    """A call's length sync has returned."""

    k: ClassVar[str] = "sync"
    t: float
    e: str
    n: int
    outcome: str
    round: int  # the latest that this rank has issued, from 1; rounds pair by order
    waited: float  # seconds
    local: int  # frames before subsampling, as the encoder counts
    result: int


@dataclass(frozen=True)
class Grow:
    """The positional encoding, or another length-sized buffer, has grown after a length sync."""

    k: ClassVar[str] = "grow"
    t: float
    e: str
    n: int
    old: int
    new: int


@dataclass(frozen=True)
class Leave:
    """The call has returned; its kernels on a device may still run."""

    k: ClassVar[str] = "leave"
    t: float
    e: str
    n: int
    # Of the output; empty if torch's checkpointing had recomputed enough.
    shape: list[int]


@dataclass(frozen=True)
class Raised:
    """An exception has ended the call.

    `e` empty, `n` 0: one that nobody has caught, or that came out of Lightning's trainer; then the
    process may go on.
    """

    k: ClassVar[str] = "raised"
    t: float
    e: str
    n: int
    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Stalled:
    """A stall report of this rank: who is missing from a call or, with `e` empty, where all ranks
    are.
    """

    k: ClassVar[str] = "stalled"
    t: float
    e: str
    n: int  # 0 if the length sync has ended
    # That the others wait for, unless they do what is known to end by itself.
    ranks: list[int]
    kinds: list[str]  # of each rank; judging/kinds.py names them
    where: list[str]  # what each one's training thread does; empty if not known
    # What each waits in itself; empty: none.
    collectives: list[str] = field(default_factory=list)
    text: str = ""  # all ranks, in groups; or why it is not known who is missing
    # Some rank waited, in a collective, or for one without a heartbeat.
    waited: bool = False
    # With `e` empty: where the judge knew all ranks to be, as in a stall report's JSON
    # (docs/stalls.md); empty: in more groups than MOST_GROUPS.
    groups: Sequence[Any] = ()


@dataclass(frozen=True)
class End:
    """The interpreter came to its end or, with a `reason`, only the trace did.

    Without this record the process was killed, still runs, or its disk was full.
    """

    k: ClassVar[str] = "end"
    t: float
    reason: str = ""  # revert(), another trace, AT_ITS_SIZE: the process goes on
    error: str = ""  # the exception that ended it, in one line; empty if none is known
    exit_code: int | None = None  # None if not known


Timed = Enter | Sync | Grow | Leave | Raised | Stalled | End
Record = Header | Timed


def raised_by(t: float, e: str, n: int, error: BaseException) -> Raised:
    """A long message keeps both ends: a data loader's worker has its error last."""
    message = str(error)
    if len(message) > LONGEST_MESSAGE:
        half = (LONGEST_MESSAGE - len(_CUT)) // 2
        message = message[:half] + _CUT + message[-half:]
    text = "".join(tracebacks.format_exception(error))[-LONGEST_TRACEBACK:]
    return Raised(t, e, n, type(error).__name__, message, text)


def encode(record: Record) -> bytes:
    """A record as one line."""
    content = {"k": record.k, **vars(record)}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace") + b"\n"
