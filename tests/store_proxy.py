"""A proxy between ranks and the job's store, which tests make slow, silent or gone."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


class Proxy:
    """Stands between the ranks and the store's real server. What the file `mode` says: open, slow,
    silent or gone;
    reset: every connection that there is, once, and then open."""

    def __init__(self, server: int, mode: Path) -> None:
        self.server, self._mode = server, mode
        change(mode, "open")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ended = False
        self._counter: Path | None = None
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def count_in(self, file: Path) -> None:
        """From now on a byte in this file for each piece that passes."""
        file.touch()
        self._counter = file

    def close(self) -> None:
        self._ended = True
        for thread in list(self._threads):
            thread.join(30)
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended:
            if self._mode.read_text() == "reset" and not any(
                one.is_alive() for one in self._threads[1:]
            ):
                change(self._mode, "open")
            if (
                self._mode.read_text() != "reset"
                and select.select([self._listener], [], [], 0.05)[0]
            ):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._relay, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.server)) as server:
            other = {client: server, server: client}
            while not self._ended:
                mode = self._mode.read_text()
                if mode == "gone":
                    return
                if mode == "reset":
                    for one in other:
                        one.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                    return
                ready = (
                    select.select(list(other), [], [], 0.02)[0]
                    if mode != "silent"
                    else []
                )
                if mode == "silent":
                    time.sleep(0.02)
                if ready and mode == "slow":
                    time.sleep(0.05)
                for one in ready:
                    data = b""
                    with contextlib.suppress(OSError):
                        data = one.recv(1 << 16)
                    if not data:
                        return
                    if self._counter is not None:
                        with self._counter.open("ab") as counted:
                            counted.write(b"1")
                    with contextlib.suppress(OSError):
                        other[one].sendall(data)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = Proxy(server.port, tmp_path / "mode")
    yield one
    one.close()


def change(file: Path, text: str) -> None:
    """At once: a reader sees the text before, or this one."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").replace(file)
