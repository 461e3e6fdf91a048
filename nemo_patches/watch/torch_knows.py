"""What torch knows of this rank at a stall: its latest collectives, and its GPU's memory."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ..channel.daemon import Daemon
from ..text import first_line

LONGEST = 1 << 15  # bytes of JSON: some 70 collectives, and a socket takes it at once
_MOST_ENTRIES = 256
_LIMIT_S = 1.0  # 0.07 for the 2,000 collectives that it keeps by default


class FlightRecording:
    """One reading of the Flight Recorder, in a thread of its own: nobody here knows who has its
    lock.

    content: as torch gives it, with the latest collectives only, and without stacks, which take
    seconds; {"error": ...}: why not. None: not yet, or this torch records nothing for this backend.
    """

    def __init__(self) -> None:
        self.content: dict[str, Any] | None = None
        self._ends_at = time.monotonic() + _LIMIT_S
        self._thread = Daemon("flight recorder", self._read)
        if why := self._thread.begin():
            self.content = {"error": why}

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive() or time.monotonic() >= self._ends_at

    def wait(self) -> dict[str, Any] | None:
        """The content, after at most a second."""
        if self._thread.ident is not None:
            self._thread.join(max(self._ends_at - time.monotonic(), 0.0))
        if self._thread.is_alive():
            return {"error": f"no answer within {_LIMIT_S:g} s"}
        return self.content

    def _read(self) -> None:
        dump = getattr(
            sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None
        )
        if dump is None:  # before torch 2.13, which records Gloo's
            return
        try:
            self.content = _bounded(
                json.loads(dump(includeCollectives=True, onlyActive=False))
            )
        except Exception as error:
            self.content = {"error": first_line(error)}


def _bounded(content: dict[str, Any]) -> dict[str, Any] | None:
    entries = content.get("entries", [])[-_MOST_ENTRIES:]
    if not entries:
        return None
    while entries:
        content["entries"] = entries
        if len(json.dumps(content)) <= LONGEST:
            return content
        entries = entries[(len(entries) + 1) // 2 :]
    return {"error": f"one entry has more than {LONGEST} bytes"}


def has_gpu() -> bool:
    """Whether this process uses one."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def out_of_memory_errors() -> dict[str, int]:
    """How often each GPU's allocator has raised one in this process, as "cuda:0", where it has.

    Where the process lives, its code has caught them. The allocator's lock may be held by a thread
    that waits for its GPU, and this one then waits with Python's lock: read it when all is said.
    """
    if not has_gpu():
        return {}
    cuda: Any = sys.modules["torch.cuda"]
    counts: dict[str, int] = {}
    for device in range(cuda.device_count()):
        if count := cuda.memory_stats(device).get("num_ooms", 0):
            counts[f"cuda:{device}"] = int(count)
    return counts
