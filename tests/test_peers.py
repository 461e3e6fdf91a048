"""A peer that dies or is stopped in the middle of training."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch.distributed as dist
from ranks import SLACK_S, Said, come_in, in_step, run_ranks, wait_until

# Of Gloo and processes, not of NeMo's version.
pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]


def with_a_killed_peer(rank: int, size: int) -> Any:
    encoder = in_step(timeout=20.0)
    encoders.sync(encoder, 100)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls = [
        (encoders.sync(encoder, 1000 + 100 * step + rank), encoder.max_audio_length)
        for step in range(5)
    ]
    encoders.sync(encoders.conformer(), 100)  # another one, whose end is the same
    return calls


def test_a_killed_peer_costs_no_wait_and_one_line() -> None:
    results = run_ranks(with_a_killed_peer, 3, dies=(1,))
    for rank in (0, 2):
        assert (
            sum(seconds for seconds, _ in results[rank].value) < 15
        )  # no wait of 20 s
        assert [maximum for _, maximum in results[rank].value][-1] == 1400 + rank
        (line,) = results[rank].lines("the length sync has ended")
        assert f"rank {rank}/3" in line
        assert "ConformerEncoder" in line
        assert results[rank].lines("not every rank") == []
    assert results[1].exit_code == -signal.SIGKILL


def with_a_peer_killed_during_the_wait(rank: int, size: int) -> Any:
    encoder = in_step(timeout=20.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return encoders.sync(encoder, 300), encoder.max_audio_length


def test_a_peer_killed_during_the_wait_ends_it() -> None:
    seconds, maximum = run_ranks(with_a_peer_killed_during_the_wait, 2, dies=(1,))[
        0
    ].value
    assert seconds < 15  # no wait of 20 s
    assert maximum == 300


def with_a_stopped_peer(rank: int, size: int, go_on: str) -> Any:
    # The next wait is an eighth of it, and must bear a busy machine.
    encoder = in_step(timeout=8.0)
    said = Said()
    peers: list[Any] = [0] * size
    dist.all_gather_object(peers, os.getpid())
    dist.barrier()
    if rank == 0:
        os.kill(peers[1], signal.SIGSTOP)
        seconds = encoders.sync(encoder, 300)
        os.kill(peers[1], signal.SIGCONT)
        Path(go_on).touch()
    else:
        wait_until(Path(go_on).exists)
        seconds = encoders.sync(encoder, 301)
    come_in(encoder)
    for step in range(3):
        encoders.sync(encoder, 400 + 10 * step + rank)
        come_in(encoder)
    if rank == 0:  # its monitor may not have been given a core since
        wait_until(lambda: any("recovered" in line for line in said.lines))
    return seconds, encoder.max_audio_length


def test_a_stopped_peer_is_as_late_and_recovers(tmp_path: Path) -> None:
    first, second = run_ranks(with_a_stopped_peer, 2, str(tmp_path / "go on"))
    assert 7.9 <= first.value[0] <= 8.0 + SLACK_S
    assert second.value[0] < SLACK_S
    assert first.value[1] == second.value[1] == 421
    assert len(first.lines("not every rank")) == len(first.lines("recovered")) == 1
    assert first.lines("ERROR") == second.lines("ERROR") == []
