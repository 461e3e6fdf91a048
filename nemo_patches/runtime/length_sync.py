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
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch

from . import settings as _settings
from .gloo_rounds import Helper, RoundFailed, Rounds
from .protocol import LengthProtocol
from .reporting import raised_by_signal_handler, report
from .settings import Settings


class LengthSyncTimeout(RuntimeError):
    """Not every rank's length came in time, and on_timeout="raise" was chosen."""


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

    Waits at most the timeout. This rank's own length where the others are late, where the encoder's own
    `sync_max_audio_length` is false, and where there is no process group or only one rank. Raises LengthSyncTimeout
    if that was chosen, what a signal handler raises meanwhile, and nothing else.
    """
    length = int(seq_length)
    try:
        sync = _sync_of(encoder)
        return length if sync is None else sync.call(length, encoder)
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
    return _current


def counters() -> tuple[EncoderCounters, ...]:
    """The counters of every encoder that lives and was called under the present (or last) process group."""
    return () if _world is None else tuple(sync.counters() for sync in _world.syncs.values())


def unannounced() -> tuple[int, ...]:
    """The ranks that have not announced themselves under the present process group: unpatched, or not here yet."""
    roll_call = None if _world is None else _world.helper.roll_call
    return () if roll_call is None else roll_call.missing


class EncoderSync:
    """One encoder's length sync on this rank: the protocol, its rounds, and what is said of them."""

    def __init__(self, name: str, helper: Helper, key: str) -> None:
        self._name = name
        self._helper = helper
        self._rounds = Rounds(helper, key)
        self._protocol = LengthProtocol()
        self._fallbacks = 0
        self._waited = timedelta(0)
        self._issued_at = 0.0
        self._incident: _Incident | None = None
        self._ended = ""

    def call(self, length: int, encoder: torch.nn.Module) -> int:
        settings, protocol, training = current(), self._protocol, encoder.training
        wanted = getattr(encoder, "sync_max_audio_length", True)
        if wanted:
            self._helper.call_roll(settings.timeout)  # in every mode: a rank of stock NeMo would wait for all
        if not wanted or settings.sync == "local" or self._ended:
            protocol.calls += 1
            return length
        try:
            completed = self._rounds.poll() if protocol.outstanding else None
            if completed is not None and self._incident is not None:
                self._incident.came_at = self._incident.came_at or self._rounds.came_at
            if protocol.begin(length, training, completed):
                self._issued_at = time.monotonic()
                self._rounds.issue(protocol.value())
                if settings.sync == "bounded":
                    self._wait(settings, training)
        except RoundFailed as error:
            self._end(str(error))
            return length
        if settings.sync == "overlapped":
            return protocol.latest()
        self._fallbacks += not protocol.served
        return protocol.agreed()

    def counters(self) -> EncoderCounters:
        protocol = self._protocol
        return EncoderCounters(
            encoder=self._name,
            calls=protocol.calls,
            rounds=protocol.rounds,
            fallbacks=self._fallbacks,
            timeouts=protocol.timeouts,
            waited=self._waited,
            ended=self._ended,
        )

    def close(self) -> None:
        self._rounds.close()

    def _wait(self, settings: Settings, training: bool) -> None:
        limit = self._protocol.wait_limit(settings.timeout)
        if limit is None:
            return
        try:
            completed = self._rounds.wait(limit)
        finally:  # also where a signal handler raised
            waited = timedelta(seconds=time.monotonic() - self._issued_at)
            self._waited += waited
        if completed is not None:
            self._protocol.came_in_time(completed, training)
            if self._incident is not None:
                self._say_recovered(self._incident)
            return
        self._protocol.timed_out()
        self._rounds.watch()
        text = self._timeout_text(waited, training)
        if self._incident is None:
            self._incident = _Incident(self._issued_at)
            report(logging.WARNING, text)
        if settings.on_timeout == "raise":
            raise LengthSyncTimeout(text)

    # Who is missing, and what it is doing, belongs into this text; the stall monitor will give it.
    def _timeout_text(self, waited: timedelta, training: bool) -> str:
        kind = "training" if training else "evaluation"
        roll_call = self._helper.roll_call
        missing = roll_call.text() if roll_call and roll_call.missing else self._rounds.connecting
        return (
            f"{self._name}: {kind} call {self._protocol.calls}: not every rank's length came within "
            f"{waited.total_seconds():.2f} s; using this rank's own, {self._protocol.length}"
            + (f" ({missing})" if missing else "")
        )

    def _say_recovered(self, incident: _Incident) -> None:
        self._incident = None
        late = f"{incident.came_at - incident.since:.2f} s late" if incident.came_at else "late"
        report(
            logging.WARNING,
            f"{self._name}: recovered at call {self._protocol.calls}: every rank is in step again; "
            f"the missing length came {late}",
        )

    def _end(self, reason: str) -> None:
        self._ended = reason
        self._rounds.close()
        report(
            logging.ERROR,
            f"{self._name}: the length sync has ended at call {self._protocol.calls}, this rank uses its own lengths "
            f"from now on: {reason}",
        )


@dataclass
class _Incident:
    """From the first wait that ran out of time to the first that came in time again: one warning, one recovery."""

    since: float  # time.monotonic() of the round that was the first to be late
    came_at: float = 0.0


class World:
    """One default process group as this rank sees it, and its encoders' syncs."""

    def __init__(self, default_group: torch.distributed.ProcessGroup, generation: int) -> None:
        # Weak: a strong reference would keep NCCL's communicators. It also tells us of destroy_process_group.
        self.group = weakref.ref(default_group, lambda _: self.close())
        self.size = torch.distributed.get_world_size()
        self.syncs: weakref.WeakKeyDictionary[torch.nn.Module, EncoderSync] = weakref.WeakKeyDictionary()
        self._seen: Counter[str] = Counter()
        # torchrun keeps one store over restarts, and a script may make a second process group on the same store.
        prefix = f"nemo_patches/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{generation}"
        store = torch.distributed.distributed_c10d._get_default_store()
        self.helper = Helper(store, torch.distributed.get_rank(), self.size, prefix)

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
            sync = EncoderSync(title, self.helper, f"{kind}-{self._seen[kind]}")
            self.syncs[encoder] = sync
            weakref.finalize(encoder, sync.close).atexit = False
        return sync

    def close(self) -> None:
        self.helper.stop()
        for sync in list(self.syncs.values()):
            sync.close()


_current: Settings | None = None
_world: World | None = None
_generation = 0
_given_up = False


def _sync_of(encoder: torch.nn.Module) -> EncoderSync | None:
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


def _give_up(error: Exception) -> None:
    """An error of ours must not reach training: say it once, and use local lengths from now on."""
    global _given_up
    if not _given_up:
        _given_up = True
        report(logging.ERROR, f"the length sync has ended by an error of its own, please report it: {error!r}")
