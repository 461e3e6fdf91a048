"""Ranks that are asked directly, over real sockets: only who says the token is told, and nobody can make it wait."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_heartbeats import BEAT, anything

from nemo_patches.stall.heartbeat import Heartbeat
from nemo_patches.stall.peers import Listener, ask
from nemo_patches.stall.wire import LONGEST_HEARTBEAT as LONGEST
from nemo_patches.stall.wire import TOKEN_BYTES, Peer, decode_peers, encode_peers
from nemo_patches.stall.wire import encode_heartbeat as encode

pytestmark = pytest.mark.one_nemo
PATIENCE_S = 5.0  # where somebody is silent; who answers has answered by then
LONG_S = 60.0  # where all answer
TOKEN = secrets.token_bytes(TOKEN_BYTES)


def peer_at(port: int) -> Peer:
    return Peer(socket.gethostname(), 4711, "127.0.0.1", port)


def listening() -> Listener:
    """As after the roll call."""
    listener = Listener(("127.0.0.1", 1))
    listener.introduce({}, TOKEN)
    return listener


@contextlib.contextmanager
def answering(listeners: dict[int, Listener]) -> Iterator[None]:
    """Each with its rank's heartbeat, as the stall monitors' threads do."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.01):
            for rank, listener in listeners.items():
                listener.answer(lambda rank=rank: replace(BEAT, rank=rank))  # type: ignore[misc]

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)
        for listener in listeners.values():
            listener.close()


def asked(peers: dict[int, Peer], patience_s: float) -> tuple[dict[int, Heartbeat], float]:
    began = time.monotonic()
    return ask(peers, TOKEN, patience_s, lambda: False), time.monotonic() - began


def test_who_answers_is_found_and_who_is_gone_or_silent_is_not() -> None:
    listeners = {rank: listening() for rank in (0, 2)}
    silent = socket.create_server(("127.0.0.1", 0))  # as of a process that is stopped: the kernel accepts
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    peers = {rank: peer_at(one.port) for rank, one in listeners.items()}
    with silent, answering(listeners):
        found, took = asked({**peers, 1: peer_at(port), 3: peer_at(silent.getsockname()[1])}, PATIENCE_S)
    assert found == {rank: replace(BEAT, rank=rank) for rank in (0, 2)}
    assert took < PATIENCE_S + 10


def test_more_ranks_than_a_process_may_have_connections_all_answer() -> None:
    listeners = {rank: listening() for rank in range(300)}
    with answering(listeners):
        found, _ = asked({rank: peer_at(one.port) for rank, one in listeners.items()}, LONG_S)
    assert sorted(found) == list(range(300))


def test_who_cannot_be_asked_for_want_of_files_is_not_called_silent() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers = dict.fromkeys(range(200), peer_at(server.getsockname()[1]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (server.fileno() + 4, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                ask(peers, TOKEN, PATIENCE_S, lambda: False)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"no heartbeat",
        b"\xff" * 100,
        encode(BEAT)[:-1],
        encode(replace(BEAT, rank=4)),
        encode(BEAT) + b" " * LONGEST,
        b"1" * (1 << 22),
    ],
    ids=["nothing", "text", "bytes", "cut", "of another rank", "too long", "very long"],
)
def test_what_is_no_heartbeat_of_that_rank_is_not_taken(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client, contextlib.suppress(OSError):
                assert client.recv(100) == TOKEN
                client.sendall(sent)

        thread = threading.Thread(target=answer)
        thread.start()
        found, took = asked({BEAT.rank: peer_at(server.getsockname()[1])}, LONG_S)
        thread.join(10)
    assert found == {}
    assert took < LONG_S


def said(listener: Listener, sent: bytes) -> bytes:
    """What the listener says to who sends this, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", listener.port), LONG_S) as client:
        client.sendall(sent)
        told = b""
        with contextlib.suppress(ConnectionResetError):
            while more := client.recv(LONGEST):
                told += more
    return told


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        bytes(16),
        TOKEN[:-1],
        TOKEN[:-1] + bytes([TOKEN[-1] ^ 1]),
        TOKEN.hex().encode(),
    ],
    ids=["http", "a line", "zeros", "cut", "a bit off", "hexadecimal"],
)
def test_who_does_not_know_the_token_is_told_nothing(sent: bytes) -> None:
    listener = listening()
    with answering({3: listener}):
        assert said(listener, sent) == b""
        assert said(listener, TOKEN) == encode(BEAT)


def test_nobody_is_told_before_the_roll_call_is_complete() -> None:
    listener = Listener(("127.0.0.1", 1))
    with answering({3: listener}):
        assert said(listener, TOKEN) == said(listener, bytes(16)) == b""
        listener.introduce({}, TOKEN)
        assert said(listener, TOKEN) == encode(BEAT)


def test_a_flood_of_strangers_holds_up_nobody() -> None:
    listener = listening()
    with contextlib.ExitStack() as clients:
        for number in range(300):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", listener.port), 5))
            if number % 2:
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with answering({3: listener}):
            found, _ = asked({3: peer_at(listener.port)}, LONG_S)
    assert found == {3: BEAT}


def test_silent_visitors_cost_few_files_and_not_for_long() -> None:
    """Also where the kernel holds nobody back."""
    listener = listening()
    listener._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 0)
    with contextlib.ExitStack() as clients:
        visitors = [
            clients.enter_context(socket.create_connection(("127.0.0.1", listener.port), 5)) for _ in range(100)
        ]
        files = len(os.listdir("/proc/self/fd"))
        listener.answer(lambda: BEAT)
        assert len(os.listdir("/proc/self/fd")) - files == len(listener._silent) == 16
        visitors[0].sendall(TOKEN)  # it came first, and is heard at the next look
        listener.answer(lambda: BEAT)
        assert visitors[0].recv(LONGEST) == encode(BEAT)
        assert all(visitor.recv(1) == b"" for visitor in visitors[1:])
        assert len(os.listdir("/proc/self/fd")) == files
    listener.close()


def test_the_port_is_on_the_interface_on_the_way_to_the_store_alone() -> None:
    listener = listening()
    with answering({3: listener}), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.port), 5)


def test_beside_other_hosts_a_loopback_address_becomes_all() -> None:
    """They reach the store's host, which this one is, at another address."""
    listener = Listener(("127.0.0.1", 1))
    listener.introduce({0: peer_at(listener.port), 1: Peer("another", 1, "10.77.0.2", 7)}, TOKEN)
    listener.answer(lambda: BEAT)
    with answering({3: listener}), socket.create_connection(("127.0.0.2", listener.port), LONG_S) as client:
        client.sendall(TOKEN)
        assert client.recv(LONGEST) == encode(BEAT)


def test_a_question_that_is_not_wanted_any_more_ends_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert ask({1: peer_at(silent.getsockname()[1])}, TOKEN, 60.0, lambda: True) == {}
    assert time.monotonic() - began < 10


def test_a_rank_beside_the_store_is_asked_at_the_stores_address_from_other_hosts() -> None:
    listener = Listener((socket.gethostbyname("localhost"), 1))
    listener.close()
    beside, elsewhere = Peer("a", 1, "127.0.1.1", 7), Peer("b", 1, "10.77.0.2", 7)
    assert listener.from_here(beside).address == "127.0.0.1"
    assert listener.from_here(elsewhere) == elsewhere
    assert listener.from_here(peer_at(7)) == peer_at(7)
    assert listener.from_here(Peer("c", 1, "", 0)) == Peer("c", 1, "", 0)


def test_peers_are_read_back() -> None:
    peers = {
        0: Peer("node0", 17, "10.0.0.1", 40123),
        1: Peer("node1", 18, "fd00::1", 40124),
        2: Peer("n\x1b", 19, "", 0),
    }
    data = encode_peers(peers, TOKEN).encode()
    assert decode_peers(data, 3) == ({**peers, 2: Peer("n?", 19, "", 0)}, TOKEN)
    assert decode_peers(data, 1) == ({0: peers[0]}, TOKEN)


def test_the_peers_of_a_large_job_are_read_back() -> None:
    peers = {rank: Peer(f"gpu-{rank:05}.cluster.example.com", 123456, "10.128.33.17", 41234) for rank in range(16384)}
    assert decode_peers(encode_peers(peers, TOKEN).encode(), len(peers)) == (peers, TOKEN)


@given(st.binary(max_size=200) | anything.map(lambda content: json.dumps(content).encode()))
def test_what_are_no_peers_are_none(data: bytes) -> None:
    assert decode_peers(data, 4) == ({}, b"")


@pytest.mark.parametrize("token", ["", "00", "x" * 32, 5, None, "00" * (TOKEN_BYTES + 1)])
def test_peers_without_a_token_are_none(token: object) -> None:
    assert decode_peers(json.dumps({"token": token, "peers": {}}).encode(), 4) == ({}, b"")


def test_a_peer_with_a_name_for_an_address_is_none() -> None:
    data = json.dumps({"token": TOKEN.hex(), "peers": {"0": ["node0", 17, "localhost", 4000]}})
    assert decode_peers(data.encode(), 4) == ({}, b"")
