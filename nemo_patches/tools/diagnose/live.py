"""A running job, asked through its store and at its ranks' ports: the heartbeats that its stall monitors send anyway.

Nothing is written. Each rank is asked once, by the token that the store has; who does not answer is looked at twice in
the store, so that a heart that stands still is seen. All of it is bounded in time. Needs torch, for the store's client.
"""

from __future__ import annotations

import ipaddress
import logging
import multiprocessing
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from nemo_patches.channel import keys
from nemo_patches.channel.safe_text import safe
from nemo_patches.stall.heartbeat import Heartbeat, period_for_s
from nemo_patches.stall.missing_query import PERIODS_TO_SEE
from nemo_patches.stall.peers import ask
from nemo_patches.stall.rank_groups import CALLING, RankGroup, grouped, judged
from nemo_patches.stall.rank_text import ELSEWHERE, LEFT, SILENT, UNANNOUNCED, first_line, named
from nemo_patches.stall.store_client import read_heartbeats
from nemo_patches.stall.wire import Peer, decode_peers
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.findings import CRITICAL, WARNING, Finding, RankSummary, Report
from nemo_patches.tools.diagnose.folder import UnreadableError
from nemo_patches.tools.diagnose.job_address import CONNECT_S, Address

GOES_ON = timedelta(seconds=30)  # so long after its last encoder call a rank goes on: half of stall_timeout's default
_LIMIT = timedelta(seconds=40)  # of the store's answers in all
_START_LIMIT = timedelta(minutes=5)  # to import torch
_ANSWER_S = 2.0
_MOST_BLOCKS = 1 << 12  # of the ranks' signs
_ATTEMPT_KEYS = ("default_pg/0//", "0//", *(f"/worker/attempt_{restart}/default_pg/0//" for restart in range(64)))
_SIZE_UNKNOWN = (
    " | how many ranks the job has is not told: not all have announced themselves (not patched, not started, or not "
    "yet at a first encoder call), or rank 0 has not counted them"
)
_IDS = {ELSEWHERE: ids.BEFORE_ENCODER, SILENT: ids.SILENT, LEFT: ids.ENDED, UNANNOUNCED: ids.MISSING_RANK}


@dataclass(frozen=True)
class Seen:
    """size: 0 if the job does not tell. silent: ranks whose heart stands still. unreached: that did not answer."""

    size: int
    heartbeats: dict[int, Heartbeat]
    silent: set[int]
    unreached: set[int]


def diagnose_job(job: Address, goes_on: timedelta = GOES_ON) -> Report:
    """Raises UnreadableError."""
    seen = _answer_of_a_child(job.server, job.port)
    if isinstance(seen, str):
        raise UnreadableError(f"--job={job.text}: {seen}")
    return report_on(job.text, seen, goes_on)


def _answer_of_a_child(server: str, port: int) -> Seen | str:
    """What was seen, or why nothing was. c10d's client may wait without end, and cannot be ended within a process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, server, port))
    child.start()
    theirs.close()
    try:
        answer: Seen | str = (
            f"no answer within {_LIMIT.total_seconds():.0f} s; if that is the job's store, look at the process that "
            "has it, rank 0 or torchrun: it may be stopped itself"
        )
        if ours.poll(_START_LIMIT.total_seconds()) and ours.recv() and ours.poll(_LIMIT.total_seconds()):
            answer = ours.recv()
    except EOFError:
        answer = "the process that asks has died; its stderr says why"
    finally:
        child.kill()
        child.join()
    return answer


def _answer(pipe: Connection, server: str, port: int) -> None:
    pipe.send(True)  # torch is imported
    try:
        pipe.send(look(server, port))
    except Exception as error:
        pipe.send(str(error) if isinstance(error, UnreadableError) else first_line(error))


def look(server: str, port: int) -> Seen:
    """Ask the store at that address, and the ranks. Raises UnreadableError, and the store's errors; may wait long."""
    patience = timedelta(seconds=CONNECT_S)
    store = dist.TCPStore(server, port, is_master=False, wait_for_workers=False, timeout=patience)
    base = _base(store)
    part = dist.PrefixStore(f"{base}/{int(store.get(f'{base}/{keys.ATTEMPT}'))}", store)
    ranks = _announced(part)
    heartbeats = read_heartbeats(part, ranks)
    began = time.monotonic()
    peers: dict[int, Peer] = {}
    token = b""
    if part.check([keys.PEERS]):
        peers, token = decode_peers(part.get(keys.PEERS), _MOST_BLOCKS * keys.RANKS_PER_BLOCK)
    reachable = {rank: _from_here(peer, server) for rank, peer in peers.items() if peer.address}
    answered = ask(reachable, token, _ANSWER_S, lambda: False)
    silent: set[int] = set()
    if unheard := heartbeats.keys() - answered.keys():
        time.sleep(max(0.0, began + PERIODS_TO_SEE * period_for_s(len(heartbeats)) - time.monotonic()))
        later = read_heartbeats(part, unheard)
        silent = {rank for rank, heartbeat in later.items() if heartbeat.number == heartbeats[rank].number}
        heartbeats |= later
    return Seen(len(peers), heartbeats | answered, silent, reachable.keys() - answered.keys())


def _base(store: dist.TCPStore) -> str:
    """Below which key nemo_patches is in this store: what c10d puts before it depends on torch and the launcher."""
    own = f"{keys.PREFIX}/{keys.ATTEMPT}"
    if hasattr(store, "list_keys"):
        found = [key for key in store.list_keys() if key.endswith(own)]
    else:
        found = [prefix + own for prefix in _ATTEMPT_KEYS if store.check([prefix + own])]
    if not found:
        raise UnreadableError(
            "no sign of nemo_patches in this store: no rank is patched, or none has called an encoder"
        )
    latest: str = max(found, key=lambda key: (len(key), key))
    return latest.removesuffix(f"/{keys.ATTEMPT}")


def _announced(store: dist.Store) -> set[int]:
    """As store_client.announced_ranks, without making a key that is not there."""
    wanted = int(store.get(keys.ANNOUNCED)) if store.check([keys.ANNOUNCED]) else 0
    ranks: set[int] = set()
    for block in range(_MOST_BLOCKS):
        if len(ranks) >= wanted:
            break
        key, first = keys.PRESENT.format(block=block), block * keys.RANKS_PER_BLOCK
        bits = int(store.get(key)) if store.check([key]) else 0
        ranks.update(first + bit for bit in range(keys.RANKS_PER_BLOCK) if bits >> bit & 1)
    return ranks


def _from_here(peer: Peer, server: str) -> Peer:
    """A rank with a loopback address is on the store's host."""
    return peer._replace(address=server) if ipaddress.ip_address(peer.address).is_loopback else peer


def report_on(address: str, seen: Seen, goes_on: timedelta = GOES_ON) -> Report:
    size = seen.size or max(seen.heartbeats, default=-1) + 1
    groups = grouped(size, seen.heartbeats, seen.silent, goes_on.total_seconds())
    verdict = judged(groups)
    accused = {rank.rank for rank in verdict.missing}
    told = verdict.text() if seen.heartbeats else "no rank has announced itself"
    told += "" if seen.size else _SIZE_UNKNOWN
    findings = [_finding(group, told, groups) for group in groups if accused & set(group.ranks)]
    if not findings and verdict.level >= logging.WARNING:
        findings = [
            Finding(ids.OUTSIDE, WARNING, (), told, "`py-spy dump --pid PID` on the hosts of two of the ranks.")
        ]
    who = named(sorted(seen.heartbeats)) if seen.heartbeats else "the ranks"
    unreached = f"{named(sorted(seen.unreached))}: no answer at the port that the job's store names"
    return Report(
        folder=safe(address),
        world_size=seen.size,
        moving=any(group.kind == CALLING for group in groups),
        verdict=findings[0].text if findings else f"Nothing found: of {who} none is known to wait for another. {told}",
        next_step=findings[0].next_step if findings else "",
        findings=tuple(findings),
        ranks=tuple(
            _summary(heartbeat, heartbeat.rank in seen.silent) for _, heartbeat in sorted(seen.heartbeats.items())
        ),
        problems=(unreached,) if seen.unreached else (),
        earlier=(),
        runs=True,
    )


def _finding(group: RankGroup, text: str, groups: tuple[RankGroup, ...]) -> Finding:
    who = f"process {group.pid} on {group.host}" if group.pid else "this rank's stderr"
    return Finding(
        id=_IDS.get(group.kind, ids.BEFORE_ENCODER),
        severity=CRITICAL,
        ranks=tuple(group.ranks),
        text=text,
        next_step=f"Look at {who}: `py-spy dump`, its data loader's workers, the end of its stderr.",
        evidence=tuple(str(one) for one in groups[:8]),
    )


def _summary(heartbeat: Heartbeat, is_silent: bool) -> RankSummary:
    place = f": {heartbeat.collective or heartbeat.where}" if heartbeat.collective or heartbeat.where else ""
    state = "no heartbeat" if is_silent else f"{heartbeat.phase}{place}"
    ago = heartbeat.idle if heartbeat.idle >= 0 else None
    return RankSummary(
        heartbeat.rank, heartbeat.host, heartbeat.pid, heartbeat.calls, state, None, ago, None, None, None
    )
