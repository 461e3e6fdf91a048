"""`diagnose --job`: a running job is asked through a real store and at real ports, and left as it is."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE

import pytest
import torch.distributed as dist
from test_heartbeats import BEAT
from typer.testing import CliRunner

from nemo_patches.channel import keys
from nemo_patches.cli import app
from nemo_patches.stall.heartbeat import Heartbeat
from nemo_patches.stall.peers import Listener
from nemo_patches.stall.store_client import announce, send
from nemo_patches.stall.wire import TOKEN_BYTES, Peer, encode_peers
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose import live
from nemo_patches.tools.diagnose.findings import Report
from nemo_patches.tools.diagnose.folder import UnreadableError
from nemo_patches.tools.diagnose.job_address import address_of

pytestmark = pytest.mark.one_nemo
PLACE = "read_audio (my_asr/dataset.py:41)"
AWAY = replace(
    BEAT, idle=90.0, calls=71, where="", collective="", activity="", phase="between encoder calls", workers=()
)
WAITS = replace(AWAY, phase="length sync", collective="length sync")
ELSEWHERE = replace(AWAY, where=PLACE)
CALLS = replace(AWAY, idle=0.4)


@contextlib.contextmanager
def job(beats: list[Heartbeat], deaf: tuple[int, ...] = (), all_there: bool = True) -> Iterator[dist.TCPStore]:
    """The store and the ports of such ranks. deaf: neither answers nor beats."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    whole = dist.PrefixStore(f"default_pg/0//{keys.PREFIX}", server)
    whole.set(keys.ATTEMPT, "3")
    part = dist.PrefixStore("3", whole)
    token = secrets.token_bytes(TOKEN_BYTES)
    listeners = {rank: Listener(("127.0.0.1", 1)) for rank in range(len(beats))}
    peers = {
        rank: Peer(socket.gethostname(), 40 + rank, "127.0.0.1", listener.port) for rank, listener in listeners.items()
    }
    for rank, beat in enumerate(beats):
        listeners[rank].introduce(peers, token)
        announce(part, replace(beat, rank=rank, number=1))
    if all_there:
        part.set(keys.PEERS, encode_peers(peers, token))
    ended = threading.Event()

    def live_on() -> None:
        number = 1
        while not ended.wait(0.02):
            number += 1
            for rank, beat in enumerate(beats):
                if rank not in deaf:
                    now = replace(beat, rank=rank, number=number)
                    send(part, now)
                    listeners[rank].answer(lambda now=now: now)  # type: ignore[misc]

    thread = threading.Thread(target=live_on)
    thread.start()
    try:
        yield server
    finally:
        ended.set()
        thread.join(10)
        for listener in listeners.values():
            listener.close()


def asked(server: dist.TCPStore) -> Report:
    return live.report_on("the job", live.look("127.0.0.1", server.port))


def test_the_rank_that_the_others_wait_for_is_named_with_its_place_and_nothing_is_written() -> None:
    with job([WAITS, WAITS, ELSEWHERE]) as server:
        before = sorted(server.list_keys()) if hasattr(server, "list_keys") else []
        report = asked(server)
        assert before == (sorted(server.list_keys()) if before else [])
    assert [(one.id, one.ranks) for one in report.findings] == [(ids.BEFORE_ENCODER, (2,))]
    assert PLACE in report.verdict and "ranks 0-1: length sync" in report.verdict
    assert (report.world_size, report.problems, report.exit_code) == (3, (), 1)
    assert [one.calls for one in report.ranks] == [71, 71, 71]


def test_a_heart_that_stands_still_is_seen_and_who_does_not_answer_is_named() -> None:
    with job([WAITS, AWAY, WAITS], deaf=(1,)) as server:
        report = asked(server)
    assert [(one.id, one.ranks) for one in report.findings] == [(ids.SILENT, (1,))]
    assert report.problems == ("rank 1: no answer at the port that the job's store names",)


@pytest.mark.parametrize("beat", [replace(CALLS, phase="length sync"), replace(AWAY, idle=-1.0)])
def test_a_job_that_goes_on_accuses_nobody(beat: Heartbeat) -> None:
    with job([beat, CALLS, CALLS]) as server:
        report = asked(server)
    assert report.findings == () and "none is known to wait for another" in report.verdict


def test_before_all_have_announced_themselves_that_is_said() -> None:
    with job([WAITS, WAITS], all_there=False) as server:
        report = asked(server)
    assert report.world_size == 0 and "not all have announced themselves" in report.verdict
    assert [(one.id, one.ranks) for one in report.findings] == [(ids.OUTSIDE, ())]


def test_what_is_no_job_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for address, said in {
        "localhost": "HOST:PORT is wanted",
        "localhost:0": "HOST:PORT is wanted",
        f"127.0.0.1:{port}": "refused",
    }.items():
        with pytest.raises(UnreadableError, match=said):
            address_of(address)
    with pytest.raises(UnreadableError, match="no sign of nemo_patches in this store"):
        live.look("127.0.0.1", other.port)


def test_a_server_that_says_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LIMIT", timedelta(seconds=1))
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(UnreadableError, match="no answer within 1 s"),
    ):
        live.diagnose_job(address_of(f"127.0.0.1:{silent.getsockname()[1]}"))
    assert not multiprocessing.active_children()


def test_a_job_is_found_by_the_folder_in_which_it_runs(tmp_path: Path) -> None:
    with job([WAITS, WAITS, ELSEWHERE]) as server, contextlib.ExitStack() as ranks:

        def start(port: int) -> None:
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            program = [sys.executable, "-c", "print('here', flush=True); input()"]
            rank = subprocess.Popen(program, cwd=tmp_path, env=variables, stdin=PIPE, stdout=PIPE)
            ranks.callback(rank.wait, 60)
            ranks.callback(rank.kill)
            assert rank.stdout is not None and rank.stdout.readline() == b"here\n"  # only now it surely has them

        with pytest.raises(UnreadableError, match=re.escape(str(tmp_path))):
            address_of(str(tmp_path))
        for _ in range(2):
            start(server.port)
        link = tmp_path / "link"
        link.symlink_to(tmp_path)
        assert [(one.id, one.ranks) for one in live.diagnose_job(address_of(str(link))).findings] == [
            (ids.BEFORE_ENCODER, (2,))
        ]
        start(1)
        with pytest.raises(UnreadableError, match=rf"several jobs .* 127.0.0.1:1, 127.0.0.1:{server.port}"):
            address_of(str(tmp_path))


def test_the_command() -> None:
    with job([WAITS, WAITS, ELSEWHERE]) as server:
        done = CliRunner().invoke(app, ["diagnose", "--job", f"127.0.0.1:{server.port}", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["findings"][0]["ranks"]) == (1, [2])
    for arguments in ([], [".", "--job", "a:1"], ["--job", "a:1", "--watch"]):
        assert CliRunner().invoke(app, ["diagnose", *arguments]).exit_code == 2
