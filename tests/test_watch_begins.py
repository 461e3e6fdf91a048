"""The watch of the job: what begins it, which processes have none, and what it costs while nobody
asks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from interpreters import CHECKOUT, environment, python
from ranks import (
    Given,
    Job,
    Result,
    Said,
    beside_others,
    join_group,
    run_ranks,
    stall_monitor,
    wait_until,
)
from store_proxy import Proxy, proxy  # noqa: F401  # a fixture

import nemo_patches
from nemo_patches import patching
from nemo_patches.watch import subscriber

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
THREAD = "nemo_patches stall monitor"
OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2"}
COUNT = f"[thread.name for thread in threading.enumerate()].count({THREAD!r})"
THREADS = f"""
import sys, threading
{{}}
ours = [name in sys.modules for name in ("nemo_patches.watch", "nemo_patches.patching.monkeypatch")]
print({COUNT}, *ours, "torch._dynamo" in sys.modules)
"""
NOTHING = "0 False False False"


@pytest.mark.parametrize(
    ("imports", "variables", "said"),
    [
        ("import json", OF_TORCHRUN, NOTHING),
        # It patches nothing, and imports nothing of torch's that torch has not.
        ("import torch", OF_TORCHRUN, "1 True False False"),
        ("import torch", {}, NOTHING),
        ("import torch", {**OF_TORCHRUN, "NEMO_PATCHES_DISABLE": "1"}, NOTHING),
    ],
)
def test_torch_begins_it_in_one_of_several_ranks_where_the_checkout_is_on_pythonpath(
    imports: str, variables: dict[str, str], said: str
) -> None:
    done = python("-c", THREADS.format(imports), path=(CHECKOUT,), **variables)
    assert done.stdout.strip() == said, done.stderr
    assert "nemo_patches" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "of_several"),
    [
        (OF_TORCHRUN, True),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, True),
        ({}, False),
        ({"WORLD_SIZE": "2"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
    ],
)
def test_what_a_launcher_says_decides(
    variables: dict[str, str], of_several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {name for names in patching._RANK_AND_SIZE for name in names}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert patching.is_one_of_several_ranks() == of_several


SPAWNED = f"""
import multiprocessing, sys, threading, time
import torch

def watched(pipe):
    pipe.send(({COUNT}, "nemo_patches.watch" in sys.modules))

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        process = context.Process(target=watched, args=(theirs,))
        process.start()
        print(*ours.recv())
        process.join()
    print({COUNT})
"""


def test_what_multiprocessing_starts_in_a_rank_has_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    done = python(str(script), path=(CHECKOUT,), **OF_TORCHRUN)
    assert done.stdout.splitlines() == ["0 False", "0 False", "1"], done.stderr


def test_torchrun_which_slurm_has_started_has_none(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text(THREADS.format("import torch"))
    done = python(
        "-u", str(script), path=(CHECKOUT,), SLURM_PROCID="0", SLURM_NTASKS="2"
    )
    assert done.stdout.strip() == NOTHING, done.stderr


def test_where_ours_imports_torch_first_apply_begins_it() -> None:
    program = (
        "from nemo_patches import apply, status; apply(stall_timeout=7);"
        " print(status().settings.stall_timeout)"
    )
    done = python(
        "-c",
        f"{program}; import threading; print({COUNT})",
        path=(CHECKOUT,),
        **OF_TORCHRUN,
    )
    assert done.stdout.splitlines() == ["0:00:07", "1"], done.stdout + done.stderr


def test_a_setting_that_is_not_allowed_is_said_once_and_nothing_is_watched() -> None:
    variables = {**OF_TORCHRUN, "NEMO_PATCHES_STALL_TIMEOUT": "soon"}
    done = python("-c", THREADS.format("import torch"), path=(CHECKOUT,), **variables)
    assert done.stderr.count("NEMO_PATCHES_STALL_TIMEOUT='soon'") == 1
    assert done.stdout.startswith("0 ")


UNTRACED = """
import os, sys, time
import torch.distributed as dist
import torch

def rank(number):
    os.environ["RANK"] = str(number)
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=number, world_size=2)
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    os._exit(0)

children = [os.fork() or rank(number) for number in range(2)]
for child in children:
    os.waitpid(child, 0)
"""


def test_a_trace_of_a_job_without_nemo_says_on_each_rank_that_there_is_none(
    tmp_path: Path,
) -> None:
    folder, over, log = tmp_path / "traces", tmp_path / "over", tmp_path / "log"
    with log.open("w") as stderr:
        job = subprocess.Popen(
            [sys.executable, "-c", UNTRACED, str(tmp_path / "store"), str(over)],
            env=environment(CHECKOUT, **OF_TORCHRUN, NEMO_PATCHES_TRACE=str(folder)),
            stderr=stderr,
        )
    try:
        wait_until(lambda: log.read_text().count("nothing is traced: ") == 2, 120)
        over.touch()
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    said = [
        line for line in log.read_text().splitlines() if "nothing is traced: " in line
    ]
    assert sorted(line.partition("[rank ")[2][:3] for line in said) == [
        "0/2",
        "1/2",
    ], said
    assert not folder.exists()


FORKED = f"""
import os, sys, threading, time
import torch.distributed as dist
from nemo_patches.watch import subscriber

def rank(number):
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=number, world_size=2)
    end = time.monotonic() + 100
    while time.monotonic() < end and not ((own := subscriber.monitor()) and own.exchange.is_whole):
        time.sleep(0.01)
    dist.barrier()
    os._exit(0 if time.monotonic() < end else 1)

children = [os.fork() or rank(number) for number in range(2)]
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)

import multiprocessing

def of_a_pool(pipe):
    end = time.monotonic() + 100
    while any(one.name == {THREAD!r} for one in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    pipe.send(time.monotonic() < end)

ours, theirs = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=of_a_pool, args=(theirs,), daemon=True)
process.start()
print(ours.recv())
process.join(100)
"""


def test_ranks_that_are_forked_before_their_process_group_have_it_and_a_loaders_workers_do_not(
    tmp_path: Path,
) -> None:
    done = python(
        "-c", FORKED, str(tmp_path / "store"), path=(CHECKOUT,), **OF_TORCHRUN
    )
    assert done.stdout.splitlines() == ["[0, 0]", "True"], done.stderr


WITHOUT_NEMO = f"""
import os, sys, threading
import lightning.pytorch as pl
import torch

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

ours = [name for name in sys.modules if name.startswith("nemo_patches.watch")]
off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
off = dict.fromkeys(off, False)
threads = []
for devices, strategy in ((1, "auto"), (2, "ddp")):
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=2, **off
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 1)))
    threads.append({COUNT})
os.write(1, f"{{trainer.global_rank}} {{ours}} {{threads}}\\n".encode())
"""


def test_lightnings_own_launcher_begins_it_with_the_trainers_process_group(
    tmp_path: Path,
) -> None:
    """Not with one device, which has none."""
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_NEMO)
    done = python(str(script), path=(CHECKOUT,))
    said = [line for line in done.stdout.splitlines() if " [] [" in line]
    assert sorted(said) == ["0 [] [0, 1]", "1 [] [0, 1]"], done.stdout + done.stderr


QUIET_S = 3.0
MOST_OF_A_CORE = 0.01  # 0.002 is what an idle machine shows


def stays_quiet(
    rank: int, size: int, port: int, counter: str
) -> tuple[float, int, list[int]]:
    """The part of a core that the monitor takes; bytes to and from the store, by the proxy; ports
    that listen.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    nemo_patches.apply()
    wait_until(
        lambda: subscriber.monitor() is not None and stall_monitor().exchange.is_whole
    )
    dist.barrier()  # over Gloo's own connections
    (thread,) = (one for one in threading.enumerate() if one.name == THREAD)
    time.sleep(1.0)  # requests that were under way
    before, moved = ran_s(thread), Path(counter).stat().st_size
    time.sleep(QUIET_S)  # nothing is to happen: that is no event to wait for
    took, moved = ran_s(thread) - before, Path(counter).stat().st_size - moved
    listening = listening_ports()
    dist.barrier()
    return took / QUIET_S, moved, listening


def ran_s(thread: threading.Thread) -> float:
    return (
        int(
            Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
        )
        / 1e9
    )


def listening_ports() -> list[int]:
    """Of this process's own sockets, but torch's: Gloo's pairs listen as well."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                found.append(own.getsockname()[1])
    return found


def test_a_job_that_goes_on_costs_no_request_one_port_and_next_to_no_time(
    proxy: Proxy,  # noqa: F811
    tmp_path: Path,
) -> None:
    counter = tmp_path / "moved"
    proxy.count_in(counter)
    without = run_ranks(only_gloo, 2, proxy.port, group=False)
    results = run_ranks(stays_quiet, 2, proxy.port, str(counter), group=False)
    for stock, result in zip(without, results, strict=True):
        share, moved, listening = result.value
        assert share < MOST_OF_A_CORE
        assert moved == 0
        # Gloo's, and the exchange's: that it refuses shows an end.
        assert len(listening) == len(stock.value) + 1


def only_gloo(rank: int, size: int, port: int) -> list[Any]:
    store = dist.PrefixStore(
        "stock",
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    return listening_ports()


def broken(*_: Any) -> Any:
    raise RuntimeError("no monitor today")


def cannot_be_watched(rank: int, size: int, port: int) -> list[str]:
    said = Said()
    nemo_patches.apply()
    attempts: list[int] = []
    subscriber.StallMonitor = lambda *them: attempts.append(0) or broken(*them)  # type: ignore[misc,assignment]
    join_group(rank, size, port)
    wait_until(lambda: any("no stall reports" in line for line in said.lines))
    so_far = len(attempts)
    wait_until(lambda: len(attempts) > so_far + 3)
    dist.barrier()
    return [
        line
        for line in said.lines
        if "there are no stall reports of this rank, training goes on" in line
    ]


@beside_others(Job(cannot_be_watched, 2, Given.PORT, group=False))
def test_a_rank_that_cannot_be_watched_says_so_once(results: list[Result]) -> None:
    for result in results:
        (line,) = result.value
        assert line.endswith("RuntimeError('no monitor today')")


def ends_beside_a_wake(rank: int, size: int, port: int) -> list[bool]:
    """Whether the monitor's file is open: while another thread is about to write to it and the
    monitor has ended, and after that thread.
    """
    nemo_patches.apply()
    join_group(rank, size, port)
    wait_until(
        lambda: subscriber.monitor() is not None and stall_monitor().exchange.is_whole
    )
    monitor = stall_monitor()
    assert monitor._waker is not None
    file = f"/proc/self/fd/{monitor._waker.file}"
    which = os.readlink(file)
    writes, may_write, write = threading.Event(), threading.Event(), os.eventfd_write

    def slow_write(descriptor: int, value: int) -> None:
        if threading.current_thread() is waker:
            writes.set()
            may_write.wait(60)
        write(descriptor, value)

    waker = threading.Thread(target=monitor._wake)
    os.eventfd_write = slow_write
    waker.start()
    writes.wait(60)
    monitor.stop()
    wait_until(lambda: monitor._waker is None)
    is_open = [os.path.exists(file) and os.readlink(file) == which]
    may_write.set()
    waker.join(60)
    os.eventfd_write = write
    is_open.append(os.path.exists(file) and os.readlink(file) == which)
    monitor._wake()  # it has no file any more
    dist.barrier()
    return is_open


@beside_others(Job(ends_beside_a_wake, 2, Given.PORT, group=False))
def test_no_thread_writes_to_the_monitors_file_once_it_is_closed(
    results: list[Result],
) -> None:
    for result in results:
        assert result.value == [True, False]
