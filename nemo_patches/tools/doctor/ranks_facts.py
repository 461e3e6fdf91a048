"""`doctor --ranks`: ranks publish facts in the job's store, rank 0 collects them in bounded time.

A rank that does not answer becomes a finding. What a rank publishes is checked for its types and
its size, and printed without control characters.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from nemo_patches.sync.settings import Settings, SettingsError
from nemo_patches.text import first_line, safe
from nemo_patches.tools import status
from nemo_patches.tools.doctor import machine
from nemo_patches.tools.doctor.rank_place import RankPlace
from nemo_patches.tools.doctor.ranks import Facts, Ranks
from nemo_patches.tools.doctor.refused import DoctorError

if TYPE_CHECKING:
    import torch.distributed as dist

_POLL_S = 0.02
_MOST_BYTES = 1 << 18  # that a rank may publish
# Timeouts: the store's server is waited for, and then the ranks.
_TO_CONNECT_AND_COLLECT = 2
_ROOM_S = 5.0
_PATCHING = "patching of NeMo"
# Variables that end so are a host's own, and may differ.
_OF_A_HOST = ("_IFNAME", "_HCA")


def examine(here: RankPlace, loaders: Mapping[str, str]) -> Ranks | None:
    """Take part as this rank; return what all ranks published on rank 0, None on the others. Raises
    DoctorError.

    loaders: what a config makes of this rank's data loaders.
    It takes the timeout of NEMO_PATCHES_TIMEOUT twice, whatever other ranks do.
    """
    import torch.distributed  # noqa: F401  # before the time limits begin

    try:
        timeout = Settings.resolve().timeout
    except SettingsError as error:
        raise DoctorError(str(error)) from None
    own = own_facts(here, loaders)
    # Torch's calls cannot be interrupted.
    limit = _TO_CONNECT_AND_COLLECT * timeout.total_seconds() + _ROOM_S
    limit_timer = threading.Timer(limit, _give_up, [here])
    limit_timer.daemon = True
    limit_timer.start()
    try:
        facts = _exchanged(here, own, timeout)
    except Exception as error:  # torch has no common class for what its stores raise
        raise DoctorError(
            f"rank {here.rank}, {here.store}: {first_line(error)}"
        ) from None
    finally:
        limit_timer.cancel()
    return None if here.rank else Ranks(here.size, timeout, facts)


def _give_up(here: RankPlace) -> None:
    text = f"nemo-patches doctor: rank {here.rank} has no answer of {here.store}"
    print(text, file=sys.stderr)
    leave(0 if here.rank else 2)


def own_facts(here: RankPlace, loaders: Mapping[str, str]) -> Facts:
    own = machine.gather()
    versions = machine.versions()
    try:
        report = status.examine()
        versions |= report.versions
        settings = {setting.name: setting.value for setting in report.settings}
        by_itself = "by itself" if report.auto_apply == "on" else "only by apply()"
        settings[_PATCHING] = "; ".join(report.reasons) or by_itself
    except status.StatusError as error:
        settings = {_PATCHING: str(error)}
    return Facts(
        rank=here.rank,
        host=own.host,
        pid=os.getpid(),
        versions=versions,
        settings=settings,
        environment={
            name: value
            for name, value in own.environment.items()
            if not name.endswith(_OF_A_HOST)
        },
        loaders=dict(loaders),
    )


def _exchanged(here: RankPlace, own: Facts, timeout: timedelta) -> dict[int, Facts]:
    import torch.distributed as dist

    server = dist.TCPStore(
        here.address,
        here.port,
        is_master=here.has_server,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=here.has_server,
    )
    store = dist.PrefixStore("nemo_patches/doctor", server)
    # JSON takes no variable that is no text
    printable = _printable(msgspec.to_builtins(own))
    # No answer is waited for: rank 0, and the server with it, may end as soon as it has this
    store.set(f"facts/{own.rank}", msgspec.json.encode(printable).decode())
    return _collect(store, here.size, timeout) if here.rank == 0 else {}


def _collect(store: dist.Store, size: int, timeout: timedelta) -> dict[int, Facts]:
    """What the ranks publish within the timeout, by rank; content of another type, or too long, is
    left out.

    It is deleted: the launcher may keep the store, and start all ranks again.
    """
    keys = [f"facts/{rank}" for rank in range(size)]
    end = time.monotonic() + timeout.total_seconds()
    while not store.check(keys) and time.monotonic() < end:
        time.sleep(_POLL_S)
    collected = {}
    for rank, key in enumerate(keys):
        if store.check([key]):
            facts = _decoded(store.get(key))
            store.delete_key(key)
            if facts is not None and facts.rank == rank:
                collected[rank] = facts
    return collected


def _decoded(data: bytes) -> Facts | None:
    if len(data) > _MOST_BYTES:
        return None
    try:
        return msgspec.convert(_printable(msgspec.json.decode(data)), Facts)
    except msgspec.DecodeError:
        return None


def _printable(content: Any) -> Any:
    """JSON's content with its texts cut, and without control characters."""
    if isinstance(content, dict):
        return {safe(name): _printable(value) for name, value in content.items()}
    return safe(content) if isinstance(content, str) else content


def leave(code: int) -> NoReturn:
    """End this process at once: a thread in one of torch's calls would keep it, or crash it, at an
    ordinary exit.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
