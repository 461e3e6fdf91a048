"""Compares one optimizer's parameters among all ranks, in a thread that gets checksums from the training thread.

One round tells whether all are equal. Only where they are not, more rounds tell what each rank has, and halve the list
of numbers until the first one that differs is found. All ranks see the same results, so all take the same rounds.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from nemo_patches.channel.daemon import Daemon
from nemo_patches.channel.extremes import VALUE_BITS, ExtremesRounds
from nemo_patches.channel.side_channel import RoundFailed, Rounds
from nemo_patches.stall import subscriber
from nemo_patches.sync.length_sync import GroupSyncs, current
from nemo_patches.sync.rank_log import report
from nemo_patches.text import named
from nemo_patches.uneven.parted import Account, judged

_LOOK = timedelta(seconds=0.25)  # between two looks at whether this is to end
_MOST_WAITING = 8  # comparisons; a rank that is further ahead of the others skips some
_HASH_BITS = 62


@dataclass(frozen=True)
class Snapshot:
    """This rank's parameters at one comparison. names: one for each number. reason: why there are none."""

    step: int
    batches: int
    layout: str = ""
    names: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    reason: str = ""

    def account(self) -> Account:
        layout = 0 if self.reason else _hash(self.layout.encode(), _HASH_BITS) | 1
        return Account(self.step, self.batches, layout, _hash_of(self.numbers, _HASH_BITS))


@dataclass(frozen=True)
class ComparisonCounters:
    """The comparisons of one optimizer on this rank. found: what was logged of a difference, or why none was made."""

    optimizer: str
    steps: int
    compared: int
    equal_at: int  # the last step after which the parameters of all ranks were equal
    left_out: int  # comparisons for which a rank did not answer in time
    found: str

    def __str__(self) -> str:
        left_out = f", {self.left_out} left out" if self.left_out else ""
        equal = f"; equal on all ranks after step {self.equal_at}" if self.equal_at else ""
        found = f"; {self.found}" if self.found else ""
        return f"{self.optimizer}: {self.steps} steps, {self.compared} comparisons{left_out}{equal}{found}"


class _Stopped(Exception):
    """Training is over, or comparing was switched off."""


class Comparison:
    """The training thread calls `offer`, any thread `stop`; the other fields are the comparison's own thread's."""

    def __init__(self, group_syncs: GroupSyncs, title: str, key: str) -> None:
        """key: the same on all ranks."""
        self.title, self.is_over = title, False
        self.compared = self.equal_at = 0
        self.found = ""
        self.left_out = 0  # the training thread's
        self._channel, self._rank, self._size = group_syncs.channel, group_syncs.group.rank, group_syncs.group.size
        self._rounds = ExtremesRounds(group_syncs.channel, key)
        self._by_rank = group_syncs.channel.rounds(f"{key} by rank")
        self._snapshots = queue.SimpleQueue[Snapshot | None]()
        self._stops = False
        self._compares_batches, self._said_late, self._said_left_out = True, False, False
        self._resume_after = 0  # the step up to which ranks have compared different ones
        self._thread = Daemon("comparison", self._run)
        if why := self._thread.begin():
            self.found, self.is_over = f"not compared: {why}", True
            report(logging.WARNING, f"{title}: parameters are not compared, training goes on: {why}")

    def offer(self, snapshot: Snapshot) -> None:
        """Compare it after those before it; skip it if too many wait. Does not wait."""
        if self._snapshots.qsize() >= _MOST_WAITING:
            self.left_out += 1
        elif not self.is_over:
            self._snapshots.put(snapshot)

    def stop(self) -> None:
        """End the thread soon. Takes no lock: the garbage collector may call this."""
        self._stops = True
        self._snapshots.put(None)

    def join(self, limit: timedelta) -> None:
        if self._thread.ident is not None:  # it has begun
            self._thread.join(limit.total_seconds())

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            while not self.is_over and (snapshot := self._snapshots.get()) is not None and not self._stops:
                if snapshot.step > self._resume_after:
                    self._compare(snapshot)
        except (RoundFailed, _Stopped) as error:  # a rank has left; reported elsewhere if necessary
            self.found = self.found or str(error)
        except Exception as error:
            self.found = f"ended by an error of its own: {error!r}"
            report(logging.ERROR, f"{self.title}: the comparison of parameters has {self.found}; please report it")
        finally:
            self.is_over = True
            self._rounds.close()
            self._by_rank.close()

    def _compare(self, snapshot: Snapshot) -> None:
        account = snapshot.account()
        said = account if self._compares_batches else account._replace(batches=0)
        self.compared += 1
        if self.left_out and not self._said_left_out and self._rank == 0:
            self._said_left_out = True
            report(logging.INFO, f"{self.title}: steps are due faster than they are compared; some are left out")
        if self._is_equal(_hash_of(said, VALUE_BITS), snapshot.step):
            self.equal_at = 0 if snapshot.reason else snapshot.step
            if snapshot.reason:
                self._end(f"{self.title}: parameters are not compared: {snapshot.reason}", self._rank == 0)
            return
        accounts = [Account(*one) for one in zip(*(self._of_all(value) for value in account), strict=True)]
        if len({one.step for one in accounts}) > 1:  # after some were left out: go on together
            self._resume_after = max(one.step for one in accounts)
            return
        are_comparable = accounts[0].layout and len({one.layout for one in accounts}) == 1
        differ = are_comparable and len({one.checksum for one in accounts}) > 1
        first = self._first_difference(snapshot) if differ else ""
        parted = judged(accounts, self.title, first, self.equal_at)
        if snapshot.reason:
            self._end(f"{self.title}: parameters are not compared: {snapshot.reason}", is_said=True)
        elif parted is not None and parted.is_last:
            self._end(parted.text, self._rank == 0)
        elif parted is not None:
            self.found, self._compares_batches, self.equal_at = parted.text, False, snapshot.step
            if self._rank == 0:
                report(logging.WARNING, parted.text)

    def _end(self, text: str, is_said: bool) -> None:
        self.found, self.is_over = text, True
        if is_said:
            report(logging.WARNING, text)

    def _is_equal(self, value: int, step: int = 0) -> bool:
        """Whether all ranks have this value. step: of a new comparison, for which ranks may be late."""
        self._rounds.issue(value)
        began_at = time.monotonic()
        while (extremes := self._rounds.wait(_LOOK)) is None:
            self._look(time.monotonic() - began_at, step)
        return extremes.highest.value == extremes.lowest.value

    def _of_all(self, value: int) -> list[int]:
        """Each rank's."""
        values = []
        for rank in range(self._size):
            self._by_rank.issue(value if rank == self._rank else -1)
            values.append(self._wait(self._by_rank))
        return values

    def _wait(self, rounds: Rounds) -> int:
        while (value := rounds.wait(_LOOK)) is None:
            self._look(0.0, 0)
        return value

    def _first_difference(self, snapshot: Snapshot) -> str:
        """The name of the first number that differs between ranks."""
        equal, different = 0, len(snapshot.numbers)  # so many of the first numbers are
        while different - equal > 1:
            middle = (equal + different) // 2
            if self._is_equal(_hash_of(snapshot.numbers[:middle], VALUE_BITS)):
                equal = middle
            else:
                different = middle
        return snapshot.names[equal]

    def _look(self, waited_s: float, step: int) -> None:
        if self._stops:
            raise _Stopped
        is_late = not self._snapshots.empty() and waited_s >= current().timeout.total_seconds()
        if step and is_late and not self._said_late:
            self._said_late = True
            missing = subscriber.unannounced()
            if missing:
                who = f"{named(missing)}: not patched, or not started"
            elif not self._channel.is_joined:
                who = "not every rank is connected: one is not patched, or not started"
            else:
                who = "one is late, makes no such steps, or does not compare (compare must be the same on all)"
            report(
                logging.WARNING,
                f"{self.title}: the parameters after step {step} are not compared yet, nor those after later steps: "
                f"not every rank has answered within {waited_s:.1f} s; {who}",
            )


def _hash_of(numbers: Sequence[int], bits: int) -> int:
    return _hash(array("q", numbers).tobytes(), bits)


def _hash(data: bytes, bits: int) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> (64 - bits)
