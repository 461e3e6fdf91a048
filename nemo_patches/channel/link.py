"""A connection between two ranks: it never blocks, and each end proves that it knows the token."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import _socket
import errno
import hashlib
import hmac
import json
import secrets
import struct
import time
import zlib
from typing import Any, NamedTuple

from .meeting import family_of
from .own_socket import Socket

# Kinds of messages.
WELCOME, REGISTER, RANKS, UP, DOWN, OVER, ASK, HERE, QUESTION, ANSWER, VERDICT = range(
    11
)
STOP = 11
_HEADER = struct.Struct("<BQqqI")
# What this is, from which rank, to which rank, a random number, the proof.
_HELLO = struct.Struct("<8sII16s16s")
_MAGIC = b"nemo-p/1"
_LONGEST_BODY = 4 << 20  # bytes
# A rank that reads nothing gets no more questions; the messages of rounds are few and small.
_MOST_UNSENT = 1 << 20
_KEEPALIVE_S = 5
# The kernel gives up a connection from which nothing has come for so long.
_CUT_OFF_S = 25
# Linux: tcpi_retransmits, tcpi_probes, tcpi_unacked and tcpi_notsent_bytes of struct tcp_info.
_TCP_INFO = struct.Struct("@2xBB20xI116xI")
_SO_MEMINFO = 55  # Linux: first of what has come, and is not read


class Message(NamedTuple):
    """key, number and value: of a round, or as the kind needs them."""

    kind: int
    key: int
    number: int
    value: int
    body: bytes

    def content(self) -> dict[str, Any]:
        """Raises ValueError if it is not JSON of a dict; RANKS is compressed."""
        try:
            content = json.loads(
                zlib.decompress(self.body) if self.kind == RANKS else self.body
            )
        except (RecursionError, zlib.error):
            raise ValueError("nested too deeply, or not compressed") from None
        if not isinstance(content, dict):
            raise ValueError("not a dict")
        return content


class Link:
    """Only the exchange's thread uses it."""

    def __init__(self, own_socket: Socket, rank: int, is_ours: bool) -> None:
        """rank: -1 where it is not known yet. is_ours: whether this rank has opened it."""
        self.socket = own_socket
        self.rank = rank
        self.is_ours = is_ours
        self.is_ready = False  # both ends have proved that they know the token
        # The other end has not answered in time: do not rely on it.
        self.is_suspect = False
        self.has_list = False  # of all ranks: it was sent over this one
        self.opened_at = time.monotonic()
        self.used_at = self.opened_at
        self.error = 0  # why it is lost
        self.is_watched_for_room = False  # the selector waits until more can be sent
        self._nonce = b""
        self._received = bytearray()
        self._unsent = bytearray()
        own_socket.setblocking(False)
        own_socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        own_socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
        own_socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        own_socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        own_socket.setsockopt(
            _socket.IPPROTO_TCP, _socket.TCP_USER_TIMEOUT, 1000 * _CUT_OFF_S
        )

    @classmethod
    def opened(
        cls, address: str, port: int, own_rank: int, rank: int, token: bytes
    ) -> Link:
        """A connection that is being made; what is sent meanwhile follows. Raises OSError."""
        link = cls(Socket(family_of(address), _socket.SOCK_STREAM), rank, is_ours=True)
        link.error = link.socket.connect_ex((address, port))
        if link.error not in (0, errno.EINPROGRESS):
            link.socket.close()
            raise OSError(link.error, "no connection")
        link.error = 0
        link._nonce = secrets.token_bytes(16)
        proof = _proof(token, own_rank, rank, link._nonce)
        link._unsent += _HELLO.pack(_MAGIC, own_rank, rank, link._nonce, proof)
        return link

    @property
    def is_lost(self) -> bool:
        return self.socket.fileno() < 0

    @property
    def is_connected(self) -> bool:
        """Whether the other host has taken the connection, even if no rank has spoken on it."""
        try:
            self.socket.getpeername()
        except OSError:
            return False
        return True

    @property
    def is_cut(self) -> bool:
        """Whether the other host does not acknowledge what it has to.

        The kernel of a living host acknowledges also for a process that is stopped.
        """
        try:
            data = self.socket.getsockopt(
                _socket.IPPROTO_TCP, _socket.TCP_INFO, _TCP_INFO.size
            )
        except OSError:
            return False
        data = data.ljust(_TCP_INFO.size, b"\0")  # an old kernel's is shorter
        retransmits, probes, unacknowledged, not_sent = _TCP_INFO.unpack(data)
        # Where this host's own interface is down, nothing even leaves it.
        is_silent = (retransmits and unacknowledged) or (probes and not_sent)
        return bool(is_silent) and self.is_connected

    @property
    def has_gap(self) -> bool:
        """Whether something has come, and what was sent before it has not: all else is read."""
        try:
            held = self.socket.getsockopt(_socket.SOL_SOCKET, _SO_MEMINFO, 4)
        except OSError:  # an old kernel, or lost
            return False
        return any(held) and not self.has_unread

    @property
    def has_unread(self) -> bool:
        """Whether something has come that this rank has not read yet: it was held up itself."""
        try:
            return bool(self.socket.recv(1, _socket.MSG_PEEK))
        except OSError:  # nothing is there, or lost
            return False

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._unsent)

    def send(
        self,
        kind: int,
        key: int = 0,
        number: int = 0,
        value: int = 0,
        body: bytes = b"",
    ) -> None:
        """A message; what does not fit now is sent when there is room."""
        self._unsent += _HEADER.pack(kind, key, number, value, len(body)) + body
        self.used_at = time.monotonic()
        self.flush()

    def tell(self, kind: int, content: dict[str, Any]) -> None:
        """Send JSON, unless too much waits to be sent."""
        body = json.dumps(content).encode()
        if len(body) > _LONGEST_BODY:
            raise ValueError("too long to be sent")
        if len(self._unsent) < _MOST_UNSENT:
            self.send(kind, body=body)

    def flush(self) -> None:
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:  # full, or not connected yet
            pass
        except OSError as error:  # `receive` says so
            self.error = self.error or error.errno or errno.EIO

    def _read(self, most: int) -> bool:
        """Whether the connection still is there."""
        try:
            data = self.socket.recv(most)
        except BlockingIOError:
            return not self.error
        except OSError as error:
            self.error = self.error or error.errno or errno.EIO
            return False
        self._received += data
        return bool(data)

    def receive(self) -> list[Message] | None:
        """The messages that have come, also of kinds that only a later version has; None if the
        connection is lost, or what comes is none.
        """
        is_there = self._read(1 << 16)
        messages = []
        start = 0
        while len(self._received) - start >= _HEADER.size:
            kind, key, number, value, length = _HEADER.unpack_from(
                self._received, start
            )
            end = start + _HEADER.size + length
            if length > _LONGEST_BODY or (kind > STOP and not self.is_ready):
                return None
            if len(self._received) < end:
                break
            body = bytes(self._received[start + _HEADER.size : end])
            messages.append(Message(kind, key, number, value, body))
            start = end
        del self._received[:start]
        if messages:
            self.used_at = time.monotonic()
            self.is_suspect = False
        return messages if messages or is_there else None

    def welcome(self, own_rank: int, size: int, token: bytes) -> bool:
        """As the end that has accepted: read which rank this is, and answer.

        False: none of this job, or the connection is lost.
        """
        is_there = self._read(_HELLO.size - len(self._received))
        if len(self._received) < _HELLO.size:
            return is_there and _MAGIC.startswith(bytes(self._received[: len(_MAGIC)]))
        magic, rank, to, nonce, proof = _HELLO.unpack(self._received)
        self._received.clear()
        if (
            magic != _MAGIC
            or to != own_rank
            or not 0 <= rank < size
            or rank == own_rank
        ):
            return False
        if not hmac.compare_digest(proof, _proof(token, rank, own_rank, nonce)):
            return False
        self.rank = rank
        self.is_ready = True
        self.send(WELCOME, body=_proof(token, own_rank, rank, nonce))
        return True

    def welcomed(self, own_rank: int, token: bytes, body: bytes) -> bool:
        """As the end that has opened it: whether the other end knows the token."""
        self.is_ready = hmac.compare_digest(
            body, _proof(token, self.rank, own_rank, self._nonce)
        )
        return self.is_ready


def _proof(token: bytes, speaker: int, listener: int, nonce: bytes) -> bytes:
    said = struct.pack("<II", speaker, listener) + nonce
    return hashlib.blake2b(said, key=token, digest_size=16).digest()
