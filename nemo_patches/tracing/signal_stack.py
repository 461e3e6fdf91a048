"""Signals that leave a stack in a file; handlers of others stay."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from nemo_patches.channel import process_hooks
from nemo_patches.channel.process_hooks import AtExit


class StackOnSignal:
    """Has a signal write the stack of the thread that it comes to into a file, once `place` has said which.

    A Python handler would take somebody's place, and wait for the training thread to come back from C code.
    faulthandler's runs at once, and then, if it chains, calls the handler that was there, or ends the process as if
    there were none. But at the interpreter's end faulthandler puts back what was there, whatever has come since: where
    that is CPython's own C handler, a signal then crashes, or is lost. So it is taken out before, in every case.
    """

    def __init__(self, number: int, chain: bool) -> None:
        self._number, self._chain = number, chain
        self._descriptor = -1  # our own; what is open under it changes
        self._held: Callable[[], _Descriptor | None] = lambda: None  # what faulthandler holds; None: nothing of ours
        self._function = b""
        self._over = False
        _placed.add(self)

    def place(self, descriptor: int) -> bool:
        """Write into this file from now on. False, for good, where the signal is somebody else's, or this is over."""
        with _changing:
            if self._over or _process_ends.is_set():
                return False
            if self._descriptor >= 0:
                os.dup2(descriptor, self._descriptor, inheritable=False)
            elif self._is_to_be_had(descriptor):
                self._descriptor = os.dup(descriptor)
                held = _Descriptor(self._descriptor)
                self._held = weakref.ref(held)
                faulthandler.register(self._number, file=held, all_threads=False, chain=self._chain)
            else:
                self._over = True
            return not self._over

    def remove(self) -> None:
        """Take it back for good, on any thread: who handled the signal before, or does since, has it as it was."""
        with _changing:
            self._over = True
            if self._held() is not None:
                present = _disposition(self._number)
                try:
                    faulthandler.unregister(self._number)
                finally:
                    if _function(present) != self._function:
                        _set_disposition(self._number, present)
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def _is_to_be_had(self, descriptor: int) -> bool:
        """Whether the signal is free or, where we chain, has a Python handler, and none of the user's faulthandler."""
        self._function = _faulthandlers_function(descriptor)
        if self._chain and callable(signal.getsignal(self._number)):
            return _function(_disposition(self._number)) != self._function
        return is_free(self._number)


class _Descriptor:
    """A file for faulthandler, which holds it until somebody registers or unregisters that signal there."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def flush(self) -> None:
        pass


_placed: weakref.WeakSet[StackOnSignal] = weakref.WeakSet()
_process_ends = threading.Event()
_changing = threading.RLock()  # of the same thread: a signal's handler may end the trace, or fork


def _at_exit() -> None:
    """Also where a trace could not be closed."""
    _process_ends.set()
    for stack in list(_placed):
        stack.remove()


process_hooks.run(AtExit.SIGNALS, _at_exit)
# At any place among the others: they run on the thread that forks, which may take it again.
os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_changing.release)


# Python tells of a signal's handler only where it is Python's. These are the C library's `struct sigaction`, whole.
_MOST_BYTES = 1 << 10
_sigaction = ctypes.CDLL(None, use_errno=True).sigaction


def _disposition(number: int) -> bytes:
    found = ctypes.create_string_buffer(_MOST_BYTES)
    if _sigaction(number, None, found):
        raise OSError(ctypes.get_errno(), "sigaction")
    return found.raw


def _set_disposition(number: int, disposition: bytes) -> None:
    if _sigaction(number, disposition, None):
        raise OSError(ctypes.get_errno(), "sigaction")


def _function(disposition: bytes) -> bytes:
    """The address of the handler, which comes first; the rest are flags and a mask."""
    return disposition[: ctypes.sizeof(ctypes.c_void_p)]


def _faulthandlers_function(descriptor: int) -> bytes:
    """The address of faulthandler's handler, read off a signal that nobody uses. It writes into no file for that."""
    unused = next(number for number in sorted(signal.valid_signals(), reverse=True) if is_free(number))
    faulthandler.register(unused, file=descriptor)
    try:
        return _function(_disposition(unused))
    finally:
        faulthandler.unregister(unused)


def is_free(number: int) -> bool:
    """Whether nobody handles or ignores this signal, in Python or below."""
    if signal.getsignal(number) != signal.SIG_DFL:
        return False
    try:
        status = Path("/proc/self/status").read_text(errors="replace")  # a process's name may be cut within a letter
        masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)$", status, re.MULTILINE)
    except OSError:
        return True
    return not any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
