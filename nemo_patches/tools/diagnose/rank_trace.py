"""One rank's trace in memory: its encoders' calls as columns of numbers, and some records in full.

Memory is bounded, whatever a file holds. A record that does not follow from those before it is left
out and counted: such a trace is damaged, and its rank is not accused for what may be a gap in the
file.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nemo_patches.text import safe
from nemo_patches.tools.diagnose.decoder import structs
from nemo_patches.tracing import records

OUTCOMES = (
    records.CAME,
    records.SERVED,
    records.TIMEOUT,
    records.UNWAITED,
    records.LOCAL,
    records.ENDED,
)
CAME, SERVED, TIMEOUT, UNWAITED, LOCAL, ENDED = range(len(OUTCOMES))
UNSYNCED = -1  # no length sync has returned
UNKNOWN = -1  # whether a call is a training call, if its beginning was not read
OPEN, LEFT, RAISED, BARE = range(
    4
)  # how a call ended; of a bare call only the length sync is recorded

CUT = "its last line is not whole"

MOST_CALLS = 1 << 21  # of one encoder; older ones are dropped
MOST_ENCODERS = 64
_MOST_KEPT = 256  # exceptions and stall reports each: the first ones and the last
_LONGEST_KEPT = 4000  # characters of a text, items of a list
_KEPT = defaultdict(lambda: slice(_LONGEST_KEPT), traceback=slice(-_LONGEST_KEPT, None))
_BACKWARDS_S = (
    1.0  # a record may be so much older than the one before, as several threads write
)

_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_NEVER = math.nan
_Header, _Enter, _Sync = (
    structs[records.Header],
    structs[records.Enter],
    structs[records.Sync],
)
_Leave, _Raised = structs[records.Leave], structs[records.Raised]
_Stalled, _End = structs[records.Stalled], structs[records.End]
_OF_A_CALL = frozenset({_Enter, _Sync, _Leave, _Raised})
_DATACLASSES = {struct: kind for kind, struct in structs.items()}
_Kept = TypeVar("_Kept")


class Calls:
    """The calls of one encoder on one rank, oldest first. Times but `entered` are seconds since it;
    NaN: never.
    """

    def __init__(self) -> None:
        self.n = array("q")
        self.training = array("b")
        self.entered = array("d")  # seconds since the start of this rank's trace
        self.synced = array("f")
        self.left = array("f")
        self.outcome = array("b")
        self.round = array("q")
        self.waited = array("f")
        self.ended = array("b")

    def begin(self, n: int, training: int, t: float) -> None:
        if len(self.n) >= MOST_CALLS:
            for column in vars(self).values():
                del column[: MOST_CALLS // 2]
        self.n.append(n)
        self.training.append(training)
        self.entered.append(t)
        self.synced.append(_NEVER)
        self.left.append(_NEVER)
        self.outcome.append(UNSYNCED)
        self.round.append(self.round[-1] if self.round else 0)
        self.waited.append(0.0)
        self.ended.append(OPEN)


@dataclass
class Track:
    """One encoder of one rank."""

    name: str
    calls: Calls = field(default_factory=Calls)
    leapt_to: int = (
        0  # a call number that does not follow; believed once the next record agrees
    )
    damaged_at: int = (
        -1
    )  # the last call at which the trace is not as a recorder writes it

    @property
    def last(self) -> int:
        """The number of its last call; 0 before the first."""
        return self.calls.n[-1] if self.calls.n else 0

    @property
    def is_open(self) -> bool:
        return bool(self.calls.n) and self.calls.ended[-1] == OPEN


@dataclass
class RankTrace:
    """The records of one process start of one rank. `take` adds the next ones."""

    header: records.Header
    tracks: dict[str, Track] = field(default_factory=dict)
    last: float = 0.0  # when the latest record was made, in seconds since `started`
    last_kind: str = ""
    ended: float | None = None
    end: records.End | None = None
    stopped: str = (
        ""  # why the trace ends while the process goes on; empty if it does not
    )
    count: int = 0
    bad_lines: int = 0
    odd_records: int = 0  # that do not follow from those before
    round: int = 0  # the latest that it has issued
    round_leapt_to: int = 0  # one that does not follow; believed once the next agrees
    mixed: bool = False  # another start's lines are in it
    cut: bool = False  # its last line is not whole
    gap: str = ""  # why it could not be read to its end
    raised: list[records.Raised] = field(default_factory=list)  # by calls
    failed: list[records.Raised] = field(
        default_factory=list
    )  # that nobody caught, or out of the trainer
    missing: list[records.Stalled] = field(
        default_factory=list
    )  # stall reports on a call
    stalled: list[records.Stalled] = field(default_factory=list)  # on the job

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def is_over(self) -> bool:
        """A trace that is full tells nothing of its process, which goes on."""
        return self.ended is not None or self.stopped not in ("", records.AT_ITS_SIZE)

    @property
    def damage(self) -> str:
        """What is wrong with its file, in words; empty if nothing is."""
        damages = [f"{self.bad_lines} lines are no records"] if self.bad_lines else []
        damages += (
            [f"{self.odd_records} records do not follow from those before"]
            if self.odd_records
            else []
        )
        damages += ["lines of another process are in it"] if self.mixed else []
        damages += [CUT] if self.cut else []
        damages += [self.gap] if self.gap else []
        return "; ".join(damages)

    def take(self, batch: Sequence[records.Record | None]) -> None:
        """Add the next records; None stands for a line that is no record."""
        for record in batch:
            if record is None:
                self.bad_lines += 1
                self._damage_all()
            elif type(record) is _Header:
                self._header(record)
            else:
                self._timed(record)
        self.count += len(batch)
        kinds = (
            _DATACLASSES[type(record)].k
            for record in reversed(batch)
            if record is not None
        )
        self.last_kind = next(kinds, self.last_kind)

    def _header(self, record: Any) -> None:
        mine = self.header
        self.mixed |= (record.rank, record.pid, record.started) != (
            mine.rank,
            mine.pid,
            mine.started,
        )

    def _timed(self, record: Any) -> None:
        kind = type(record)
        goes_back = record.t < self.last - _BACKWARDS_S
        self.last = record.t
        track = self._track(record.e) if kind in _OF_A_CALL and record.e else None
        if goes_back:
            self._odd(track) if track is not None else self._stray()
        if track is not None:
            self._of_call(track, record)
        elif kind is _Raised:
            _keep(self.failed, _kept(record))
        elif kind is _Stalled:
            _keep(self.missing if record.e else self.stalled, _kept(record))
        elif kind is _End and record.reason:
            self.stopped = safe(record.reason)
        elif kind is _End:
            self.ended, self.end = record.t, _kept(record)

    def _track(self, name: str) -> Track | None:
        track = self.tracks.get(name)
        if track is None and len(self.tracks) < MOST_ENCODERS:
            track = self.tracks[name] = Track(name[:_LONGEST_KEPT])
        elif track is None:
            self._stray()
        return track

    def _of_call(self, track: Track, record: Any) -> None:
        is_next = record.n == track.last + 1 and not track.is_open
        if type(record) is _Enter and is_next:
            track.calls.begin(record.n, record.training, record.t)
        elif type(record) is not _Enter and track.is_open and record.n == track.last:
            self._within(track, record, record.t - track.calls.entered[-1])
        else:
            self._out_of_order(track, record)

    def _within(self, track: Track, record: Any, after: float) -> None:
        """Take a record of the open call, made `after` seconds after its beginning."""
        calls = track.calls
        if type(record) is _Sync:
            self._synced(track, record, after)
        elif type(record) is _Leave:
            calls.left[-1], calls.ended[-1] = after, LEFT
            had_sync = (
                len(calls.n) > 1
                and calls.ended[-2] == LEFT
                and calls.outcome[-2] != UNSYNCED
            )
            if (
                calls.outcome[-1] == UNSYNCED
                and had_sync
                and track.damaged_at != calls.n[-2]
            ):
                self._odd(track)  # its line is lost
        else:
            calls.left[-1], calls.ended[-1] = after, RAISED
            _keep(self.raised, _kept(record))

    def _synced(self, track: Track, record: Any, after: float) -> None:
        calls, code = track.calls, _CODES.get(record.outcome)
        if code is None or calls.outcome[-1] != UNSYNCED or record.waited < 0:
            self._odd(track)
            return
        if code not in (LOCAL, ENDED):
            if not self._follows(record.round):
                self._odd(track)
                return
            calls.round[-1] = record.round
        calls.synced[-1], calls.outcome[-1], calls.waited[-1] = (
            after,
            code,
            record.waited,
        )

    def _follows(self, number: int) -> bool:
        """Whether a call may have this round: it issued the next one, or none. A leap counts once
        the next agrees.

        All encoders share the rounds.
        """
        before = self.round
        leapt = self.round_leapt_to
        self.round_leapt_to = 0
        anew = number == 1 < before  # under a new process group
        # A trace may begin while a job trains.
        if (
            before == 0
            or number - before in (0, 1)
            or anew
            or (leapt and number - leapt in (0, 1))
        ):
            self.round = number
            return True
        self.round_leapt_to = number
        return False

    def _out_of_order(self, track: Track, record: Any) -> None:
        """Take a record of a call that is not open: lines before it are lost, or it is from another
        process.
        """
        calls, n, last = track.calls, record.n, track.last
        if type(record) is _Sync and n == last + 1 and not track.is_open:
            calls.begin(
                n, UNKNOWN, record.t
            )  # of a compiled encoder nothing else is recorded
            calls.ended[-1] = BARE
            self._within(track, record, 0.0)
            return
        self._odd(track)
        if (
            n == last
            and calls.n
            and calls.ended[-1] == BARE
            and type(record) is not _Enter
        ):
            # The call was no bare one: its beginning is lost.
            calls.ended[-1] = OPEN
            self._within(track, record, record.t - calls.entered[-1])
        if n <= last:
            return
        if calls.n and n > last + 1 and track.leapt_to != n:
            track.leapt_to = n  # a single leap is not believed
            return
        if type(record) is _Enter:
            track.calls.begin(record.n, record.training, record.t)
        else:
            calls.begin(n, UNKNOWN, record.t)
            self._within(track, record, 0.0)
        track.damaged_at = n

    def _odd(self, track: Track) -> None:
        self.odd_records += 1
        track.damaged_at = track.last

    def _stray(self) -> None:
        """Count a record that does not follow from those before, and may damage any encoder's
        calls.
        """
        self.odd_records += 1
        self._damage_all()

    def _damage_all(self) -> None:
        for track in self.tracks.values():
            track.damaged_at = track.last


def _keep(kept: list[_Kept], record: _Kept) -> None:
    if len(kept) >= _MOST_KEPT:
        del kept[_MOST_KEPT // 2]
    kept.append(record)


def _kept(record: Any) -> Any:
    """The record as a dataclass of tracing/records.py, with bounded texts and lists; of a traceback
    the end.
    """
    fields = ((name, getattr(record, name)) for name in record.__struct_fields__)
    bounded = {
        name: value[_KEPT[name]] if isinstance(value, str | list) else value
        for name, value in fields
    }
    return _DATACLASSES[type(record)](**bounded)
