"""Notes of any size beside the rounds' messages, on one connection that takes as much as it likes at a time."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest

from nemo_patches.channel.tree import FORMAT, LONGEST_NOTE, Connection

pytestmark = pytest.mark.one_nemo

KEY = b"encoder "


def ends(buffer: int = 4096) -> tuple[Connection, Connection]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    one.connect(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    return Connection(one, 1, format_=FORMAT), Connection(other, 0, format_=FORMAT)


def drain(sender: Connection, receiver: Connection, found: list[Any]) -> None:
    while True:
        sender.flush()
        came = receiver.receive()
        assert came is not None
        found += came
        if not came and not sender.waits:
            return


def close(*connections: Connection) -> None:
    for connection in connections:
        connection.socket.close()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 300_000, LONGEST_NOTE])
def test_notes_come_whole_and_messages_in_their_order_between_them(size: int) -> None:
    sender, receiver = ends()
    note = random.Random(size).randbytes(size)
    found: list[Any] = []
    sender.send(KEY, 1, 10)
    assert sender.send_note(note)
    sender.send(KEY, 2, 20)
    drain(sender, receiver, found)
    assert [one for one in found if isinstance(one, bytes)] == [note]
    assert [one for one in found if not isinstance(one, bytes)] == [(KEY, 1, 10), (KEY, 2, 20)]
    assert sender.send_note(b"and another")
    drain(sender, receiver, found)
    assert found[-1] == b"and another"
    close(sender, receiver)


def test_a_rounds_message_does_not_wait_for_long_notes_and_no_more_of_these_are_kept_than_the_longest() -> None:
    sender, receiver = ends()
    assert sender.send_note(bytes(LONGEST_NOTE)) and sender.waits
    assert sender.send_note(bytes(LONGEST_NOTE))  # part of the first is in the socket
    assert not sender.send_note(b"a third one")
    sender.send(KEY, 7, 70)
    found: list[Any] = []
    drain(sender, receiver, found)
    assert found == [(KEY, 7, 70), bytes(LONGEST_NOTE), bytes(LONGEST_NOTE)]
    close(sender, receiver)


def test_no_note_is_sent_to_a_rank_of_another_format_and_none_that_is_too_long() -> None:
    sender, receiver = ends()
    assert not sender.send_note(bytes(LONGEST_NOTE + 1))
    sender.format = FORMAT + 1
    assert not sender.send_note(b"what it does not know")
    sender.send(KEY, 1, 1)
    found: list[Any] = []
    drain(sender, receiver, found)
    assert found == [(KEY, 1, 1)]
    close(sender, receiver)


@pytest.mark.parametrize("size", [-1, 4097, 1 << 40])
def test_a_frame_of_no_such_size_ends_the_connection(size: int) -> None:
    sender, receiver = ends()
    sender.send(bytes(8), -4, size)
    assert receiver.receive() is None
    close(sender, receiver)


def test_a_note_without_end_ends_the_connection() -> None:
    sender, receiver = ends(1 << 20)
    came: Any = []
    for _ in range(LONGEST_NOTE // 4096 + 2):
        sender.send(bytes(8), -5, 4096)
        sender.socket.setblocking(True)
        sender.socket.sendall(bytes(4096))
        sender.socket.setblocking(False)
        while came is not None and (came := receiver.receive()):
            pass
    assert came is None
    close(sender, receiver)
