"""One rank's trace in memory: its encoders' calls as columns of numbers, and some records in full.

Memory is bounded, whatever a file holds. A record that does not follow from those before it is left out and counted:
such a trace is damaged, and its rank is not accused for what may be a gap in the file.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.decoder import decode, structs
from nemo_patches.tracing import records

OUTCOMES = (records.CAME, records.SERVED, records.TIMEOUT, records.UNWAITED, records.LOCAL, records.ENDED)
CAME, SERVED, TIMEOUT, UNWAITED, LOCAL, ENDED = range(len(OUTCOMES))
UNSYNCED = -1  # no length sync has returned
UNKNOWN = -1  # whether a call is a training call, if its beginning was not read
OPEN, LEFT, RAISED, BARE = range(4)  # how a call ended; of a bare call only the length sync is recorded
NO_GRAPH, NO_BACKWARD, BACKWARD, BACKWARD_ENDED = range(4)  # the state of a call's backward

CUT = "its last line is not whole"

MOST_CALLS = 1 << 21  # of one encoder; older ones are dropped
MOST_ENCODERS = 64
_MOST_KEPT = 256  # exceptions, stall reports and findings each: the first ones and the last
_MOST_SAMPLES = 4096
_MOST_INPUTS, _MOST_BATCH_SIZES = 16, 256
_LONGEST_KEPT = 4000  # characters of a text, items of a list
_KEPT = defaultdict(lambda: slice(_LONGEST_KEPT), traceback=slice(-_LONGEST_KEPT, None))
_BACKWARDS_S = 1.0  # a record may be so much older than the one before, as several threads write

_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_NEVER = math.nan
_Header, _Encoder, _Enter = structs[records.Header], structs[records.Encoder], structs[records.Enter]
_Sync, _Grow, _PreEncoded = structs[records.Sync], structs[records.Grow], structs[records.PreEncoded]
_FirstLayer, _Leave, _Raised = structs[records.FirstLayer], structs[records.Leave], structs[records.Raised]
_Missing, _Memory, _CheckFinding = structs[records.Missing], structs[records.Memory], structs[records.CheckFinding]
_Lost, _End, _Stopped = structs[records.Lost], structs[records.End], structs[records.Stopped]
_Failed, _Stalled, _Sigterm = structs[records.Failed], structs[records.Stalled], structs[records.Sigterm]
_Backward, _BackwardEnded = structs[records.Backward], structs[records.BackwardEnded]
_Lengths, _KeptRecord = structs[records.Lengths], structs[records.Kept]
_OF_A_CALL = frozenset({_Enter, _Sync, _PreEncoded, _FirstLayer, _Leave, _Raised})
_DATACLASSES = {struct: kind for kind, struct in structs.items()}
# Nearly all calls have these records in this order, with or without a backward. Taking runs of them as columns needs a
# third of the time.
_RUN = re.compile(rb"(?:espfl){8,}|(?:espflbd){8,}")
_KEPT_IN = {
    _Missing: "missing",
    _Stalled: "stalled",
    _Failed: "failed",
    _CheckFinding: "findings",
}  # lists of a RankTrace
_LETTERS: dict[type[Any], int] = {type(None): ord("?"), **dict.fromkeys(_DATACLASSES, ord("?"))} | {
    _Enter: ord("e"),
    _Sync: ord("s"),
    _PreEncoded: ord("p"),
    _FirstLayer: ord("f"),
    _Leave: ord("l"),
    _Backward: ord("b"),
    _BackwardEnded: ord("d"),
    _Lengths: ord("g"),
}
_LATE = b"g"  # lengths come late from a GPU, between any other records
_Kept = TypeVar("_Kept")


class Calls:
    """The calls of one encoder on one rank, oldest first. Times but `entered` are seconds since it; NaN: never."""

    def __init__(self) -> None:
        self.n = array("q")
        self.training = array("b")
        self.entered = array("d")  # seconds since the start of this rank's trace
        self.in_ddp = array("f")  # seconds that DDP's forward had run by then; NaN if not known
        self.synced, self.pre, self.layer, self.left = array("f"), array("f"), array("f"), array("f")
        self.outcome = array("b")
        self.round = array("q")
        self.waited = array("f")
        self.ended = array("b")
        self.backward = array("b")

    def begin(self, n: int, training: int, t: float, in_ddp: float | None = None) -> None:
        if len(self.n) >= MOST_CALLS:
            for column in vars(self).values():
                del column[: MOST_CALLS // 2]
        self.n.append(n)
        self.training.append(training)
        self.entered.append(t)
        self.in_ddp.append(_NEVER if in_ddp is None else in_ddp)
        self.synced.append(_NEVER)
        self.pre.append(_NEVER)
        self.layer.append(_NEVER)
        self.left.append(_NEVER)
        self.outcome.append(UNSYNCED)
        self.round.append(self.round[-1] if self.round else 0)
        self.waited.append(0.0)
        self.ended.append(OPEN)
        self.backward.append(NO_GRAPH)


class Input(NamedTuple):
    """The properties of a call's input that should be the same on all ranks, except for the device's number."""

    features: int
    dtype: str
    device: str
    path: str = ""
    group: bool = True  # whether there was a process group

    def __str__(self) -> str:
        bypass = f", {records.BYPASS}" if self.path == records.BYPASS else ""
        group = "" if self.group else ", no process group"
        return f"{self.features} features, {self.dtype}, {self.device.partition(':')[0]}{bypass}{group}"


@dataclass
class Track:
    """One encoder of one rank."""

    info: records.Encoder
    room: int  # frames that its positional encoding has room for; 0 if not known
    calls: Calls = field(default_factory=Calls)
    given: tuple[Any, ...] = ()  # the last call's input, as recorded
    input: Input = Input(-1, "", "")  # noqa: RUF009  # the same; it is immutable
    inputs: dict[Input, int] = field(default_factory=dict)  # how many calls had it
    batches: dict[int, int] = field(default_factory=dict)  # how many training calls had a batch of that size
    result: int = 0  # of the last length sync
    backwards: int | None = None  # begun, as far as they were read; None before the first beginning of a call
    settled: int = 0  # calls before this one get no backward any more: that of a later call has ended
    backward_ended: bool = False  # since the last call was entered
    deferred: bool = False  # some backward began only after a later call had been entered
    leapt_to: int = 0  # a call number that does not follow; believed once the next record agrees
    round_leapt_to: int = 0  # likewise, a round
    damaged_at: int = -1  # the last call at which the trace is not as a recorder writes it

    @property
    def last(self) -> int:
        """The number of its last call; 0 before the first."""
        return self.calls.n[-1] if self.calls.n else 0

    def count_input(self, given: tuple[Any, ...], times: int) -> None:
        if given != self.given:  # seldom, and making an Input is slow
            features, dtype, device, path, group = self.given = given
            self.input = Input(features, dtype[:40], device[:40], path[:40], group is not False)
        if self.input in self.inputs or len(self.inputs) < _MOST_INPUTS:
            self.inputs[self.input] = self.inputs.get(self.input, 0) + times

    def count_batch(self, size: int, times: int) -> None:
        if size in self.batches or len(self.batches) < _MOST_BATCH_SIZES:
            self.batches[size] = self.batches.get(size, 0) + times


class _Run:
    """Whole calls of one encoder that follow each other, as columns of numbers."""

    def __init__(self, run: Sequence[Any], size: int) -> None:
        self.of_kind = [run[at::size] for at in range(size)]  # reading one class's fields at a time is twice as fast
        self.has_backward = size > 5
        self.enters, self.syncs = self.of_kind[0], self.of_kind[1]
        self.numbers = [record.n for record in self.enters]
        self.outcomes = [_CODES.get(record.outcome, LOCAL) for record in self.syncs]
        self.rounds = [record.round for record in self.syncs]
        self.waited = [record.waited for record in self.syncs]
        self.times = np.array([[record.t for record in of_one] for of_one in self.of_kind])

    def follows(self, track: Track, last: float) -> bool:
        """Whether they follow that encoder's calls so far, and the trace's last record, with nothing odd."""
        calls, numbers, first = track.calls, self.numbers, self.enters[0]
        if any({record.e for record in of_one} != {first.e} for of_one in self.of_kind):
            return False
        follows = not calls.n or (calls.n[-1] + 1 == numbers[0] and calls.ended[-1] != OPEN)
        in_order = numbers == list(range(numbers[0], numbers[0] + len(numbers))) and all(
            [record.n for record in of_one] == numbers for of_one in self.of_kind[1:]
        )
        if not follows or not in_order or len(calls.n) + len(numbers) > MOST_CALLS:
            return False
        times = self.times.ravel(order="F")
        if times[0] < last - _BACKWARDS_S or (times[1:] < times[:-1] - _BACKWARDS_S).any():
            return False
        steps = {after - number for number, after in pairwise([calls.round[-1] if calls.round else 0, *self.rounds])}
        if not steps <= {0, 1} or LOCAL in self.outcomes or ENDED in self.outcomes or min(self.waited) < 0:
            return False
        backwards = [first.backwards + (index if self.has_backward else 0) for index in range(len(numbers))]
        if [record.backwards for record in self.enters] != backwards or track.backwards not in (None, backwards[0]):
            return False
        given = _given(first)
        return all(_given(record) == given for record in self.enters)

    def extend(self, track: Track) -> None:
        calls, many = track.calls, len(self.numbers)
        track.backwards = self.enters[-1].backwards + self.has_backward
        if self.has_backward:
            track.settled, track.backward_ended = self.numbers[-1], True
        elif track.backward_ended:
            track.settled, track.backward_ended = self.numbers[0], False
        track.result, track.round_leapt_to = self.syncs[-1].result, 0
        track.count_input(_given(self.enters[0]), many)
        sizes = Counter(record.shape[0] for record in self.enters if record.training and record.shape)
        for batch_size, times_seen in sizes.items():
            track.count_batch(batch_size, times_seen)
        calls.entered.frombytes(self.times[0].tobytes())
        for column, moments in zip((calls.synced, calls.pre, calls.layer, calls.left), self.times[1:5], strict=True):
            column.frombytes((moments - self.times[0]).astype(np.float32).tobytes())
        calls.n.extend(self.numbers)
        calls.training.extend([record.training for record in self.enters])
        calls.in_ddp.extend([_NEVER if record.in_ddp is None else record.in_ddp for record in self.enters])
        calls.outcome.extend(self.outcomes)
        calls.round.extend(self.rounds)
        calls.waited.extend(self.waited)
        calls.ended.extend([LEFT] * many)
        if self.has_backward:
            calls.backward.extend([BACKWARD_ENDED] * many)
        else:
            calls.backward.extend([NO_BACKWARD if record.graph else NO_GRAPH for record in self.of_kind[4]])


@dataclass
class RankTrace:
    """The records of one process start of one rank. `take` adds the next ones."""

    header: records.Header
    tracks: dict[int, Track] = field(default_factory=dict)
    last: float = 0.0  # when the latest record was made, in seconds since `started`
    last_kind: str = ""
    ended: float | None = None
    end: records.End | None = None
    sigterm_stack: list[str] | None = None  # lines that faulthandler wrote on SIGTERM; None if that has not come
    sigterm_at: float | None = None  # seconds since `started`; a file that was copied may tell a later time
    after_sigterm: bool = False  # records follow that stack
    stopped: str = ""  # why the trace was stopped while the process went on; empty if it was not
    count: int = 0
    bad_lines: int = 0
    odd_records: int = 0  # that do not follow from those before
    lost: int = 0
    mixed: bool = False  # another start's lines are in it
    cut: bool = False  # its last line is not whole
    gap: str = ""  # which of its parts is missing
    raised: list[records.Raised] = field(default_factory=list)
    failed: list[records.Failed] = field(default_factory=list)
    missing: list[records.Missing] = field(default_factory=list)
    stalled: list[records.Stalled] = field(default_factory=list)
    findings: list[records.CheckFinding] = field(default_factory=list)
    memory: list[tuple[float, int, int, int]] = field(default_factory=list)  # t; bytes: RSS, allocated, reserved
    gpu: records.Memory | None = None  # the last sample that has its utilisation
    _skip: int = 0
    _stride: int = 1

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def is_over(self) -> bool:
        return self.ended is not None or bool(self.stopped)

    @property
    def damage(self) -> str:
        """What is wrong with its file, in words; empty if nothing is."""
        damages = [f"{self.bad_lines} lines are no records"] if self.bad_lines else []
        damages += [f"{self.odd_records} records do not follow from those before"] if self.odd_records else []
        damages += [f"{self.lost} records were not written, because the disk could not keep up"] if self.lost else []
        damages += ["lines of another process are in it"] if self.mixed else []
        damages += [CUT] if self.cut else []
        damages += [self.gap] if self.gap else []
        return "; ".join(damages)

    def take(self, batch: Sequence[records.Record | None]) -> None:
        """Add the next records; None stands for a line that is no record."""
        letters, ordered = bytes(map(_LETTERS.__getitem__, map(type, batch))), batch
        if _LATE in letters:
            letters = letters.replace(_LATE, b"")
            ordered = [record for record in batch if type(record) is not _Lengths]
        taken = 0
        for run in _RUN.finditer(letters):
            begin, end = run.span()
            self._take_each(ordered[taken:begin])
            if not self._take_run(ordered[begin:end], 7 if letters[end - 1] == ord("d") else 5):
                self._take_each(ordered[begin:end])
            taken = end
        self._take_each(ordered[taken:])
        self.count += len(batch)
        kinds = (_DATACLASSES[type(record)].k for record in reversed(batch) if record is not None)
        self.last_kind = next(kinds, self.last_kind)

    def _take_run(self, run: Sequence[Any], size: int) -> bool:
        """Take whole calls of `size` records each; if anything is odd, take nothing and return False."""
        track = self.tracks.get(run[0].e)
        whole = _Run(run, size)
        if track is None or not whole.follows(track, self.last):
            return False
        whole.extend(track)
        self.last = run[-1].t
        return True

    def _take_each(self, batch: Sequence[records.Record | None]) -> None:
        tracks = self.tracks
        last = self.last
        # The open call is kept in local variables: most of the millions of records are about it.
        open_e = open_n = -1
        entered, calls = 0.0, Calls()
        record: Any
        for record in batch:
            kind = type(record)
            if kind in _OF_A_CALL:
                e, n, t = record.e, record.n, record.t
                if n == open_n and e == open_e and t >= last - _BACKWARDS_S:
                    last = t
                    if kind is _PreEncoded:
                        calls.pre[-1] = t - entered
                        continue
                    if kind is _FirstLayer:
                        calls.layer[-1] = t - entered
                        continue
                    if kind is not _Enter:
                        self._within(tracks[e], record, t - entered)
                        if calls.ended[-1]:
                            open_n = -1
                        continue
                elif e in tracks:
                    if t < last - _BACKWARDS_S:
                        self._odd(tracks[e])
                    last = t
                if e in tracks:
                    self._begin_or_not(tracks[e], record)
                    calls = tracks[e].calls
                    if calls.n and calls.ended[-1] == OPEN:
                        open_e, open_n, entered = e, calls.n[-1], calls.entered[-1]
                    else:
                        open_n = -1
                    continue
            self.last = last
            if record is None:
                self.bad_lines += 1
                self._damage_all()
            else:
                self._other(kind, record)
            last = self.last
        self.last = last

    def _begin_or_not(self, track: Track, record: Any) -> None:
        """Take a record that is not about the call that was open last: the next call's beginning, or an odd record."""
        calls, n = track.calls, record.n
        if type(record) is _Enter and (not calls.n or (calls.n[-1] + 1 == n and calls.ended[-1] != OPEN)):
            self._enter(track, record)
        elif type(record) is not _Enter and calls.n and calls.n[-1] == n and calls.ended[-1] == OPEN:
            self._within(track, record, record.t - calls.entered[-1])
        else:
            self._out_of_order(track, record)

    def _enter(self, track: Track, record: Any) -> None:
        if track.backwards not in (None, record.backwards):
            self._odd(track)  # the record of a backward is lost
        track.backwards = record.backwards
        if track.backward_ended:
            track.settled, track.backward_ended = record.n, False
        track.calls.begin(record.n, record.training, record.t, record.in_ddp)
        track.count_input(_given(record), 1)
        if record.training and record.shape:
            track.count_batch(record.shape[0], 1)

    def _within(self, track: Track, record: Any, after: float) -> None:
        """Take a record of the open call, made `after` seconds after its beginning."""
        calls, kind = track.calls, type(record)
        if kind is _Sync:
            code = _CODES.get(record.outcome)
            if code is None or calls.outcome[-1] != UNSYNCED or record.waited < 0:
                self._odd(track)
                return
            if code not in (LOCAL, ENDED):
                if not self._follows(track, record.round):
                    self._odd(track)
                    return
                calls.round[-1] = record.round
            calls.synced[-1], calls.outcome[-1], calls.waited[-1] = after, code, record.waited
            track.result = record.result
        elif kind is _Leave:
            calls.left[-1], calls.ended[-1] = after, LEFT
            calls.backward[-1] = NO_BACKWARD if record.graph else NO_GRAPH
            self._compare(track)
        elif kind is _PreEncoded:
            calls.pre[-1] = after
        elif kind is _FirstLayer:
            calls.layer[-1] = after
        else:
            calls.left[-1], calls.ended[-1] = after, RAISED
            _keep(self.raised, _kept(record))

    def _follows(self, track: Track, number: int) -> bool:
        """Whether a call may have this round: it issued the next one, or none. A leap counts once the next agrees."""
        before = track.calls.round[-1]
        from_here = before == 0 and self.header.part > 0
        leapt, track.round_leapt_to = track.round_leapt_to, 0
        anew = number == 1 < before  # under a new process group
        if number - before in (0, 1) or anew or from_here or (leapt and number - leapt in (0, 1)):
            return True
        track.round_leapt_to = number
        return False

    def _compare(self, track: Track) -> None:
        """Notice lost lines: a call that has ended records the same phases as the call before it."""
        calls = track.calls
        if not math.isnan(calls.synced[-1] + calls.pre[-1] + calls.layer[-1]):  # all are there
            return
        if len(calls.n) < 2 or calls.ended[-2] != LEFT or track.damaged_at == calls.n[-2]:
            return
        for column in (calls.synced, calls.pre, calls.layer):
            if math.isnan(column[-1]) and not math.isnan(column[-2]):
                self._odd(track)

    def _out_of_order(self, track: Track, record: Any) -> None:
        """Take a record of a call that is not open: lines before it are lost, or it is from another process."""
        calls, n, last = track.calls, record.n, track.last
        if type(record) is _Sync and n == last + 1 and (not calls.n or calls.ended[-1] != OPEN):
            calls.begin(n, UNKNOWN, record.t)  # of a compiled encoder nothing else is recorded
            calls.ended[-1] = BARE
            self._within(track, record, 0.0)
            return
        if calls.n or not self.header.part:  # a later part may begin within a call
            self._odd(track)
        if n == last and calls.n and calls.ended[-1] == BARE and type(record) is not _Enter:
            # The call was no bare one: its beginning is lost.
            calls.ended[-1] = OPEN
            self._within(track, record, record.t - calls.entered[-1])
        if n <= last:
            return
        if calls.n and n > last + 1 and track.leapt_to != n:
            track.leapt_to = n  # a single leap is not believed
            return
        if type(record) is _Enter:
            self._enter(track, record)
        else:
            calls.begin(n, UNKNOWN, record.t)
            self._within(track, record, 0.0)
        if track.damaged_at >= 0:
            track.damaged_at = n

    def _other(self, kind: type[Any], record: Any) -> None:
        if kind is _Header:
            mine = self.header
            self.mixed |= (record.rank, record.pid, record.started) != (mine.rank, mine.pid, mine.started)
        elif kind is _KeptRecord:
            self._take_kept(record.record)
        elif kind is _Encoder:  # a later part repeats it with its first time
            self._encoder(record)
        else:
            if record.t < self.last - _BACKWARDS_S:
                self._stray()
            self.last = record.t
            self._timed(kind, record)

    def _timed(self, kind: type[Any], record: Any) -> None:
        if kind is _Backward or kind is _BackwardEnded:
            self._backward(kind, record)
        elif kind in _KEPT_IN:
            _keep(getattr(self, _KEPT_IN[kind]), _kept(record))
        elif kind is _Memory:
            self._memory(record)
        elif kind is _Grow and record.e in self.tracks:
            track = self.tracks[record.e]
            track.room = max(track.room, record.new)
        elif kind is _Sigterm:
            self.sigterm_at = record.t
        elif kind is _Lost:
            self.lost += max(record.count, 1)
            self._damage_all()
        elif kind is _End:
            self.ended, self.end = record.t, _kept(record)
        elif kind is _Stopped:
            self.stopped = safe(record.reason) or "no reason given"
        else:  # a record of an encoder that has no `encoder` record
            self._stray()

    def _memory(self, record: Any) -> None:
        if record.utilisation is not None:
            self.gpu = _kept(record)
        self._skip -= 1
        if self._skip < 0:
            self._skip = self._stride - 1
            self.memory.append((record.t, record.rss, record.allocated or 0, record.reserved or 0))
            if len(self.memory) > _MOST_SAMPLES:
                del self.memory[::2]
                self._stride *= 2

    def _take_kept(self, line: str) -> None:
        """Take a record of a part that is gone, which the head of a later part has kept."""
        (record,) = decode(line.replace("\n", " ").encode()) or [None]
        kept: dict[type[Any], list[Any]] = {_Raised: self.raised, _Failed: self.failed, _CheckFinding: self.findings}
        if type(record) not in kept:
            self.bad_lines += 1
        elif (read := _kept(record)) not in kept[type(record)]:  # several heads may repeat it
            _keep(kept[type(record)], read)

    def _backward(self, kind: type[Any], record: Any) -> None:
        if (track := self.tracks.get(record.e)) is None:
            self.odd_records += 1
            return
        if track.backwards is not None:
            track.backwards += kind is _Backward
        index = len(track.calls.n) - 1 - (track.last - record.n)
        if not 0 <= index < len(track.calls.n) or track.calls.n[index] != record.n:
            return  # of a call in a part that is gone
        if kind is _Backward:
            track.calls.backward[index] = BACKWARD
            track.deferred |= record.n != track.last
        elif track.calls.backward[index] == BACKWARD:
            track.calls.backward[index], track.backward_ended = BACKWARD_ENDED, True
        else:
            self._odd(track)

    def _encoder(self, record: Any) -> None:
        track = self.tracks.get(record.e)
        if track is not None:  # the latest record holds; the name may be another one under a process group
            track.info = _kept(record)
        elif len(self.tracks) < MOST_ENCODERS:
            self.tracks[record.e] = Track(_kept(record), record.pos_emb_max_len or 0)
        else:
            self._stray()

    def _odd(self, track: Track) -> None:
        self.odd_records += 1
        track.damaged_at = track.last

    def _stray(self) -> None:
        """Count a record that does not follow from those before, and may damage any encoder's calls."""
        self.odd_records += 1
        self._damage_all()

    def _damage_all(self) -> None:
        for track in self.tracks.values():
            track.damaged_at = track.last


def _given(record: Any) -> tuple[Any, ...]:
    """The properties of a call's input, by the record of its beginning."""
    shape = record.shape
    return (shape[1] if len(shape) > 1 else -1, record.dtype, record.device, record.path, record.group)


def _keep(kept: list[_Kept], record: _Kept) -> None:
    if len(kept) >= _MOST_KEPT:
        del kept[_MOST_KEPT // 2]
    kept.append(record)


def _kept(record: Any) -> Any:
    """The record as a dataclass of tracing/records.py, with bounded texts and lists; of a traceback the end."""
    fields = ((name, getattr(record, name)) for name in record.__struct_fields__)
    bounded = {name: value[_KEPT[name]] if isinstance(value, str | list) else value for name, value in fields}
    return _DATACLASSES[type(record)](**bounded)
