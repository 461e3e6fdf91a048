"""Dumps: without a trace, the last encoder calls of this process, written when it is time to know them.

That is when a stall is reported, when an exception ends the process, and on SIGUSR2. A thread of its own writes: the
training thread may wait in C code, in a collective. Each dump of a process replaces the one before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from nemo_patches.channel import process_hooks
from nemo_patches.channel.daemon import Daemon
from nemo_patches.channel.process_hooks import InForkedChild
from nemo_patches.stall import stacks
from nemo_patches.stall.job_folder import dump_folder
from nemo_patches.stall.job_stall import JobStalled, StallExits
from nemo_patches.stall.missing_rank import StallReported
from nemo_patches.sync import length_sync
from nemo_patches.sync.events import bus
from nemo_patches.sync.rank_log import report
from nemo_patches.text import first_line
from nemo_patches.tracing.exception_hooks import ExceptionHooks
from nemo_patches.tracing.part_files import file_name
from nemo_patches.tracing.recent_calls import RecentCalls
from nemo_patches.tracing.records import Dumped, encode
from nemo_patches.tracing.settings import TraceSettings
from nemo_patches.tracing.signal_stack import StackOnSignal
from nemo_patches.tracing.trace_header import make_header

_SUBSCRIBER = "the dump of the last encoder calls"
_GATHER_S = 0.05  # a signal's handler writes several times
_SETTLE_S = 1.0  # a call that has timed out leaves its length sync within half a second (on_timeout="raise")
_LOOK_MS = 500  # how soon after the process group the thread ends
_PIPE_BYTES = 1 << 16  # that it holds at most
_EXIT_LIMIT = timedelta(seconds=2)


@dataclass(frozen=True, eq=False)
class _Request:
    """Why a dump is wanted. incident: of an equal one where the dump is, is said once. done: it is written, or not."""

    why: str
    error: BaseException | None = None
    incident: object = field(default_factory=object)
    done: threading.Event = field(default_factory=threading.Event)


class Dumps:
    """Of this process: keeps the recent calls, and writes them when asked."""

    def __init__(self) -> None:
        self.file: Path | None = None  # the last dump
        self._folder: str | None = ""  # as TraceSettings.dump; empty: no dumps
        self._recent = self._new_recent_calls()
        self._hooks: _Hooks | None = None
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._said: object = None  # the latest incident
        self._failed = ""  # why the last dump could not be written

    def start(self, folder: str | None) -> None:
        """Keep the calls from now on. folder: None: one of the job's own; empty: keep none."""
        if folder == "":
            self.stop()
        elif self._folder == "":
            self._recent = self._new_recent_calls()
            bus.subscribe(_SUBSCRIBER, {**self._recent.handlers(), **self._stall_handlers()})
            self._hook()
        self._folder = folder

    def stop(self) -> None:
        """Keep none any more, and take back what start() has put into the process."""
        self._folder = ""
        bus.unsubscribe(_SUBSCRIBER)
        self._unhook()

    def _new_recent_calls(self) -> RecentCalls:
        went_on = _Request("training went on after an exception")
        return RecentCalls(self._group_began, lambda: self._ask(went_on))

    def _stall_handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            StallReported: self.stall_reported,
            JobStalled: self.job_stalled,
            StallExits: lambda event: self.process_ends(None),
        }

    def job_stalled(self, event: JobStalled) -> None:
        """On the stall monitor's thread."""
        self._recent.job_stalled(event)
        if event.level >= logging.WARNING:
            self._ask(_Request("a stall was reported", incident=event.since))

    def stall_reported(self, event: StallReported) -> None:
        """On the thread that reports it, before the line is logged."""
        self._recent.stall_reported(event)
        self._ask(_Request("a stall was reported", incident=(event.encoder, event.call)))

    def process_ends(self, error: BaseException | None) -> None:
        """An exception ends the process or the trainer, or stall_exit (None): wait for the dump, within a limit.

        Where training goes on after the exception, another dump takes its place.
        """
        with contextlib.suppress(Exception):  # it is destroyed at this moment
            length_sync.process.present_group()  # it may have begun just now
        self._recent.look_for_group()
        if self._folder != "" and self._recent.group is not None:
            if error is not None:
                self._recent.note_failed(error)
            request = _Request("stall_exit" if error is None else "an exception ended the process", error)
            self._ask(request)
            request.done.wait(_EXIT_LIMIT.total_seconds())

    def in_forked_child(self) -> None:
        """The calls are the parent's. A child that is a rank itself begins its own; a data loader's worker none."""
        self._unhook()
        self.file, self._requests = None, queue.SimpleQueue()
        self._recent.forget()

    def _group_began(self) -> None:
        """On the thread that has seen it first: from now on there is something to dump."""
        if self._hooks is None:  # a forked child that is a rank
            self._hook()
        if self._hooks is not None:
            self._listens(self._hooks)

    def _listens(self, hooks: _Hooks) -> bool:
        """Whether there is a thread that writes."""
        if why := hooks.listen(self._write_requested, self._is_over):
            self._cannot(why)  # the next time again
        return not why

    def _hook(self) -> None:
        try:
            self._hooks = _Hooks(self.process_ends)
        except OSError as error:  # no files left
            self._cannot(str(error))

    def _unhook(self) -> None:
        hooks, self._hooks = self._hooks, None  # first: a stall may be reported meanwhile, on another thread
        if hooks is not None:
            hooks.remove()

    def _is_over(self) -> bool:
        """Whether the process group was destroyed: no thread of ours shall stay."""
        return self._recent.group is None or self._recent.group.closed

    def _ask(self, request: _Request) -> None:
        self._recent.look_for_group()
        self._requests.put(request)
        hooks = self._hooks
        if hooks is not None and self._listens(hooks):
            hooks.wake()
        else:
            request.done.set()

    # What follows runs in a thread of its own.

    def _write_requested(self) -> None:
        requests = [self._requests.get() for _ in range(self._requests.qsize())]
        for request in requests or [_Request("SIGUSR2")]:
            try:
                self._write(request)
            except OSError as error:
                self._cannot(f"{error.filename or self._folder}: {error.strerror or error}")
            except Exception as error:
                self._cannot(f"an error of its own, please report it: {error!r}")
            request.done.set()

    def _cannot(self, why: str) -> None:
        if why != self._failed:
            self._failed = why
            report(logging.WARNING, f"the last encoder calls cannot be dumped, training goes on: {why}")

    def _write(self, request: _Request) -> None:
        recent = self._recent
        if request.error is None:
            deadline = time.monotonic() + _SETTLE_S
            while recent.in_length_sync and time.monotonic() < deadline:
                time.sleep(0.01)
        group, error, count = recent.group, request.error, recent.count()
        if group is None:
            return
        found = recent.records(error)
        thread = stacks.training_thread(recent.thread, recent.native_thread).ident
        where = "" if error is not None else stacks.where(thread)
        said = first_line(error) if error is not None else ""
        header = make_header(TraceSettings(), length_sync.current(), recent.started)
        header = replace(header, rank=group.rank, world_size=group.size, bound=0)
        lines = [encode(record) for record in (header, *found, Dumped(recent.now(), request.why, where, said))]
        folder = dump_folder(self._folder, group.store.server[1] if group.store.server else 0)
        file = folder / file_name(header, header.started, 0)
        _replace(file, b"".join(lines))
        if self.file is not None and self.file != file:
            self.file.unlink(missing_ok=True)
        self.file, self._failed = file, ""
        if request.incident != self._said:
            self._said = request.incident
            what = f"the last {count} encoder calls of this rank are" if count else "where this rank is, is"
            text = f"{request.why}: {what} in {file}"
            report(logging.INFO, f"{text}; `nemo-patches diagnose {folder}` reads those of all ranks on this host")


class _Hooks:
    """What is put into the process, and a pipe by which each of its parts wakes the thread that writes."""

    def __init__(self, process_ends: Callable[[BaseException], None]) -> None:
        self._reader, self._writer = os.pipe()  # not inherited by other programs
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._thread: threading.Thread | None = None
        self._exceptions = ExceptionHooks(lambda error, _: process_ends(error), threads=False)
        self._stack = StackOnSignal(signal.SIGUSR2, chain=False)
        self._stack.place(self._writer)  # that it writes is all that is needed; this leaves set_wakeup_fd to others

    def listen(self, write_requested: Callable[[], None], is_over: Callable[[], bool]) -> str:
        """Have a thread that is woken by signals and by wake(), until it is over. Why there is none; else empty."""
        if self._thread is None or not self._thread.is_alive():
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, _PIPE_BYTES)  # of a signal when there was nothing to dump
            thread = Daemon("dump", _serve, self._reader, write_requested, is_over)
            if why := thread.begin():
                return why
            self._thread = thread
        return ""

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, and wakes it; or just removed
            os.write(self._writer, b".")

    def remove(self) -> None:
        """Also in a forked child, where there is no thread any more, and the parent's pipe is open."""
        self._exceptions.remove()
        self._stack.remove()
        writer, self._writer = self._writer, -1  # wake() may still come: the descriptor is another file's by then
        os.close(writer)  # which ends the thread
        if self._thread is not None:
            self._thread.join(_EXIT_LIMIT.total_seconds())
        if self._thread is None or not self._thread.is_alive():
            os.close(self._reader)


def _serve(reader: int, write_requested: Callable[[], None], is_over: Callable[[], bool]) -> None:
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while True:
        if poll.poll(_LOOK_MS):
            time.sleep(_GATHER_S)
            if not os.read(reader, _PIPE_BYTES):  # the other end was closed
                return
            write_requested()
        elif is_over():
            return


def _replace(file: Path, content: bytes) -> None:
    """Put all of it there, or nothing; only its owner may read it."""
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


dumps = Dumps()
process_hooks.run(InForkedChild.DUMP, dumps.in_forked_child)
