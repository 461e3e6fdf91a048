"""The last encoder calls of this process, kept in memory without a trace: the contents of a dump.

On the training thread: two clock readings and one tuple for each call. All else is done when a dump is made.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from nemo_patches.stall import stacks
from nemo_patches.sync import length_sync
from nemo_patches.sync.events import CallBegan, CallLeft, Group, GroupBegan, Grown, WatchedRounds
from nemo_patches.tracing import records
from nemo_patches.tracing.encoder_facts import active_ddp
from nemo_patches.tracing.encoder_state import EncoderState
from nemo_patches.tracing.recording import Recording
from nemo_patches.tracing.records import Call, Failed, Grow, Missing, Raised, Record, Stalled

MOST_CALLS = 2000
# Each kind by itself: calls without end do not push out the exception that they came after.
_MOST: dict[type[Record], int] = {Grow: 100, Missing: 16, Stalled: 16, Failed: 8}
_MOST_ENCODERS = 64
# A call, until a dump is made: when its length sync returned, e, n, whether it trains; then CallLeft, from outcome on.
_Row = tuple[float, int, int, bool, str, int, timedelta, int, int]


class _Encoder(EncoderState):
    """What is known of one encoder's sync. place: the function that called it: file and name."""

    def __init__(self, e: int, sync: WatchedRounds) -> None:
        super().__init__(e, sync.title, 0)
        self.sync, self.place = sync, stacks.encoder_function()
        self.reference: Callable[[], torch.nn.Module | None] = lambda: None  # weak; known from the first call's end on


class RecentCalls(Recording):
    """Of one process group: the next one begins anew. The training thread writes; a dump is made on any thread."""

    def __init__(self, group_began: Callable[[], object], went_on: Callable[[], object]) -> None:
        """went_on: called at the first encoder call after an exception that was to end the process."""
        super().__init__()
        self._group_began, self._went_on = group_began, went_on
        self._begin_anew(None)

    def _begin_anew(self, group: Group | None) -> None:
        self.group = group
        self.started, self._started_at = round(time.time(), 6), time.monotonic()
        self.thread = self.native_thread = 0  # that made the last call; the kernel's number of it
        self._open: dict[int, tuple[_Encoder, int, float]] = {}  # in its length sync, by thread: n, when it began
        self._latest: _Encoder | None = None
        self._encoders: dict[WatchedRounds, _Encoder] = {}
        self._count = 0  # of encoders
        self._calls: deque[_Row] = deque(maxlen=MOST_CALLS)
        self._others = {kind: deque[Any](maxlen=most) for kind, most in _MOST.items()}
        self.failed = ""

    @property
    def in_length_sync(self) -> bool:
        """Whether a call's length sync has not returned yet."""
        return bool(self._open)

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Those of what a trace and a dump record alike, and what begins."""
        return super().handlers() | {GroupBegan: self._process_group_began, CallBegan: self._call_began}

    def look_for_group(self) -> None:
        """Any thread: the process group may have begun before anybody listened to that."""
        if self.group is None and (group_syncs := length_sync.process.group_syncs) is not None:
            self._begin_anew(group_syncs.group)

    def _process_group_began(self, event: GroupBegan) -> None:
        if self.group is not event.group:
            self._begin_anew(event.group)
            self._group_began()

    def forget(self) -> None:
        """In a forked child: the calls were the parent's."""
        self._begin_anew(None)

    # What follows runs on the training thread.

    def _call_began(self, event: CallBegan) -> None:
        sync = event.sync
        if sync.group is not self.group:
            self._begin_anew(sync.group)
            self._group_began()
        if self.failed:
            self.failed = ""
            self._went_on()
        encoder, thread = self._encoders.get(sync) or self._first_call(sync), threading.get_ident()
        self._latest, self.thread, self.native_thread = encoder, thread, threading.get_native_id()
        self._open[thread] = encoder, max(event.call, encoder.number + 1), time.monotonic()

    def _first_call(self, sync: WatchedRounds) -> _Encoder:
        self._count += 1
        if len(self._encoders) >= _MOST_ENCODERS:  # a script may make copies without end
            self._encoders.pop(next(iter(self._encoders)))
        encoder = self._encoders[sync] = _Encoder(self._count, sync)
        return encoder

    def call_left(self, event: CallLeft) -> None:
        if not event.outcome:  # an exception of a signal handler: it has not come out of its sync
            return
        open_, module = self._open.pop(threading.get_ident(), None), event.encoder
        if open_ is None:
            return
        encoder, n, _ = open_
        encoder.number = n
        if encoder.reference() is not module:  # an encoder may take another one's place
            encoder.reference = weakref.ref(module)
        if not encoder.ddp and active_ddp() is not None:
            encoder.is_now_inside_ddp(module)
        self._calls.append((time.monotonic(), encoder.e, n, module.training, *event[2:]))

    def grown(self, event: Grown) -> None:
        encoder = self._latest
        if encoder is not None and encoder.reference() is event.encoder:
            self.put(Grow(self.now(), encoder.e, encoder.number, event.old, event.new))

    # What follows runs on any thread.

    def now(self) -> float:
        return self._seconds(time.monotonic())

    def put(self, record: Record) -> None:
        self._others[type(record)].append(record)

    def count(self) -> int:
        return len(self._calls)

    def records(self, error: BaseException | None) -> list[Record]:
        """The encoders that are alive, and their calls. error: what ends the process, if something does."""
        encoders, infos = {}, []
        for encoder in list(self._encoders.values()):
            if (module := encoder.reference()) is not None:
                encoders[encoder.e] = encoder
                infos.append(encoder.facts(module, 0.0))
        of_others = [record for kept in self._others.values() for record in list(kept)]
        known = {0, *encoders}  # 0: what is not of an encoder
        found = [record for record in (*self._known_calls(error), *of_others) if getattr(record, "e", 0) in known]
        last = [self._raised(error)] if error is not None and self._raised_inside(error) else []
        return [*infos, *sorted(found, key=lambda record: record.t), *last]

    def _known_calls(self, error: BaseException | None) -> list[Call]:
        # In this order: what is open may be done by now.
        open_, rows, latest = list(self._open.values()), list(self._calls), self._latest
        calls = []
        for at, e, n, training, outcome, round_, waited, local, result in rows:
            waited_s = round(waited.total_seconds(), 6)
            calls.append(Call(self._seconds(at), e, n, training, False, outcome, round_, waited_s, local, result))
        done = {(call.e, call.n) for call in calls}
        if still_open := [one for one in open_ if (one[0].e, one[1]) not in done]:
            calls += [self._in_length_sync(*one) for one in still_open]
        elif calls and latest is not None and latest.e == calls[-1].e:
            inside = stacks.runs(self.thread, latest.place) if error is None else self._raised_inside(error)
            calls[-1] = Call(**{**vars(calls[-1]), "inside": inside})
        return calls

    def _in_length_sync(self, encoder: _Encoder, n: int, began_at: float) -> Call:
        module, round_ = encoder.reference(), encoder.sync.round
        training = module.training if module is not None else round_.training if round_ is not None else None
        return Call(self._seconds(began_at), encoder.e, n, training, True, "", 0, 0.0, 0, 0)

    def _raised_inside(self, error: BaseException) -> bool:
        """Whether an exception has come out of the encoder that was called last."""
        place = self._latest.place if self._latest is not None else ("", "")
        codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
        return any((code.co_filename, code.co_name) == place for code in codes)

    def _raised(self, error: BaseException) -> Raised:
        encoder, n, _ = self._open.get(self.thread, (self._latest, 0, 0.0))
        assert encoder is not None
        return records.raised(self.now(), encoder.e, n or encoder.number, error)

    def _seconds(self, monotonic: float) -> float:
        return round(monotonic - self._started_at, 6)
