"""What an encoder calls in place of NeMo's all-reduce: the largest length, with a timeout.

`synced_length` is the whole interface to NeMo. It replaces the reduce of
`ConformerEncoder.update_max_seq_length` (nemo/collections/asr/modules/conformer_encoder.py, NeMo
1.20 to 3.0) and of its likes. State lives here, beside the encoders: state_dict, deepcopy, pickle
and export see none of it. Which ranks are missing from a round, the watch says.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch

from ..channel import meeting, process_hooks
from ..channel.exchange import Exchange
from ..channel.process_hooks import InForkedChild
from ..channel.rounds import RoundFailed, Rounds
from .encoder_flag import is_off
from .encoder_rounds import CallLeft, Group, Round, WatchedRounds, listeners
from .protocol import (
    CAME,
    ENDED,
    FLAG_IS_OFF,
    IS_LOCAL,
    LOCAL,
    SERVED,
    TIMEOUT,
    UNWAITED,
    Clock,
    LengthProtocol,
)
from .rank_log import is_distributed, raised_by_signal_handler, report
from .settings import Settings, SettingsError

LENGTHS = "lengths"  # the key of the rounds, the same on all ranks
_LATE = "not every rank's length came within {waited:.2f} s; using this rank's own, {length}"


class LengthSyncTimeout(RuntimeError):
    """With on_timeout="raise": not every rank's length came in time, or a rank has died.

    Which ranks are missing, the log says, and `status().stalls`.
    """


@dataclass(frozen=True)
class EncoderCounters:
    """What one encoder's sync has done on this rank."""

    encoder: str
    calls: int
    rounds: int
    fallbacks: int  # calls that no round served: they used this rank's own length
    timeouts: int  # waits that timed out
    waited: timedelta  # in all waits, including those that did not time out
    ended: str  # why there are no more rounds; empty while there are


class ProcessSync:
    """The length sync of this process: its settings, and the encoders of its process group."""

    def __init__(self) -> None:
        self.group_syncs: GroupSyncs | None = None
        self._settings: Settings | None = None  # in force
        self._said = ""  # of a bad variable
        self._lock = threading.RLock()  # two threads may make their first calls at once
        # The process group whose sync an error of ours has ended.
        self._given_up: Callable[[], object] = lambda: None

    def synced_length(self, encoder: torch.nn.Module, seq_length: int) -> int:
        """The largest `seq_length` (frames or samples, as the encoder counts) of all ranks.

        Never below this rank's own, and just that where the others are late, where the encoder's
        own `sync_max_audio_length` is false, and where there is no other rank. Waits at most the
        timeout; before that, at most the timeout for another thread's call. Raises
        LengthSyncTimeout if that was chosen, and what a signal handler raises meanwhile.
        """
        length = int(seq_length)
        try:
            sync = self.sync_of(encoder)
            return length if sync is None else sync.call(length, encoder)
        except Exception as error:
            if isinstance(error, LengthSyncTimeout) or raised_by_signal_handler(error):
                raise
            # An error of ours must not reach training. Without a group, it was destroyed just now.
            group = torch.distributed.group.WORLD
            if group is not None and not self._has_given_up():
                self._given_up = weakref.ref(group)
                text = (
                    "the length sync has ended by an error of its own, please report it"
                )
                report(logging.ERROR, f"{text}: {error!r}")
            return length

    def use(self, settings: Settings) -> None:
        """These settings are in force from the next encoder call on, and the next look of the
        watch.
        """
        self._settings = settings

    def has_settings(self) -> bool:
        """Whether any have been in force, also before a revert()."""
        return self._settings is not None

    def current(self) -> Settings:
        """Those in force, else the environment's. A bad variable is said once and not used."""
        if self._settings is not None:
            return self._settings
        try:
            return Settings.resolve()
        except SettingsError as error:
            if str(error) != self._said:
                self._said = str(error)
                report(logging.ERROR, f"{error}; using {Settings()}")
            return Settings()

    def counters(self) -> tuple[EncoderCounters, ...]:
        """Of every encoder that lives and was called under the present (or last) process group."""
        if self.group_syncs is None:
            return ()
        return tuple(sync.counters() for sync in self.group_syncs.by_encoder.values())

    def sync_of(self, encoder: torch.nn.Module) -> EncoderSync | None:
        """The encoder's sync under the current process group; None as in present_group(), or after
        an error of ours.
        """
        with self._lock:
            group_syncs = self.present_group()
            if group_syncs is None or self._has_given_up():
                return None
            return group_syncs.sync_of(encoder)

    def present_group(self) -> GroupSyncs | None:
        """The syncs under the current process group; None without other ranks. Any thread.

        The first one to see another process group tells the watch that it has begun.
        """
        with self._lock:
            before = self.group_syncs
            group_syncs = self._of_present_group()
            if group_syncs is not None and group_syncs is not before:
                listeners.notes.group_began(group_syncs.group, group_syncs.exchange)
            return group_syncs

    def forget(self) -> None:
        """In a forked child: it is no rank of its parent's process group, nor of a later one."""
        self._lock = threading.RLock()  # a thread may have held it
        if (group_syncs := self._of_present_group()) is not None:
            group_syncs.turn = Turn()
            group_syncs.exchange.forget()

    def _has_given_up(self) -> bool:
        """Data loaders and checkpoints go on: the others wait for them without limit."""
        return torch.distributed.group.WORLD is self._given_up()

    def _of_present_group(self) -> GroupSyncs | None:
        default_group = torch.distributed.group.WORLD if is_distributed() else None
        if default_group is None:
            return None
        group_syncs = self.group_syncs
        if group_syncs is None or group_syncs.default_group() is not default_group:
            if group_syncs is not None:
                group_syncs.close()
            self.group_syncs = group_syncs = GroupSyncs(default_group)
        return group_syncs if group_syncs.has_others else None


class Turn:
    """One call at a time, of all threads; and none of a signal handler's within another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0  # the one that has its turn

    @contextlib.contextmanager
    def take(self, limit: timedelta) -> Iterator[bool]:
        """Whether it is the caller's turn; not within its own one, nor after waiting this long."""
        thread = threading.get_ident()
        if self._thread == thread:
            yield False
            return
        lock = self._lock
        is_own = lock.acquire(timeout=limit.total_seconds())
        try:
            if is_own:
                self._thread = thread
            else:  # nobody waits for it again: a signal handler's exception may have kept it locked
                self._lock = threading.Lock()
            yield is_own
        finally:
            if is_own:
                self._thread = 0
                lock.release()


class LengthRounds:
    """The rounds of all encoders of a process group, in the order of this rank's calls: the
    protocol, and the one that may be outstanding.

    Like stock's reduce, a round pairs what comes, whichever encoder that is on another rank.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.protocol = LengthProtocol()
        self.clock = Clock()  # before the latest call that takes part
        self.latest: EncoderSync | None = None  # whose round is the latest

    def begin(self, length: int, training: bool, settings: Settings) -> bool:
        """Whether this call is to issue a round."""
        completed = self.rounds.poll() if self.protocol.outstanding else None
        if completed is not None:
            self._has_come(False, settings)
        return self.protocol.begin(length, training, completed)

    def issue(self, sync: EncoderSync, round_: Round) -> None:
        """Issue the encoder's round, at the protocol's clock."""
        before = self.rounds.issued
        try:
            self.rounds.issue(self.protocol.value())
        finally:  # also where a signal handler has raised: its number is the exchange's
            if self.rounds.issued > before:
                round_.number = self.rounds.issued
                self.latest = sync
                sync.was_issued(round_)
            elif self.protocol.outstanding:
                self.protocol.withdraw()

    def wait(self, limit: timedelta, training: bool, settings: Settings) -> bool:
        """Whether the outstanding round has come within the limit."""
        completed = self.rounds.wait(limit)
        if completed is None:
            self.protocol.timed_out()
            return False
        self.protocol.came_in_time(completed, training)
        self._has_come(True, settings)
        return True

    def _has_come(self, in_time: bool, settings: Settings) -> None:
        """The training thread has the latest round's result."""
        if self.latest is None or (round_ := self.latest.round) is None:
            return
        self.latest.has_arrived(round_, in_time)
        took_s = self.rounds.latest.came_at - round_.issued_at
        if took_s <= settings.timeout.total_seconds():
            self.protocol.took(took_s)


class GroupSyncs:
    """The encoders' syncs under one default process group."""

    def __init__(self, default_group: torch.distributed.ProcessGroup) -> None:
        # Weak: a strong reference would keep NCCL's communicators.
        self.default_group = weakref.ref(default_group)
        default_store = torch.distributed.distributed_c10d._get_default_store()
        # Whichever is released first: DDP may keep the group.
        for owner in (default_group, default_store):
            # Not in a dying interpreter.
            weakref.finalize(owner, self.close).atexit = False
        rank = torch.distributed.get_rank()
        size = torch.distributed.get_world_size()
        self.group = Group(rank, size, meeting.port_of(default_store))
        # "fake" is torch's, for one process that tries out what a rank of many would do.
        self.has_others = size > 1 and torch.distributed.get_backend() != "fake"
        # Weak: a strong reference would keep rank 0's server, and its port, after the group's end.
        warn = functools.partial(report, logging.WARNING)
        self.exchange = Exchange(weakref.ref(default_store), rank, size, warn)
        self.by_encoder = weakref.WeakKeyDictionary[torch.nn.Module, EncoderSync]()
        self.turn = Turn()
        self.end_said = False
        self._rounds: dict[str, LengthRounds] = {}
        self._numbers: Counter[str] = Counter()

    def sync_of(self, encoder: torch.nn.Module) -> EncoderSync:
        if (sync := self.by_encoder.get(encoder)) is None:
            name = type(encoder).__name__
            number = self.number(name)
            title = name if number == 1 else f"{name} #{number}"
            sync = self.by_encoder[encoder] = EncoderSync(title, LENGTHS, self)
            sync.serve(encoder)
        return sync

    def number(self, name: str) -> int:
        """Of the next encoder or data loader of this name, from 1."""
        self._numbers[name] += 1
        return self._numbers[name]

    def rounds(self, key: str) -> LengthRounds:
        """Of all encoders: their lengths, or a check of theirs."""
        if key not in self._rounds:
            self._rounds[key] = LengthRounds(self.exchange.rounds(key))
        return self._rounds[key]

    def close(self) -> None:
        """Takes no lock: the garbage collector may call this anywhere."""
        self.group.closed = True
        self.exchange.close_rounds()
        self.exchange.close()


class EncoderSync(WatchedRounds):
    """One encoder's length sync on this rank: its calls, and the rounds that they wait for."""

    def __init__(
        self,
        title: str,
        key: str,
        group_syncs: GroupSyncs,
        late_text: str = _LATE,
    ) -> None:
        """key: of the rounds, the same for all encoders."""
        self.lengths = group_syncs.rounds(key)
        super().__init__(title, key, group_syncs.group, self.lengths.rounds, late_text)
        self.group_syncs = group_syncs
        self._calls = self._fallbacks = self._timeouts = 0
        self._waited = timedelta(0)
        self._outcome = ""  # of the present call

    def serve(self, encoder: torch.nn.Module) -> None:
        """When the encoder is deleted, nobody watches its rounds any more."""
        weakref.finalize(encoder, self.encoder_was_deleted).atexit = False

    def call(self, length: int, encoder: torch.nn.Module) -> int:
        """The length that one encoder call grows to. Raises LengthSyncTimeout, if chosen."""
        settings = current()
        with self.group_syncs.turn.take(settings.timeout) as is_own:
            return self._call(length, encoder, settings) if is_own else length

    def _call(self, length: int, encoder: torch.nn.Module, settings: Settings) -> int:
        waited_before = self._waited
        result = length
        self._outcome = ""
        self.in_call = True
        try:
            self.apart = _apart(encoder, settings)
            if not self.apart:
                self.lengths.clock = self.lengths.protocol.clock
            number = self._calls + 1
            self.latest_call = (number, self.lengths.clock)
            listeners.notes.call_began(encoder, self)
            if self.apart or self.why_over:
                self._calls = number
                self._outcome = LOCAL if self.apart else ENDED
            else:
                result = self.take_part(length, encoder.training, settings)
        finally:
            self.in_call = False
            left = CallLeft(
                encoder=encoder,
                outcome=self._outcome,
                round=self.rounds.issued,
                waited=self._waited - waited_before,
                local=length,
                result=result,
            )
            listeners.tracer.call_left(left)
        return result

    def take_part(self, length: int, training: bool, settings: Settings) -> int:
        """One call's part in the rounds, while there are any."""
        self._outcome = ""
        self._calls += 1
        protocol = self.lengths.protocol
        try:
            if self.lengths.begin(length, training, settings):
                self._issue_and_wait(length, training, settings)
        except RoundFailed as error:
            self._outcome = ENDED
            if not self.rounds.over:  # else the process group was destroyed meanwhile
                self._end(str(error), settings)
            return length
        self._outcome = self._outcome or (SERVED if protocol.served else UNWAITED)
        if not protocol.served:
            self._fallbacks += 1
            return length
        return protocol.agreed()

    def _issue_and_wait(self, length: int, training: bool, settings: Settings) -> None:
        number = self.rounds.issued + 1
        round_ = Round(number, self._calls, training, length, self.in_time_at)
        self.lengths.issue(self, round_)
        limit = self.lengths.protocol.wait_limit(settings.timeout)
        if limit is None:
            return
        try:
            has_come = self.lengths.wait(limit, training, settings)
        finally:  # also where a signal handler raised
            self._waited += timedelta(seconds=time.monotonic() - round_.issued_at)
        if has_come:
            self._outcome = CAME
            return
        self._timeouts += 1
        self._outcome = TIMEOUT
        text = self.was_late(round_)
        if settings.on_timeout == "raise":
            raise LengthSyncTimeout(text)

    def counters(self) -> EncoderCounters:
        return EncoderCounters(
            encoder=self.title,
            calls=self._calls,
            rounds=self.issued,
            fallbacks=self._fallbacks,
            timeouts=self._timeouts,
            waited=self._waited,
            ended=self.why_over,
        )

    def _end(self, reason: str, settings: Settings) -> None:
        text = f"{self.title}: the length sync has ended at call {self._calls}"
        self.rounds.close(reason)
        if not self.group_syncs.end_said:  # for other encoders it is the same end
            self.group_syncs.end_said = True
            report(
                logging.ERROR,
                f"{text}, this rank uses its own lengths from now on: {reason}",
            )
        if settings.on_timeout == "raise":
            raise LengthSyncTimeout(f"{text}: {reason}")


def _apart(encoder: torch.nn.Module, settings: Settings) -> str:
    if is_off(encoder):
        return FLAG_IS_OFF
    return IS_LOCAL if settings.sync == "local" else ""


process = ProcessSync()
process_hooks.run(InForkedChild.LENGTH_SYNC, process.forget)
synced_length = process.synced_length
use = process.use
current = process.current
has_settings = process.has_settings
counters = process.counters
sync_of = process.sync_of
