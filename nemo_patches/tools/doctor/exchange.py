"""`doctor --ranks`: every rank publishes facts in the job's store, and rank 0 collects them, in bounded time.

In three steps, each with a time limit of its own, so that a rank which does not answer, or hangs, becomes a finding and
no more: every rank publishes its facts; rank 0 names those that have come; these measure rounds of the side channel.
What a rank publishes is checked for its types and its size, and printed without control characters.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from nemo_patches.sync import settings
from nemo_patches.text import first_line, safe
from nemo_patches.tools.doctor import measurements, own_facts
from nemo_patches.tools.doctor.errors import DoctorError
from nemo_patches.tools.doctor.rank_place import RankPlace
from nemo_patches.tools.doctor.ranks import Facts, Measured, Ranks, Smoke

if TYPE_CHECKING:
    import torch.distributed as dist

_MOST_BYTES = 1 << 18  # that a rank may publish at once
_MOST_ITEMS = 256  # of a list or mapping in it
_POLL_S = 0.02


def examine(here: RankPlace, loaders: Mapping[str, str], smoke: bool = False) -> Ranks | None:
    """Take part as this rank; return what all ranks published on rank 0, None on the others. Raises DoctorError.

    loaders: what a config makes of this rank's data loaders.
    It takes the timeout of NEMO_PATCHES_TIMEOUT a few times, whatever other ranks do.
    """
    try:
        timeout = settings.Settings.resolve().timeout
    except settings.SettingsError as error:
        raise DoctorError(str(error)) from None
    own = own_facts.gather(here, loaders)  # imports torch, which the time limits must not count
    part = _Part(here, own, timeout, smoke)
    thread = threading.Thread(target=part.take, daemon=True)  # torch's calls cannot be interrupted
    thread.start()
    thread.join((5 + 3 * smoke) * timeout.total_seconds() + 5)
    problem = part.error or (f"rank {here.rank} came to no end; it was at {part.at}" if thread.is_alive() else "")
    if problem and not part.facts:
        raise DoctorError(problem)
    if here.rank:
        return None
    measured = dict(part.measured)
    if problem:
        measured[0] = replace(measured.get(0, Measured(0)), problem=problem)
    return Ranks(here.size, timeout, dict(part.facts), measured, dict(part.smoke) if smoke else None)


class _Part:
    """This rank's part, on its own thread; when its time is up, what it has so far is read."""

    def __init__(self, here: RankPlace, own: Facts, timeout: timedelta, smoke: bool) -> None:
        self.facts: dict[int, Facts] = {}
        self.measured: dict[int, Measured] = {}
        self.smoke: dict[int, Smoke] = {}
        self._with_smoke = smoke
        self.at, self.error = "its start", ""
        self._here, self._own, self._timeout = here, own, timeout

    def take(self) -> None:
        try:
            self._take()
        except Exception as error:  # torch has no common class for what its stores raise
            why = str(error) if isinstance(error, DoctorError) else first_line(error)
            self.error = f"rank {self._here.rank}, at {self.at}: {why}"

    def _take(self) -> None:
        import torch.distributed as dist

        from nemo_patches.channel.store import JobStore, StoreConnection

        here = self._here
        self.at = f"connecting to the job's store at {here.address}:{here.port}"
        tcp_store = dist.TCPStore(
            here.address,
            here.port,
            is_master=here.has_server,
            timeout=self._timeout,
            wait_for_workers=False,
            **({"multi_tenant": True} if here.has_server else {}),
        )
        part = dist.PrefixStore("nemo_patches/doctor", tcp_store)
        store = StoreConnection(JobStore(tcp_store, here.rank), part).join(anew=True)
        self.at = "publishing its facts"
        _publish(store, "facts", self._own)
        if here.rank == 0:
            self.at = "collecting the ranks' facts"
            self.facts = _collect(store, "facts", range(here.size), Facts, self._timeout)
            self.facts.setdefault(0, self._own)  # as they were published, to be compared
            store.set("name", secrets.token_hex(8))
            store.set("present", msgspec.json.encode(sorted(self.facts)).decode())
            present = sorted(self.facts)
        else:
            self.at = "waiting for rank 0 to say who is there"
            present = _ranks_present(store, 2 * self._timeout)
            if here.rank not in present:
                raise DoctorError(f"rank {here.rank} came too late: rank 0 has stopped waiting")
        self.at = "measuring"
        began = time.monotonic()
        own = measurements.measure(store, tcp_store, present, here.rank, self._timeout)
        _publish(store, "measured", own)
        if self._with_smoke:
            self.at = "the collectives of the job's backend"
            tried = measurements.smoke(store, here, present, self._timeout)
            _publish(store, "smoke", tried)
        if here.rank == 0:
            self.at = "collecting what the ranks measured"
            self.measured[0] = own
            others = [rank for rank in present if rank]
            end = began + (2 + 2 * self._with_smoke) * self._timeout.total_seconds()  # each has a limit of its own
            self.measured |= _collect(store, "measured", others, Measured, _until(end))
            if self._with_smoke:
                self.smoke[0] = tried
                self.smoke |= _collect(store, "smoke", others, Smoke, _until(end))
        self.at = "its end"


def _until(end: float) -> timedelta:
    return timedelta(seconds=end - time.monotonic())


def _publish(store: dist.Store, what: str, content: Facts | Measured | Smoke) -> None:
    printable = _printable(msgspec.to_builtins(content))  # JSON takes no variable that is no text
    store.set(f"{what}/{content.rank}", msgspec.json.encode(printable).decode())
    store.add(what, 1)


def _collect(store: dist.Store, what: str, ranks: Iterable[int], kind: type[Any], timeout: timedelta) -> dict[int, Any]:
    """What these ranks publish within the timeout, by rank; content of another type, or too long, is left out."""
    wanted = list(ranks)
    end = time.monotonic() + timeout.total_seconds()
    while store.add(what, 0) < len(wanted) + (0 not in wanted) and time.monotonic() < end:
        time.sleep(_POLL_S)
    contents = {}
    for rank in wanted:
        if store.check([f"{what}/{rank}"]):
            content = _decoded(store.get(f"{what}/{rank}"), kind)
            if content is not None and content.rank == rank:
                contents[rank] = content
    return contents


def _decoded(data: bytes, kind: type[Any]) -> Any:
    if len(data) > _MOST_BYTES:
        return None
    try:
        return msgspec.convert(_printable(msgspec.json.decode(data)), kind)
    except (msgspec.DecodeError, RecursionError):
        return None


def _printable(content: Any) -> Any:
    """JSON's content with its texts cut, and without control characters."""
    if isinstance(content, dict):
        return {safe(name): _printable(value) for name, value in list(content.items())[:_MOST_ITEMS]}
    if isinstance(content, list | tuple):
        return [_printable(value) for value in content[:_MOST_ITEMS]]
    return safe(content) if isinstance(content, str) else content


def _ranks_present(store: dist.Store, timeout: timedelta) -> list[int]:
    end = time.monotonic() + timeout.total_seconds()
    while not store.check(["present"]):
        if time.monotonic() > end:
            raise DoctorError(f"rank 0 has not answered within {timeout.total_seconds():g} s")
        time.sleep(_POLL_S)
    present: list[int] = msgspec.json.decode(store.get("present"), type=list[int])
    return present


def leave(code: int) -> NoReturn:
    """End this process at once: a thread in one of torch's calls would keep it, or crash it, at an ordinary exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
