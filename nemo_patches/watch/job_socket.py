"""A rank's Unix socket: `nemo-patches diagnose --job` asks there where all ranks are.

Only its owner may.

No torch, no port: who may enter the folder, and has this user's id, is answered.
"""

# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import _socket
import contextlib
import errno
import os
import select
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..channel.own_socket import Socket, host_name
from .job_folder import private_folder

# Of "rank_3.4026531836-9f1c02d7.4711.ask": the rank, its pid namespace, its host, its process.
ENDING = ".ask"
MOST_WAITING = 8
_KEPT_S = 7 * 24 * 3600.0  # a report of a job that is gone


class JobSocket:
    """One thread uses it; `forget` is for a forked child."""

    def __init__(self, rank: int, store_port: int) -> None:
        """store_port: 0 if the job's store has none. Raises OSError."""
        self._folder = private_folder(store_port)
        remove_left(self._folder)
        _remove_old_jobs(self._folder.parent)
        self._name = f"rank_{rank}.{_here()}.{os.getpid()}{ENDING}"
        self.listener = Socket(_socket.AF_UNIX)
        try:
            self.listener.setblocking(False)
            with near(self._folder, self._name) as path:
                self.listener.bind(f"{path}.new")  # nobody finds it before it listens
                os.chmod(f"{path}.new", 0o600)
                self.listener.listen(MOST_WAITING)
                os.rename(f"{path}.new", path)
        except BaseException:
            self.listener.close()
            raise

    def has_visitors(self) -> bool:
        """Whether somebody waits to be let in."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.listener.close()
        with contextlib.suppress(OSError):
            (self._folder / self._name).unlink()

    def forget(self) -> None:
        """In a forked child: the socket belongs to the parent."""
        self.listener.close()


@contextmanager
def near(folder: Path, name: str) -> Iterator[str]:
    """A short path for a file in a folder: a socket's path may have only 107 bytes. Raises
    OSError.
    """
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{name}"
    finally:
        os.close(opened)


def process_of(socket_file: Path) -> int:
    """The process that created it; 0 if its name does not say."""
    number = socket_file.name.removesuffix(ENDING).rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


def is_ours(socket_file: Path) -> bool:
    """Whether its pid means the same process here: not in another container, nor on another
    host.
    """
    return f".{_here()}." in socket_file.name


def remove_left(folder: Path) -> None:
    """Sockets left by processes that were killed. Those of another container, which shares the
    folder, may live; those of another host cannot be tried.
    """
    for file in folder.glob(f"rank_*{ENDING}"):
        is_another_hosts = "-" in file.name and f"-{_host()}." not in file.name
        if is_another_hosts or (
            is_ours(file) and os.path.exists(f"/proc/{process_of(file)}")
        ):
            continue
        with contextlib.suppress(OSError):
            if _is_refused(folder, file.name):
                file.unlink()


def _remove_old_jobs(folders: Path) -> None:
    """What jobs of this user have left there some time ago, if no rank of them runs."""
    for folder in folders.iterdir():
        with contextlib.suppress(OSError):
            written = [each.lstat().st_mtime for each in (folder, *folder.iterdir())]
            if time.time() - max(written) > _KEPT_S:
                remove_left(folder)
                if not any(folder.glob(f"*{ENDING}")):
                    shutil.rmtree(folder)


def _here() -> str:
    """In which a pid means the same process: a pid namespace, on a host; "0-.." where the former
    cannot be told.
    """
    namespace = 0
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{namespace}-{_host()}"


def _host() -> str:
    """Short, whatever the host's name: a socket's path may have only 107 bytes."""
    return f"{zlib.crc32(os.fsencode(host_name())):08x}"


def _is_refused(folder: Path, name: str) -> bool:
    """Whether nobody listens there any more. Raises OSError."""
    with Socket(_socket.AF_UNIX) as own, near(folder, name) as path:
        own.setblocking(False)
        return own.connect_ex(path) == errno.ECONNREFUSED
