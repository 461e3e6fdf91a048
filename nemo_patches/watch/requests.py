"""Whether a thread waits for a person or a request, by its frames' names and by its system call.

Such a wait is the user's own code's, or a server's loop: a data loader's is none, nor one of any
other package's.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from itertools import takewhile

from ..judging.kinds import PERHAPS
from ..judging.waits import NamedFrame
from .kernel_call import KernelCall
from .libraries import PYTHON, origin

STANDARD_INPUT = "input()"
_LOADERS = ("/torch/utils/data/", "/loops/fetchers.py")
_SERVERS = {
    "IPython",
    "gunicorn",
    "hypercorn",
    "ipykernel",
    "prompt_toolkit",
    "tornado",
    "uvicorn",
}
_SERVES = "wait_for_termination"  # of grpc, whose other waits are for answers
# A server, or the user's own code, and the wait.
_BETWEEN = {PYTHON, "anyio", "uvloop", "zmq"}
# By a file of Python's own, and a function in it that the user's code calls. With PERHAPS: it may
# wait for a thread of the user's own that reads data, or for an answer over the network.
_WAITS = {
    ("base_events.py", "run_forever"): "run_forever()",
    ("base_events.py", "run_until_complete"): PERHAPS + "asyncio's loop",
    ("connection.py", "accept"): "accept()",
    ("queue.py", "get"): PERHAPS + "queue.get()",
    ("queues.py", "get"): PERHAPS + "queue.get()",
    ("runners.py", "run"): PERHAPS + "asyncio's loop",
    ("selectors.py", "select"): PERHAPS + "select()",
    ("socket.py", "accept"): "accept()",
    ("socketserver.py", "serve_forever"): "serve_forever()",
}
_SELECTS = {"epoll", "poll", "select"}


def request(
    calls: Sequence[NamedFrame], names: Collection[str], kernel: KernelCall
) -> str:
    """What it waits in, with PERHAPS where that may be a wait of another kind; empty if it waits
    for no request.

    calls: of its frames, innermost first. names: those in the innermost frame's code.
    """
    if any(part in call.file for call in calls for part in _LOADERS):
        return ""
    inside = list(takewhile(lambda call: origin(call.file).package in _BETWEEN, calls))
    callers = calls[len(inside) :]
    owner = origin(callers[0].file).package if callers else ""
    if owner and owner not in _SERVERS and callers[0].function != _SERVES:
        return ""
    if kernel.reads_standard_input:
        return STANDARD_INPUT
    if owner:
        return f"{owner}'s loop" if inside else ""
    if not inside:
        return (
            PERHAPS + "select()"
            if kernel.waits_for_files and _SELECTS.intersection(names)
            else ""
        )
    called = inside[-1]
    return _WAITS.get((os.path.basename(called.file), called.function), "")
