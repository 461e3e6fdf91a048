"""Clients of the rank's socket: who may have an answer, and how it is sent."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import socket
import struct

from .job_socket import MOST_WAITING

_ROOT = 0  # the user


def visitors(listener: socket.socket) -> list[socket.socket]:
    """Clients that wait for an answer, and are allowed to get one."""
    found = []
    with contextlib.suppress(OSError):  # no more clients, or no more files
        for _ in range(MOST_WAITING):
            visitor, _ = listener.accept()
            visitor.setblocking(False)
            if _user_of(visitor) in (os.getuid(), _ROOT) and not _has_hung_up(visitor):
                found.append(visitor)
            else:
                visitor.close()
    return found


def answer(visitor: socket.socket, data: bytes) -> None:
    """As much as the socket takes, without waiting; and the end."""
    with visitor, contextlib.suppress(OSError):  # the client has disconnected
        visitor.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data))
        visitor.send(data)


def _has_hung_up(visitor: socket.socket) -> bool:
    """As one that only wanted to know whether this rank is there."""
    with contextlib.suppress(BlockingIOError):
        return not visitor.recv(1, socket.MSG_PEEK)
    return False


def _user_of(visitor: socket.socket) -> int:
    _, user, _ = struct.unpack(
        "iII", visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return int(user)
