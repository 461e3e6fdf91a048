"""The log lines: one logger, visible without any set-up, each with rank, world size and host."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import torch

from ..channel import signals
from ..channel.own_socket import host_name
from ..text import safe

logger = logging.getLogger("nemo_patches")
# One: where two threads say their first line at once, neither is printed twice.
_handler = logging.StreamHandler()
_handler.setFormatter(
    logging.Formatter("%(asctime)s nemo_patches %(levelname)s %(message)s")
)
# Characters of a line: the stacks of all threads have some thousands.
_LONGEST = 1 << 16


def enable() -> None:
    """Make the lines visible on stderr, unless the user gave the logger their own handler."""
    # logging.config disables every logger that it does not configure.
    logger.disabled = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    # Of now: the first line may fall into a redirect_stderr(), around an import of NeMo.
    _handler.stream = sys.stderr
    if not logger.handlers:
        logger.addHandler(_handler)
        logger.propagate = False  # else a root handler prints the line a second time


def report(level: int, text: str) -> None:
    """One line, safe to print.

    Never raises into the caller: a full disk or a closed stderr must not stop training.
    """
    try:
        enable()
        with signals.kept_off():  # nobody may read stderr any more
            logger.log(level, "[%s] %s", _who(), safe(text, _LONGEST))
    except Exception as error:
        if raised_by_signal_handler(error):
            raise  # anything else cannot be reported anywhere


@contextlib.contextmanager
def contain(part: str, failed: Callable[[], object] = lambda: None) -> Iterator[None]:
    """An error of ours in this part of us is said, and comes no further. failed: is called then."""
    try:
        yield
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        failed()
        text = "has ended by an error of its own, please report it"
        report(logging.ERROR, f"{part} {text}: {error!r}")


def report_of_rank(text: str, level: int = logging.INFO) -> None:
    """Like report(), but a spawned data loader worker, which imports NeMo too, leaves it to its
    rank.
    """
    if not multiprocessing.current_process().daemon:
        report(level, text)


def raised_by_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the user's raised this while our code ran: then it is not ours to
    swallow.
    """
    codes = {
        _code_of(signal.getsignal(number)) for number in signal.valid_signals()
    } - {None}
    return any(
        frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _code_of(handler: object) -> object:
    """The code that runs when a handler is called: a function, a method, a callable object or a
    partial of these.
    """
    while isinstance(handler, functools.partial):
        handler = handler.func
    # A method passes its function's on.
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)


def is_distributed() -> bool:
    """Whether there is a process group.

    Looked up each time: some NeMo code replaces is_initialized for a while.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """Of this process, as far as they are known: by its process group, else by the launcher's
    variables, else alone.
    """
    rank, size = _rank_and_size()
    return 0 if rank is None else rank, 1 if size is None else size


def _rank_and_size() -> tuple[int | None, int | None]:
    if is_distributed():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank = launchers_number("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    size = launchers_number(
        "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"
    )
    return rank, size


def launchers_number(*variables: str) -> int | None:
    """The number in the first of these variables that has one; None if none has."""
    values = (os.environ.get(variable, "") for variable in variables)
    return next((int(value) for value in values if value.isdecimal()), None)


def _who() -> str:
    rank, size = ("?" if number is None else number for number in _rank_and_size())
    return f"rank {rank}/{size} {safe(host_name())}"
