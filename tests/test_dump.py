"""Dumps on real ranks of which no trace was wanted: they come by themselves, and `diagnose` tells what it is."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import encoders
import pytest
import torch
import torch.distributed as dist
from diagnosing import diagnosed
from ranks import CONNECTING_S, all_have_come, come_in, forget_incidents, run_ranks, wait_until
from test_stall_reports import read_audio

import nemo_patches

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone, pytest.mark.apply_only]
TIMEOUT = 1.5


def before_the_encoder(encoder: torch.nn.Module, odd: bool, go_on: Path) -> None:
    if odd:
        read_audio(go_on)
    encoders.run(encoder, 100)


def in_its_layers(encoder: torch.nn.Module, odd: bool, go_on: Path) -> None:
    if odd:
        hook = encoder.get_submodule("layers.0").register_forward_pre_hook(lambda *_: wait_until(go_on.exists))
        encoders.run(encoder, 100)
        hook.remove()
    else:
        encoders.run(encoder, 100)
    encoders.run(encoder, 100)


def in_a_collective(encoder: torch.nn.Module, odd: bool, go_on: Path) -> None:
    """Rank 1 waits in C code, where no Python handler of a signal would run."""
    encoders.run(encoder, 100)
    go_on.with_suffix(f".{int(odd)}").touch()
    if not odd:
        read_audio(go_on)
    dist.barrier()


SCENARIOS: dict[str, Callable[[torch.nn.Module, bool, Path], None]] = {
    "before": before_the_encoder,
    "layers": in_its_layers,
    "collective": in_a_collective,
}


def dump_of(folder: Path, rank: int, why: str) -> bool:
    return any(why.encode() in file.read_bytes() for file in folder.glob(f"rank-{rank:05}.*.jsonl"))


def watch(folder: Path, name: str, pids: list[int]) -> None:
    """A process of its own, as an engineer at a shell: has rank 1 dump, too, and copies the dumps of the hang."""
    if name == "collective":  # nobody waits in the length sync
        wait_until(lambda: len(list(folder.parent.glob("*.collective.[01]"))) == 2)
        os.kill(pids[0], signal.SIGUSR2)
        wait_until(lambda: dump_of(folder, 0, "SIGUSR2"))
    else:
        wait_until(lambda: dump_of(folder, 0, "a stall was reported"))
    os.kill(pids[1], signal.SIGUSR2)
    wait_until(lambda: dump_of(folder, 1, "SIGUSR2"))
    shutil.copytree(folder, folder.with_suffix(f".{name}"))
    folder.with_suffix(f".{name}.go").touch()


def go_wrong(rank: int, size: int, folder: Path) -> None:
    pids: list[int] = [0] * size
    kept = []  # as models do, they live until the end
    for name, scenario in SCENARIOS.items():
        forget_incidents()
        nemo_patches.apply(timeout=CONNECTING_S, dump=folder)
        encoder = encoders.conformer()
        kept.append(encoder)
        for _ in range(3):
            encoders.run(encoder, 100)
            come_in(encoder)
        wait_until(all_have_come)
        nemo_patches.apply(timeout=TIMEOUT, dump=folder)
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            for file in folder.glob("*"):
                file.unlink()
        dist.barrier()
        watcher = os.fork() if rank == 0 else 0
        if rank == 0 and not watcher:
            try:
                watch(folder, name, pids)
            finally:
                os._exit(0)
        scenario(encoder, rank == 1, folder.with_suffix(f".{name}.go"))
        if watcher:
            os.waitpid(watcher, 0)
        dist.barrier()


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("of_a_job") / "dumps"
    folder.mkdir()
    run_ranks(go_wrong, 2, folder, limit=200)
    return folder


def test_the_verdict_where_only_the_waiting_rank_has_dumped(dumped: Path, tmp_path: Path) -> None:
    shutil.copytree(dumped.with_suffix(".before"), tmp_path / "one")
    for file in (tmp_path / "one").glob("rank-00001.*"):
        file.unlink()
    first = diagnosed(tmp_path / "one").findings[0]
    assert (first.id, first.ranks, first.call) == ("missing-rank", (1,), 4)
    assert "Rank 1 has not entered training call 4 " in first.text
    assert "read_audio (tests/test_stall_reports.py:" in first.text
    assert "waited in vain for its round: rank 0" in first.evidence


@pytest.mark.parametrize(
    ("name", "finding", "ranks", "said"),
    [
        ("before", "missing-rank", (1,), "read_audio (tests/test_stall_reports.py:"),
        ("layers", "some-inside", (1,), "in its layers"),
        ("collective", "stuck-outside-encoder", (0, 1), "in_a_collective (tests/test_dump.py:"),
    ],
)
def test_the_verdict_from_dumps(dumped: Path, name: str, finding: str, ranks: tuple[int, ...], said: str) -> None:
    report = diagnosed(dumped.with_suffix(f".{name}"))
    first = report.findings[0]
    assert (first.id, first.ranks) == (finding, ranks), report
    assert said in "\n".join((first.text, *first.evidence)), report
    assert report.problems == ()
    assert report.exit_code == 1
