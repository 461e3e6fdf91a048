"""The kernel's sockets: in Python's module a script may have put others' classes in their place."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import _socket
import os
import socket
from types import TracebackType
from typing import Any


class Socket(_socket.socket):
    """A `with` closes it. No `send` of it raises SIGPIPE. A name is resolved for no address that is
    a number.
    """

    def __enter__(self) -> Socket:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def accept(self) -> Socket:
        number, _ = self._accept()  # type: ignore[attr-defined]
        return Socket(fileno=number)

    def send(self, data: Any, flags: int = 0) -> int:
        return super().send(data, flags | _socket.MSG_NOSIGNAL)


def host_name() -> str:
    """This host's."""
    try:
        return socket.gethostname()
    except Exception:  # another's function
        return os.uname().nodename
