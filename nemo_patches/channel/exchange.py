"""One exchange for a process group: rounds (the largest number of all ranks), and questions.

One daemon thread owns all sockets; it waits for no rank. Other threads hand it calls, and read
what it has left. Each rank listens for as long as the group lives, and knows where the others do.
Rounds run on a tree of connections: numbers go up, the largest comes down. A lost connection is
made anew, and both ends say again how far they are. A rank that refuses a new connection has
ended: then there are no more rounds.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import math
import multiprocessing
import os
import random
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ..text import first_line
from . import meeting, process_hooks
from .answers import (
    ENDED,
    LEFT,
    LOST,
    NO_ANSWER,
    NO_WATCH,
    NOT_COME,
    NOT_HEARD,
    NOT_THROUGH,
    UNREACHED,
    Silence,
    silent_by,
)
from .daemon import Daemon
from .link import (
    ANSWER,
    ASK,
    DOWN,
    HERE,
    OVER,
    QUESTION,
    RANKS,
    REGISTER,
    STOP,
    UP,
    VERDICT,
    WELCOME,
    Link,
    Message,
)
from .meeting import Member
from .notes import Notes
from .own_socket import Socket, host_name
from .process_hooks import AtExit, InForkedChild
from .questions import Questions
from .rounds import NEVER, Latest, RoundFailed, Rounds, Stop
from .waker import Waker

_DESTROYED = "the process group was destroyed"
_QUESTION_KINDS = {ASK, HERE, QUESTION, ANSWER, VERDICT}
_FAILED = "failed"  # a rank lives, and takes no part in rounds any more
_HOW = (LEFT, ENDED, _FAILED)  # why there are no more rounds; with OVER: their numbers
_HOW_TEXTS = {
    LEFT: "has left: it ended, or destroyed its process group",
    ENDED: "has ended: its port is closed",
    _FAILED: "has had an error of nemo_patches' own, which its stderr says, and trains on",
}
_MOST_ERRORS = 8  # of our own; then this rank answers no questions either
_CONNECT_S = 2.0  # for a connection to be made; longer where there are many ranks
_IDLE_S = 5.0  # then a connection that no round needs is closed
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 2.0
_LONGEST_TROUBLE_S = 60.0  # between two requests to a store that answers with errors
_PAUSE_PER_RANK_S = 0.002  # many ranks ask the one store less often
_FEWEST_LINKS = 64  # that rank 0 keeps, however few files it may have
_NO_FILE_S = 0.5  # without a free file, nobody is accepted for so long
_MOST_STRANGERS = 32  # clients that have not proved that they belong to the job
_LEAVE_S = 1.0  # a connection that was lost just now may come back
_LEAVE_AT_EXIT_S = 0.15  # the same, where the process waits for it
_EXIT_S = 1.2  # for the thread to be given a core, and say that this rank leaves
_STORE_EXIT_S = 1.0  # c10d writes a stack to the log first


class _NotOfThisGroup(Exception):
    """What has sent this is none of its ranks; it gets no answer."""


class Exchange:
    """This rank's part, from its making until `close`. Its thread begins with `start`."""

    def __init__(
        self, store: Callable[[], Any], rank: int, size: int, say: Callable[[str], None]
    ) -> None:
        """store: gives this process group's part of the job's store; None once it is gone.

        say: logs a trouble.
        """
        self.rank = rank
        self.size = size
        self.watch: Any = None  # answers questions, as Looks of watch/ does
        # Called in the exchange's thread when it has heard that a rank has ended without a word.
        self.on_death: Callable[[], object] = lambda: None
        self.over = ""  # why there are no more rounds
        self.is_joined = False
        self.trouble = ""  # the last that was said about a connection or the store
        self.members: list[Member | None] = [None] * size
        self._store = store
        self._say = say
        self._said: set[str] = set()
        self.is_closed = (
            False  # this rank's part ends, and no rank can be asked any more
        )
        self._token = b""
        self._here = Member("", "", 0, 0)
        self._store_address = ""
        # Rank 0's addresses that a joining rank tries; the first one is tried now, or has worked.
        self._root_addresses: list[str] = []
        self._root_tries = 0
        self._root_since = 0.0
        self._has_left_note = False
        self._notes = Notes(self.post)
        self._listener: Socket | None = None
        self._listener_rests_until = 0.0
        self._parents = [0] * size  # until all have come, all are below rank 0
        self._parents[0] = -1
        self._children: list[int] = []
        self._list = b""  # of all members, as it is sent
        # Children that this rank has never been connected to: a firewall may refuse it.
        self._unmet: set[int] = set()
        self.ranks_to_ask = [0]  # in this order, until one is there
        self._rounds: dict[int, Rounds] = {}
        self._links: dict[int, Link] = {}  # by rank: the newest
        self._all_links: set[Link] = set()  # also older ones, and those of strangers
        self._strangers: deque[Link] = deque()
        # By rank: when to connect again, and the pause after that.
        self._tries: dict[int, tuple[float, float]] = {}
        self._ended: dict[int, Silence] = {}
        # Those that live, and take no part in rounds after an error of ours.
        self._failed: dict[int, Silence] = {}
        self._errors = 0  # of ours, in the thread
        self._lost_ranks: set[int] = set()  # there is no connection any more
        self._questions = Questions(self)
        self._mend_at = 0.0
        self._leaves_at = math.inf
        self._leaves_by = math.inf  # written at exit
        self._trouble_pause_s = _FIRST_PAUSE_S
        self._connect_s = _CONNECT_S + size * _PAUSE_PER_RANK_S
        self._most_links = math.inf
        self._inbox: deque[Callable[[], object]] = deque()
        self._chance = random.Random()  # training's random numbers stay as they are
        self._selector = selectors.PollSelector()  # needs no file
        # Without, as where no file is left, the thread looks twice a second.
        self._waker: Waker | None = None
        _exchanges.add(self)
        self._thread: Daemon | None = None
        self._starting = threading.Lock()

    # Any thread.

    def start(self) -> None:
        """Have the thread, if there is none; why there can be none is `over`."""
        if not self._starting.acquire(blocking=False):
            return  # another thread is at it, or this one, which a signal handler has interrupted
        try:
            if self._thread is not None or self.is_closed:
                return
            # Its child may end without atexit.
            if multiprocessing.parent_process() is not None:
                process_hooks.at_last(_at_exit)
            self._thread = Daemon("exchange", self._run)
            why = self._thread.begin()
        finally:
            self._starting.release()
        if why:
            self.is_closed = True
            self.over = f"this rank cannot take part: {why}"

    def rounds(self, name: str) -> Rounds:
        """The rounds of a name, which is the same on all ranks."""
        key = int.from_bytes(
            hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"
        )
        return self._of(key)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have come, and this one is connected to its living neighbours."""
        return self.is_joined and self._neighbours() <= self._links.keys()

    def ask(self) -> None:
        """Have a verdict on every rank: `watch.told` gets it on all ranks."""
        self.post_question(self._questions.want)

    def post_question(self, step: Callable[..., None], *arguments: Any) -> None:
        """Have this done by the exchange's thread. An error ends no rounds."""
        self.post(functools.partial(self._of_questions, step, *arguments))

    @property
    def ended(self) -> dict[int, Silence]:
        """The ranks that have left or ended, as far as this one has heard, in this order."""
        return self._ended.copy()

    @property
    def any_died(self) -> bool:
        """Whether a rank has ended without a word: it was killed, or has crashed."""
        return bool(silent_by(self.ended, ENDED))

    @property
    def has_lost(self) -> bool:
        """Whether a connection to a neighbour is lost, which may have ended."""
        return self.is_joined and not self.is_whole

    @property
    def has_others(self) -> bool:
        """Whether a rank may live that this one could hear of."""
        return (
            self.is_joined and not self.is_closed and len(self._ended) < self.size - 1
        )

    @property
    def any_failed(self) -> bool:
        """Whether a living rank has told that an error of ours has ended its rounds."""
        return bool(self._failed)

    def check(self) -> None:
        """Raise RoundFailed if there are no more rounds."""
        if self.over:
            raise RoundFailed(self.over)

    def post(self, call: Callable[[], object]) -> None:
        """Have this done by the exchange's thread."""
        if not self.is_closed:
            self._inbox.append(call)
            self._wake()
            if self._thread is None:
                self.start()

    def close(self, why: str = _DESTROYED) -> None:
        """End this rank's part, and say so to the others. The garbage collector may call this."""
        if not self.is_closed:
            self.is_closed = True
            self.over = self.over or why
            self._wake()

    def close_rounds(self) -> None:
        """This rank issues no more of any name. The garbage collector may call this."""
        for rounds in list(self._rounds.values()):
            rounds.close()

    def end(self) -> None:
        """At exit."""
        self._leaves_by = time.monotonic() + _LEAVE_AT_EXIT_S
        self.close()
        self._wake()
        thread = self._thread
        # None: interrupted before it started.
        if thread is None or thread.ident is None:
            return
        thread.join(_EXIT_S)
        store = self._store()
        if thread.is_alive() and store is not None:
            meeting.end_requests(store)
            thread.join(_STORE_EXIT_S)
        self._notes.end(_STORE_EXIT_S)

    def forget(self) -> None:
        """In a forked child: the sockets are its parent's."""
        self.is_closed = True
        self.over = "this process was forked from the rank's own"
        self._waker = None
        for link in self._all_links:
            link.socket.close()
        if self._listener is not None:
            self._listener.close()

    def _wake(self) -> None:
        waker = self._waker  # its file lives at least until this returns
        if waker is not None:
            waker.wake()

    # What follows runs in the exchange's thread.

    def _have_waker(self) -> None:
        """Raises OSError."""
        waker = Waker()
        self._selector.register(waker.file, selectors.EVENT_READ)
        self._waker = waker

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # no file is left
            self._have_waker()
        while not self.is_closed and self._errors < _MOST_ERRORS:
            self._try_step()
        self._leaves_at = time.monotonic() + _LEAVE_S
        while (
            self.is_joined
            and not self.is_whole
            and self._errors < _MOST_ERRORS
            and time.monotonic() < min(self._leaves_at, self._leaves_by)
        ):
            # A connection that was lost just now comes back: say there, too, that this rank
            # leaves
            self._try_step()
        self._leave()

    def _try_step(self) -> None:
        """After an error of ours there are no more rounds, but this rank can still be asked."""
        try:
            self._step()
        except Exception as error:
            self._errors += 1
            if self._errors == 1:
                self._say(
                    "the exchange has ended by an error of its own, please report it:"
                    f" {error!r}"
                )
            with contextlib.suppress(Exception):
                self._has_ended(self.rank, _FAILED)
            self._end(first_line(error))

    def _step(self) -> None:
        while self._inbox:
            call = self._inbox.popleft()
            call()
        now = time.monotonic()
        if now >= self._mend_at:
            self._mend_at = now + self._mend(now)
        until = min(
            self._mend_at,
            self._leaves_at,
            self._leaves_by,
            self._of_questions(self._questions.tick),
        )
        for link in self._all_links:
            if link.waits != link.is_watched_for_room:
                self._watch(link)
        pause_s = None if until == math.inf else max(until - time.monotonic(), 0.0)
        for entry, _ in self._selector.select(pause_s):
            if entry.data is not None:
                self._read(entry.data)
            elif entry.fileobj is self._listener and self._listener is not None:
                self._accept(self._listener)
            elif self._waker is not None:
                self._waker.rest()

    def _watch(self, link: Link) -> None:
        """Wait until something comes, and for room if something is still to be sent."""
        link.is_watched_for_room = link.waits
        events = selectors.EVENT_READ
        if link.waits:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
        if link in self._all_links:
            self._selector.modify(link.socket, events, link)
            return
        self._all_links.add(link)
        self._selector.register(link.socket, events, link)
        self._mend_at = min(self._mend_at, time.monotonic() + self._connect_s)

    def _mend(self, now: float) -> float:
        """Do what the tree, and the way to it, still need; return after what time to look again."""
        pauses = [math.inf]
        try:
            if self._waker is None:
                pauses.append(_NO_FILE_S)
                self._have_waker()
            if self._listener is None:
                self._listen()
            elif self._listener_rests_until:
                pauses.append(self._let_listener_rest(now))
            if not self.is_joined:
                pauses.append(self._join(now))
        except (
            Exception
        ) as error:  # torch has no common class for what its stores raise
            # c10d may log a stack for each request to a server that has died.
            self._trouble_pause_s = min(2 * self._trouble_pause_s, _LONGEST_TROUBLE_S)
            pauses.append(self._trouble_pause_s)
            if not self.is_closed:
                why = first_line(error)
                self._trouble(
                    f"this rank is not connected to the others yet, and tries again: {why}"
                )
        if self.is_joined:
            missing = self._neighbours() - self._links.keys()
            pauses.extend(self._reconnect(rank, now) for rank in missing)
        pauses.extend(self._check_age(link, now) for link in list(self._all_links))
        return min(pauses)

    def _trouble(self, text: str) -> None:
        """Why this rank is not connected to the others, or so."""
        self.trouble = text
        self._say_once(text)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _listen(self) -> None:
        wanted = self.size if self.rank == 0 else _FEWEST_LINKS
        most = max(meeting.make_room(wanted), _FEWEST_LINKS)
        if self.rank == 0 and most < self.size:
            self._most_links = most
            self._say_once(
                f"the limit on open files (ulimit -Hn) leaves {most} for"
                f" {self.size} ranks: they join in groups, which takes longer"
            )
        trouble = ""
        try:
            address, self._store_address = meeting.own_addresses(self._present_store())
        except ValueError as error:
            trouble = str(error)
            address = "127.0.0.1"
        on_all = meeting.listens_on_all(address, self.rank, self.size)
        self._listener = meeting.listen(address, on_all)
        port = self._listener.getsockname()[1]
        self._here = Member(host_name(), address, port, os.getpid(), trouble)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _present_store(self) -> Any:
        """Raises ConnectionError if it is gone."""
        store = self._store()
        if store is None:
            raise ConnectionError(_DESTROYED)
        return store

    def _join(self, now: float) -> float:
        """Rank 0 says where it is, and the others register with it; where all are goes down the
        tree.
        """
        if self.rank == 0:
            if not self._token:
                self._token = meeting.leave_root(self._present_store(), self._here)
                self._registered(0, self._here)
            absent = [rank for rank in range(self.size) if self.members[rank] is None]
            store = self._store() if absent else None
            if store is None:
                return math.inf
            return self._notes.look(store, self._token, absent, now)
        if 0 in self._links or any(link.is_ours for link in self._all_links):
            return math.inf
        first_s = _FIRST_PAUSE_S + self.size * _PAUSE_PER_RANK_S / 10
        at, pause_s = self._tries.get(0, (0.0, first_s))
        if now < at:
            return at - now
        longest_s = 0.25 + self.size * _PAUSE_PER_RANK_S
        self._tries[0] = (now + pause_s, min(1.5 * pause_s, longest_s))
        root = meeting.find_root(self._present_store())
        if root is not None:
            self._try_root(*root, now)
        return pause_s

    def _try_root(self, root: Member, token: bytes, now: float) -> None:
        """At its own address, then at the one by which this rank has reached the store."""
        if token != self._token:
            self.members[0], self._token = root, token
            own = root.reached_from(self._here, self._store_address)
            self._root_addresses = list(dict.fromkeys([own, self._store_address]))
            self._root_tries = 0
            self._root_since = now
            self._has_left_note = False
        else:
            self._root_addresses.append(self._root_addresses.pop(0))
        if self._root_tries >= len(self._root_addresses) and self.trouble:
            # With an earlier group's token it is read by nobody.
            if not self._has_left_note:
                note = dataclasses.replace(self._here, trouble=self.trouble[:256])
                meeting.leave_note(self._present_store(), token, self.rank, note)
                self._has_left_note = True
            if now - self._root_since >= self._connect_s:
                self._trouble(self.trouble)
        self._root_tries += 1
        link = self._open(0)
        if link is not None:
            link.tell(REGISTER, {"member": self._here.to_json()})

    def _registered(self, rank: int, member: Member) -> None:
        """As rank 0."""
        before = self.members[rank]
        if not self.is_joined:
            self.members[rank] = member
            if all(self.members):
                self._joined()  # then it says which of them have left
            elif len(self._all_links) > self._most_links:
                self._lost(self._links[rank])
                self._lost_ranks.discard(rank)
        elif before == member:  # nobody above it in the tree has told it
            self._links[rank].send(RANKS, body=self._list)
        else:
            raise _NotOfThisGroup

    def _joined(self) -> None:
        members = list(filter(None, self.members))
        hosts = [member.host for member in members]
        self._parents = meeting.parents_of(hosts)
        self._children = self.children_of(self.rank)
        above = self._above()
        self.ranks_to_ask = above + [
            one for one in meeting.succession_of(hosts) if one not in above
        ]
        self._store = lambda: None
        self.trouble = ""
        self.is_joined = True
        self._list = self._list or meeting.packed(members)
        # By then those that this rank cannot reach have heard of rank 0, and have come.
        now = time.monotonic()
        later = now + _IDLE_S + 3 * self._connect_s
        self._unmet = set(self._children) - self._links.keys()
        self._tries = dict.fromkeys(self._unmet, (later, _FIRST_PAUSE_S))
        self._mend_at = 0.0
        for link in self._all_links:
            link.used_at = now
        for child in self._children:
            self.link_to(child)
        for rank, member in enumerate(members):
            if member.trouble:
                self._end(f"rank {rank} cannot take part: {member.trouble}")
        for rank in self._neighbours() & self._links.keys():
            self._repeat(self._links[rank])
        for rounds in list(self._rounds.values()):
            self._pass_on(rounds)

    def _neighbours(self) -> set[int]:
        """In the tree: those that have not ended."""
        neighbours = set(self._children)
        if self.rank > 0:
            neighbours.add(self._parents[self.rank])
        return neighbours - self._ended.keys()

    # Connections.

    def link_to(self, rank: int) -> Link | None:
        """A connection that may still be made; None: there can be none."""
        if rank in self._ended:
            return None
        link = self._links.get(rank)
        # Behind what is not acknowledged nothing else comes through.
        if link is None or link.is_suspect or link.is_cut:
            return self._open(rank)
        self._pass_on_list(link)
        return link

    def _pass_on_list(self, link: Link) -> None:
        """To a rank further down, once: it may not have joined."""
        if self.is_joined and link.rank > self.rank and not link.has_list:
            link.has_list = True
            link.send(RANKS, body=self._list)

    def _open(self, rank: int) -> Link | None:
        member = self.members[rank]
        if member is None or len(self._all_links) > self._most_links:
            return None
        address = self._address_of(rank, member)
        try:
            link = Link.opened(address, member.port, self.rank, rank, self._token)
        except OSError as error:
            self._trouble(
                f"no connection to {self._address_text(rank)}: {first_line(error)}"
            )
            return None
        self._watch(link)
        self._pass_on_list(link)
        return link

    def _address_of(self, rank: int, member: Member) -> str:
        if rank == 0 and self._root_addresses:
            return self._root_addresses[0]
        return member.reached_from(self._here, self._store_address)

    def _address_text(self, rank: int) -> str:
        member = self.members[rank]
        if member is None:
            return f"rank {rank}"
        address = self._address_of(rank, member)
        return f"rank {rank} ({member.host}, {address}, port {member.port})"

    def _reconnect(self, rank: int, now: float) -> float:
        """Both ends try: a process that has ended refuses."""
        if any(link.rank == rank and link.is_ours for link in self._all_links):
            return self._connect_s
        at, pause_s = self._tries.get(rank, (0.0, _FIRST_PAUSE_S))
        if now < at:
            return at - now
        self._tries[rank] = (now + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S))
        self._unmet.discard(rank)
        self._open(rank)
        return pause_s * self._chance.uniform(0.5, 1.0)

    def _check_age(self, link: Link, now: float) -> float:
        """A connection that is not made in time, or that nobody needs, is closed."""
        if not link.is_ready:
            left_s = link.opened_at + self._connect_s - now
        elif not self.is_joined or link.rank in self._neighbours():
            return math.inf
        elif link.is_ours:
            left_s = link.used_at + _IDLE_S - now
        else:  # it has not joined, or would have closed it: it asks rank 0 anew
            left_s = link.used_at + _IDLE_S + self._connect_s - now
        if left_s <= 0:
            if not self.is_joined and link.is_ours:
                self._trouble(
                    f"no connection to {self._address_text(link.rank)}: no answer"
                )
            self._lost(link)
            return 0.0
        return left_s

    def _let_listener_rest(self, now: float) -> float:
        if now >= self._listener_rests_until and self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listener_rests_until = 0.0
            return math.inf
        return self._listener_rests_until - now

    def _accept(self, listener: Socket) -> None:
        for _ in range(meeting.FAN_OUT):  # then others have their turn
            try:
                visitor = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._trouble("no file is left to accept a connection with")
                    self._selector.unregister(listener)
                    self._listener_rests_until = time.monotonic() + _NO_FILE_S
                    self._mend_at = 0.0
                return
            link = Link(visitor, -1, is_ours=False)
            self._strangers.append(link)
            self._watch(link)
            self._read(link)
        while len(self._strangers) > _MOST_STRANGERS:
            self._lost(self._strangers[0])

    def _read(self, link: Link) -> None:
        link.flush()
        if link.rank < 0:
            if not self._token or not link.welcome(self.rank, self.size, self._token):
                self._lost(link)
            elif link.is_ready:
                self._strangers.remove(link)
                self._is_ready(link)
            return
        messages = link.receive()
        try:
            for message in messages or ():
                self._hear(link, message)
        except _NotOfThisGroup:
            messages = None
        except (ValueError, TypeError, KeyError) as error:
            self._say_once(f"rank {link.rank} has sent what cannot be read: {error!r}")
            messages = None
        if messages is None:
            self._lost(link)

    def _is_ready(self, link: Link) -> None:
        self._links[link.rank] = link
        self.trouble = ""
        if (
            self.is_joined
        ):  # before, a rank that was sent away comes again, ever more rarely
            self._tries.pop(link.rank, None)
        self._lost_ranks.discard(link.rank)
        self._unmet.discard(link.rank)
        if link.rank in self._neighbours():
            self._repeat(link)

    def _lost(self, link: Link) -> None:
        if link.is_lost:
            return
        self._all_links.discard(link)
        self._selector.unregister(link.socket)
        link.socket.close()
        if not self.is_joined or link.rank in self._neighbours():
            self._mend_at = 0.0
        if link.rank < 0:
            self._strangers.remove(link)
            return
        if self._links.get(link.rank) is link:
            del self._links[link.rank]
            others = [
                one for one in self._all_links if one.rank == link.rank and one.is_ready
            ]
            for other in others[:1]:
                self._is_ready(other)  # what went over the lost one may not have come
            if link.rank not in self._links and (link.error or not link.is_ours):
                self._lost_ranks.add(link.rank)
        if not self.is_joined:
            # Not said yet: rank 0's key may be an earlier group's.
            if link.error and link.is_ours:
                why = os.strerror(link.error)
                self.trouble = (
                    f"no connection to {self._address_text(link.rank)}: {why}"
                )
        elif (
            link.error == errno.ECONNREFUSED
            and link.rank in self._neighbours() - self._unmet
        ):
            self._has_ended(link.rank, ENDED)
        self._of_questions(self._questions.lost, link)

    def _hear(self, link: Link, message: Message) -> None:
        if not link.is_ready:
            if message.kind != WELCOME or not link.welcomed(
                self.rank, self._token, message.body
            ):
                raise _NotOfThisGroup
            self._is_ready(link)
        elif message.kind == UP:
            self.arrive(self._of(message.key), message.number, message.value, link.rank)
        elif message.kind == DOWN and link.rank == self._parents[self.rank]:
            self._deliver(self._of(message.key), message.number, message.value)
        elif message.kind == OVER:
            self._is_over(link, message.number, message.value)
        elif message.kind == STOP:
            stop = Stop(message.number, message.value)
            if link.rank == self._parents[self.rank]:
                self._stopped(self._of(message.key), stop)
            else:
                self.stop(self._of(message.key), stop)
        elif message.kind == REGISTER and self.rank == 0:
            self._registered(link.rank, Member.from_json(message.content()["member"]))
        elif message.kind == RANKS and not self.is_joined:
            rows = zip(*message.content()["members"], strict=True)
            members = [Member.from_json(one) for one in rows]
            if len(members) == self.size and members[self.rank] == self._here:
                self.members = list(members)
                self._list = message.body
                self._joined()
        elif message.kind in _QUESTION_KINDS:
            self._of_questions(self._questions.heard, link, message)
        elif message.kind > STOP:
            self._pass_over(link, f"a message of kind {message.kind}")

    # Rounds.

    def _of(self, key: int) -> Rounds:
        return self._rounds.get(key) or self._rounds.setdefault(key, Rounds(self, key))

    def arrive(self, rounds: Rounds, number: int, value: int, source: int) -> None:
        """A value for a round: this rank's, or a child's for all below it. It may come twice."""
        if number == rounds.latest.number + 1:
            rounds.arrived[source] = max(value, rounds.arrived.get(source, value))
            self._pass_on(rounds)

    def _is_complete(self, rounds: Rounds) -> bool:
        needed = {self.rank, *self._children}
        is_next = rounds.latest.number + 1 < rounds.stopped.number
        return self.is_joined and is_next and needed <= rounds.arrived.keys()

    def _pass_on(self, rounds: Rounds) -> None:
        if not self._is_complete(rounds):
            return
        number = rounds.latest.number + 1
        value = max(rounds.arrived.values())
        parent = self._parents[self.rank]
        if self.rank == 0:
            self._deliver(rounds, number, value)
        elif parent in self._links:
            self._links[parent].send(UP, rounds.key, number, value)

    def _deliver(self, rounds: Rounds, number: int, value: int) -> None:
        if number != rounds.latest.number + 1:
            return
        rounds.arrived.clear()
        rounds.latest = Latest(number, value, time.monotonic())
        for child in self._children:
            if child in self._links:
                self._links[child].send(DOWN, rounds.key, number, value)
        rounds.wake()

    # How rounds end on all ranks alike. A result comes only with every rank's value, and from
    # rank 0; so does a stop. Before this rank has joined, none of its values has left it: there
    # is no result that another rank could have.

    def stop(self, rounds: Rounds, stop: Stop) -> None:
        """A rank wants this: this one, or one below it."""
        if rounds.latest.number < stop.number < rounds.wanted_stop.number:
            rounds.wanted_stop = stop
            if self.rank == 0 or not self.is_joined:
                self._stopped(rounds, stop)
            else:
                self._ask_for_stop(rounds)

    def leave(self, rounds: Rounds) -> None:
        """Stop at the first round for which this rank has given no value."""
        has_given = self.rank in rounds.arrived
        self.stop(rounds, Stop(rounds.latest.number + 1 + has_given, self.rank))

    def _ask_for_stop(self, rounds: Rounds) -> None:
        parent = self._parents[self.rank]
        if parent in self._links and rounds.wanted_stop is not NEVER:
            self._links[parent].send(STOP, rounds.key, *rounds.wanted_stop)

    def _stopped(self, rounds: Rounds, stop: Stop) -> None:
        """Rank 0 has decided it, or it holds on this rank already."""
        if rounds.latest.number < stop.number < rounds.stopped.number:
            rounds.stopped = stop
            for child in self._children:
                if child in self._links:
                    self._links[child].send(STOP, rounds.key, *stop)
            rounds.wake()

    def _repeat(self, link: Link) -> None:
        """What the other end may have missed. It is at most one round of a key behind."""
        for rank, silence in (*self._ended.items(), *self._failed.items()):
            _say_ended(link, rank, silence.how)
        for rounds in list(self._rounds.values()):
            number, value, _ = rounds.latest
            if link.rank in self._children:
                if number:
                    link.send(DOWN, rounds.key, number, value)
                if rounds.stopped is not NEVER:
                    link.send(STOP, rounds.key, *rounds.stopped)
            else:
                self._ask_for_stop(rounds)
                self._pass_on(rounds)

    def _is_over(self, link: Link, rank: int, number: int) -> None:
        """A rank takes no more part in rounds. number: why, of _HOW."""
        # Rank 0's key may be an earlier group's; those that have registered with it are not.
        if not 0 <= rank < self.size or not (self.is_joined or self.rank == 0):
            return
        if not 0 <= number < len(_HOW):
            self._pass_over(link, f"an end of kind {number}")
        else:
            self._has_ended(rank, _HOW[number])

    def _pass_over(self, link: Link, what: str) -> None:
        """What a later version says."""
        self._say_once(
            f"rank {link.rank} has sent {what}, which this version does not know: it is"
            " passed over"
        )

    def _has_ended(self, rank: int, how: str) -> None:
        """Or its part in rounds has."""
        told = self._failed if how == _FAILED else self._ended
        if rank in told or not 0 <= rank < self.size:
            return
        told[rank] = Silence(how)
        for neighbour in self._neighbours() & self._links.keys():
            _say_ended(self._links[neighbour], rank, how)
        self._end(f"rank {rank} {_HOW_TEXTS[how]}")
        if how == ENDED:
            self.on_death()

    def _end(self, why: str) -> None:
        self.over = self.over or why
        for rounds in list(self._rounds.values()):
            rounds.wake()

    def _leave(self) -> None:
        lives = not self.is_closed
        self.is_closed = True
        for link in self._all_links:
            if link.is_ready:  # also to ranks whose common neighbour has died
                _say_ended(link, self.rank, _FAILED if lives else LEFT)
            link.socket.close()
        # A closed port says that the process has ended.
        if self._listener is not None and not lives:
            self._listener.close()
        self._selector.close()
        self._waker = None
        self._end(_DESTROYED)

    # Questions.

    def _above(self) -> list[int]:
        """The ranks above this one: its parent first."""
        above = []
        rank = self._parents[self.rank]
        while rank >= 0:
            above.append(rank)
            rank = self._parents[rank]
        return above

    def children_of(self, rank: int) -> list[int]:
        """The ranks below a rank; until all have come, those that have registered, below rank 0."""
        return [
            one
            for one, parent in enumerate(self._parents)
            if parent == rank and self.members[one]
        ]

    def why_unreachable(self, rank: int) -> Silence | None:
        """Why a rank cannot be asked; None if it can."""
        if self.members[rank] is None:  # only rank 0 knows which ranks have registered
            note = self._notes.of.get(rank)
            if note is not None:
                text = f"{note.host}, pid {note.pid}: {note.trouble}"
                return Silence(UNREACHED, note=text)
            return Silence(NOT_COME if 0 in (rank, self.rank) else NOT_HEARD)
        return self._ended.get(rank)

    def silence_of(self, rank: int, link: Link | None) -> Silence:
        """Of a rank that was asked over this connection, and has said nothing."""
        if rank in self._failed:
            return Silence(NO_WATCH)
        if rank in self._lost_ranks:
            return Silence(LOST)
        is_met = self.is_joined and rank not in self._unmet
        if link is not None and link.error == errno.ECONNREFUSED and is_met:
            return Silence(ENDED)
        links = [one for one in self._all_links if one.rank == rank]
        if any(one.is_ready and one.has_gap for one in links):
            return Silence(NOT_THROUGH)
        is_cut = any(one.is_cut for one in links)
        # One that is being made says nothing: a firewall may keep it from being made.
        stands = any(one.is_connected for one in links)
        if not is_cut and (stands or (link is not None and link.is_connected)):
            return Silence(NO_ANSWER)
        return Silence(LOST if is_met else NOT_HEARD)

    def _of_questions(
        self, step: Callable[..., float | None], *arguments: Any
    ) -> float:
        """What `step` gives. An error, also the watch's or another rank's, ends no rounds."""
        try:
            due = step(*arguments)
        except Exception as error:
            self._trouble(f"an error in a question, please report it: {error!r}")
            due = None
        return math.inf if due is None else due


def _say_ended(link: Link, rank: int, how: str) -> None:
    link.send(OVER, number=rank, value=_HOW.index(how))


def _at_exit() -> None:
    for exchange in list(_exchanges):
        exchange.end()


def _in_forked_child() -> None:
    for exchange in list(_exchanges):
        exchange.forget()


_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
process_hooks.run(AtExit.EXCHANGES, _at_exit)
process_hooks.run(InForkedChild.EXCHANGES, _in_forked_child)
