"""What an encoder calls instead of NeMo's all-reduce: the largest length among the ranks, in bounded time.

`synced_length` is the whole interface to NeMo. It replaces the reduce of `ConformerEncoder.update_max_seq_length`
(nemo/collections/asr/modules/conformer_encoder.py, NeMo 1.20 to 3.0) and of its likes. State lives here, beside the
encoders, so that state_dict, deepcopy, pickle and export see none of it.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch

from ..stall import stacks
from ..stall.heartbeats import Beat, MissingRank
from ..stall.roll_call import RollCall
from ..stall.stall_monitor import OpenRound, Stall, StallMonitor
from . import events as activity
from . import settings as _settings
from .gloo_rounds import Helper, RoundFailed, Rounds
from .protocol import CAME, ENDED, LOCAL, SERVED, TIMEOUT, UNWAITED, LengthProtocol
from .rank_log import raised_by_signal_handler, report
from .settings import Settings


class LengthSyncTimeout(RuntimeError):
    """Not every rank's length came in time, or a round failed (a rank has gone), and on_timeout="raise" was chosen.

    missing: the ranks that were waited for and what each does, as far as it was known in time.
    """

    def __init__(self, text: str, missing: tuple[MissingRank, ...] = ()) -> None:
        super().__init__(text, missing)
        self.missing = missing

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class EncoderCounters:
    """What one encoder's sync has done on this rank.

    fallbacks: calls that went on with this rank's own length because no round served them.
    timeouts: waits that ran out of time. waited: time in all waits, also those that came in time.
    """

    encoder: str
    calls: int
    rounds: int
    fallbacks: int
    timeouts: int
    waited: timedelta
    ended: str  # why there are no more rounds; empty while there are


def synced_length(encoder: torch.nn.Module, seq_length: int) -> int:
    """The largest `seq_length` (frames or samples, as the encoder counts) of all ranks; never below this rank's own.

    Waits at most the timeout (and half a second for the report, where on_timeout="raise" was chosen). This rank's own
    length where the others are late, where the encoder's own `sync_max_audio_length` is false, and where there is no
    process group or only one rank. Raises LengthSyncTimeout if that was chosen, what a signal handler raises meanwhile,
    and nothing else.
    """
    length = int(seq_length)
    try:
        sync = sync_of(encoder)
        if sync is None:
            return length
        try:
            return sync.call(length, encoder)
        finally:
            activity.current.phase = activity.FORWARD
    except LengthSyncTimeout:
        raise
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        _give_up(error)
        return length


def use(settings: Settings) -> None:
    """Set the settings of this process; they hold from the next encoder call on."""
    global _current
    _current = settings


def current() -> Settings:
    """The settings in force: those of `use`, else the environment's. A bad variable is said once and not used."""
    global _current
    if _current is None:
        try:
            _current = _settings.resolve()
        except _settings.SettingsError as error:
            _current = Settings()
            report(logging.ERROR, f"{error}; using {_current}")
        if not __name__.startswith("nemo_patches."):  # vendored; else nemo_patches, which knows more settings, says it
            for sentence in _settings.misspelt(os.environ, [setting.variable for setting in _settings.SETTINGS]):
                report(logging.WARNING, sentence)
    return _current


def counters() -> tuple[EncoderCounters, ...]:
    """The counters of every encoder that lives and was called under the present (or last) process group."""
    return () if _world is None else tuple(sync.counters() for sync in _world.syncs.values())


def unannounced() -> tuple[int, ...]:
    """The ranks that have not announced themselves under the present process group: unpatched, or not here yet."""
    roll_call = None if _world is None else _world.helper.roll_call
    return () if roll_call is None else roll_call.missing


def stalls() -> tuple[Stall, ...]:
    """The encoders' rounds that this rank waits for, or has given up, with the ranks that are missing from each."""
    return () if _world is None else _world.monitor.stalls()


def beats() -> dict[int, Beat]:
    """All ranks' heartbeats, by rank, as they were soon after the last time that this was called; empty before.

    Asks for new ones, in a thread: it waits for nothing.
    """
    return {} if _world is None else _world.monitor.beats()


def sync_of(encoder: torch.nn.Module) -> EncoderSync | None:
    """The encoder's sync under the present process group; None where no other rank is, or after an error of ours."""
    global _world, _generation
    # Looked up at each call: some NeMo code replaces is_initialized for a while.
    if _given_up or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    default_group = torch.distributed.group.WORLD
    if default_group is None:
        return None
    if _world is None or _world.group() is not default_group:
        if _world is not None:
            _world.close()
        _world = World(default_group, _generation)
        _generation += 1
    return _world.sync_of(encoder) if _world.size > 1 else None


class EncoderSync:
    """One encoder's length sync on this rank: the protocol and its rounds. The stall monitor looks at it."""

    def __init__(self, title: str, key: str, world: World) -> None:
        self.title, self.key = title, key
        self.open_round: OpenRound | None = None
        self.gave_up: OpenRound | None = None
        self.calm = True
        self.ended = ""
        self.outcome = ""  # of the last call; empty while it is not known
        self.world = world
        self._place: tuple[str, str] | None = None
        self._rounds = Rounds(world.helper, key)
        self._protocol = LengthProtocol()
        self.fallbacks = 0
        self.waited = timedelta(0)

    def call(self, length: int, encoder: torch.nn.Module) -> int:
        if activity.observer is None:
            return self._call(length, encoder)
        before, result, self.outcome = self.waited, length, ""
        try:
            result = self._call(length, encoder)
        finally:
            if self.outcome:
                waited = (self.waited - before).total_seconds()
                synced = activity.Synced(self.outcome, self._protocol.rounds, waited, length, result)
                activity.tell(lambda observer: observer.length_synced(encoder, self.title, synced))
        return result

    def _call(self, length: int, encoder: torch.nn.Module) -> int:
        settings, protocol, training = current(), self._protocol, encoder.training
        self._place = self._place or stacks.caller_of(_METHODS)
        activity.current.begin(self.title, protocol.calls + 1, protocol.clock, self._place)
        wanted = getattr(encoder, "sync_max_audio_length", True)
        if wanted:
            self.world.begin()  # in every mode: a rank of stock NeMo would wait for all
        if not wanted or settings.sync == "local" or self.ended:
            protocol.calls += 1
            self.outcome = LOCAL if not wanted or settings.sync == "local" else ENDED
            return length
        return self.sync(length, training, settings)

    def sync(self, length: int, training: bool, settings: Settings) -> int:
        """One call's part in the rounds, while there are any (`ended` is empty)."""
        protocol, self.outcome = self._protocol, ""
        try:
            completed = self._rounds.poll() if protocol.outstanding else None
            if completed is not None and self.open_round is not None:
                self.open_round.came_at = self._rounds.came_at
                self.calm = self.calm or settings.sync == "overlapped"
            if protocol.begin(length, training, completed):
                value = protocol.value()
                one = OpenRound(protocol.rounds, protocol.calls, training, length)
                self._rounds.issue(value)
                self.open_round = one  # only now: the monitor takes what the rounds tell for this one's
                if settings.sync == "bounded":
                    self._wait(settings, training, one)
        except RoundFailed as error:
            self.outcome = ENDED
            self._end(str(error), settings)
            return length
        if settings.sync == "overlapped":
            self.outcome = SERVED
            return protocol.latest()
        self.outcome = self.outcome or (SERVED if protocol.served else UNWAITED)
        self.fallbacks += not protocol.served
        return protocol.agreed()

    def late(self, one: OpenRound, waited: float) -> str:
        """What a stall report says of a call that has waited so many seconds."""
        return f"not every rank's length came within {waited:.2f} s; using this rank's own, {one.length}"

    def has_come(self, one: OpenRound) -> bool:
        """Whether a round of this encoder has come; asked by the stall monitor's thread."""
        if not one.came_at and (self.open_round is not one or self._rounds.has_come()):
            one.came_at = self._rounds.came_at or time.monotonic()
        return one.came_at > 0

    def has_failed(self) -> bool:
        """Whether a round has failed, so that there will be no more."""
        return bool(self.ended) or self._rounds.has_failed()

    @property
    def rounds(self) -> int:
        return self._protocol.rounds

    @property
    def closed(self) -> bool:
        """Whether the encoder is gone, or its process group."""
        return self._rounds.closed

    def counters(self) -> EncoderCounters:
        protocol = self._protocol
        return EncoderCounters(
            encoder=self.title,
            calls=protocol.calls,
            rounds=protocol.rounds,
            fallbacks=self.fallbacks,
            timeouts=protocol.timeouts,
            waited=self.waited,
            ended=self.ended,
        )

    def close(self) -> None:
        self._rounds.close()

    def _wait(self, settings: Settings, training: bool, one: OpenRound) -> None:
        limit = self._protocol.wait_limit(settings.timeout)
        if limit is None:
            return
        try:
            completed = self._rounds.wait(limit)
        finally:  # also where a signal handler raised
            self.waited += timedelta(seconds=time.monotonic() - one.issued_at)
        if completed is not None:
            one.came_at = time.monotonic()
            self._protocol.came_in_time(completed, training)
            self.calm = True
            self.outcome = CAME
            return
        self._protocol.timed_out()
        self.outcome = TIMEOUT
        if settings.on_timeout == "raise":
            one.told = threading.Event()
        one.gave_up_at = time.monotonic()
        if self.calm:
            self.gave_up = one  # the stall monitor reports it
        if settings.on_timeout == "raise":
            self.world.monitor.wait_for_report(one)
            late = self.late(one, one.gave_up_at - one.issued_at)
            text = one.text or f"{self.title}: call {one.call}: {late}"
            raise LengthSyncTimeout(text, one.missing)

    def _end(self, reason: str, settings: Settings) -> None:
        text = f"{self.title}: the length sync has ended at call {self._protocol.calls}"
        self.ended = reason
        self._rounds.close()
        report(logging.ERROR, f"{text}, this rank uses its own lengths from now on: {reason}")
        if settings.on_timeout == "raise":
            since = timedelta(seconds=time.monotonic() - activity.current.last.since)
            missing = self.world.monitor.wait_for_end(settings.timeout - since + _END_PATIENCE)
            raise LengthSyncTimeout(f"{text}: {reason}", missing)


class World:
    """One default process group as this rank sees it, and its encoders' syncs."""

    def __init__(self, default_group: torch.distributed.ProcessGroup, generation: int) -> None:
        # Weak: a strong reference would keep NCCL's communicators. It also tells us of destroy_process_group.
        self.group = weakref.ref(default_group, lambda _: self.close())
        self.size = torch.distributed.get_world_size()
        self.syncs: weakref.WeakKeyDictionary[torch.nn.Module, EncoderSync] = weakref.WeakKeyDictionary()
        self._all: weakref.WeakSet[EncoderSync] = weakref.WeakSet()
        self._seen: Counter[str] = Counter()
        # torchrun keeps one store over restarts, and a script may make a second process group on the same store.
        prefix = f"nemo_patches/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{generation}"
        store = torch.distributed.distributed_c10d._get_default_store()
        rank = torch.distributed.get_rank()
        self.helper = Helper(store, rank, self.size, prefix)
        self.monitor = StallMonitor(store, rank, self.size, prefix, current)

    def sync_of(self, encoder: torch.nn.Module) -> EncoderSync:
        sync = self.syncs.get(encoder)
        if sync is None:
            name = type(encoder).__name__
            # Ranks must agree on which encoder is which without asking each other: by its kind, its parameters' names
            # and, among equals, the order of first calls.
            paths = "\n".join(path for path, _ in encoder.named_parameters())
            kind = f"{name}-{hashlib.sha256(paths.encode()).hexdigest()[:16]}"
            self._seen[kind] += 1
            self._seen[name] += 1
            title = name if self._seen[name] == 1 else f"{name} #{self._seen[name]}"
            sync = EncoderSync(title, f"{kind}-{self._seen[kind]}", self)
            self.syncs[encoder] = sync
            self.add(encoder, sync)
        return sync

    def add(self, encoder: torch.nn.Module, sync: EncoderSync) -> None:
        """Have the monitor watch a sync, and let it go with its encoder and with the process group."""
        self._all.add(sync)
        self.monitor.watch(sync)
        weakref.finalize(encoder, sync.close).atexit = False

    def begin(self) -> None:
        """At the first call of an encoder that has a length sync: call the roll, start the monitor."""
        if self.helper.roll_call is None:
            monitor = self.monitor
            limit = current().timeout
            roll = RollCall(monitor.rank, self.size, limit, monitor.first_beat, monitor.has_stall)
            self.helper.call_roll(roll)
            monitor.start(roll)

    def close(self) -> None:
        self.monitor.stop()
        self.helper.stop()
        for sync in list(self._all):
            sync.close()


_END_PATIENCE = timedelta(seconds=0.4)
_METHODS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "encoder_methods.py")

_current: Settings | None = None
_world: World | None = None
_generation = 0
_given_up = False


def _give_up(error: Exception) -> None:
    """An error of ours must not reach training: say it once, and use local lengths from now on."""
    global _given_up
    if not _given_up:
        _given_up = True
        report(logging.ERROR, f"the length sync has ended by an error of its own, please report it: {error!r}")
