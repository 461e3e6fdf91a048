"""One rank of a real job under Hydra, Lightning and torchrun raises, and torchrun ends the others:
who is named.

Most jobs here are forked by torchrun's own agent from a process that has imported NeMo once.
HYDRA_RUNS=20 runs so many drawn by chance with `torchrun` itself, on PYTHONPATH alone and installed
in turn.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import traces
from diagnosing import critical, diagnosed
from interpreters import CHECKOUT, LAUNCHER, environment, run
from ranks import free_port
from test_trainer_callbacks import entry_point as entry_point

pytestmark = pytest.mark.one_nemo
APP = CHECKOUT / "tests" / "hydra_app.py"
RUNS = int(os.environ.get("HYDRA_RUNS", "0"))
RANKS = (
    3  # of a job that is forked; torchrun itself has two, each of which imports NeMo
)
LIMIT_S = 400.0
# By place the exception's type and the beginning of its last line, as tests/hydra_app.py raises
# them.
RAISED = {
    "training_step": ("ValueError", "no such audio: a_17.wav"),
    "worker": (
        "RuntimeError",
        (
            "stack expects each tensor to be equal size, but got [16, 64] at entry 0"
            " and [16, 65]"
        ),
    ),
    "download": ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    "validation": ("KeyError", "'transcript'"),
    "callback": ("OSError", "[Errno 28] No space left on device"),
    "setup": (
        "FileNotFoundError",
        "[Errno 2] No such file or directory: '/data/manifest.json'",
    ),
}
# Arguments: folder, then place:culprit for each job, or "alone" for rank 0 of 2 of which the other
# never starts.
LAUNCHES = """
import gc, json, multiprocessing, os, runpy, sys
gc.disable()
import lightning.pytorch, nemo.collections.asr.modules, nemo.core.config, torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
import nemo_patches

gc.freeze(); gc.enable()  # else each collection in a rank goes through all of NeMo

def script(folder, arguments, variables={}):
    os.environ.update(variables)
    os.chdir(folder)
    nemo_patches.apply(trace=folder)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
        return
    except SystemExit as exit:
        code = exit.code
    raise SystemExit(code)  # without what it came from: an interpreter that ends does not tell that, either

base, app, ranks, port, *jobs = sys.argv[1:]
for job in jobs:
    name, place, culprit = job.split(":")
    folder = os.path.join(base, name)
    os.mkdir(folder)
    arguments = [app, f"+place={place}", f"+culprit={culprit}", "+step=3"]
    if place == "alone":
        variables = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                         TORCHELASTIC_RUN_ID="alone", GROUP_RANK="0", LOCAL_WORLD_SIZE="2")
        process = multiprocessing.get_context("fork").Process(
            target=script, args=(folder, [*arguments, "+group_timeout=2"], variables))
        process.start()
        process.join(60)
        process.kill()
        codes = {0: process.exitcode}
    else:
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=int(ranks), run_id=name, rdzv_backend="c10d",
                              rdzv_endpoint="127.0.0.1:0", max_restarts=0, start_method="fork", monitor_interval=0.05)
        try:
            elastic_launch(config, script)(folder, arguments)
            codes = {}
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    print("ended", name, json.dumps(codes), flush=True)
"""
JOBS = {place: (place, number % RANKS) for number, place in enumerate(RAISED)}
JOBS |= {"caught": ("caught", -1), "stopped": ("stopped", -1), "alone": ("alone", 0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By job a folder with what its ranks have left."""
    base = tmp_path_factory.mktemp("jobs")
    jobs = [f"{name}:{place}:{culprit}" for name, (place, culprit) in JOBS.items()]
    command = [
        sys.executable,
        "-c",
        LAUNCHES,
        str(base),
        str(APP),
        str(RANKS),
        str(free_port()),
        *jobs,
    ]
    done = run(command, environment(CHECKOUT), LIMIT_S, cwd=base)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert len(ended) == len(JOBS), (done.stdout[-2000:], done.stderr[-6000:])
    return base


def names(report: Any, place: str, culprit: int) -> bool:
    kind, message = RAISED[place]
    first = report.findings[0]
    return (first.id, first.ranks) == (
        "exception",
        (culprit,),
    ) and f"raised {kind}: {message}" in first.text


@pytest.mark.parametrize(
    "name", [name for name, (place, _) in JOBS.items() if place in RAISED]
)
def test_the_rank_and_its_exception_are_named(folder: Path, name: str) -> None:
    place, culprit = JOBS[name]
    report = diagnosed(folder / name)
    assert names(report, place, culprit), report.verdict
    assert report.findings[0].severity == "critical"
    assert all(finding.ranks in ((culprit,), ()) for finding in critical(report))


def test_its_time_is_recorded_and_is_before_the_others_ends(folder: Path) -> None:
    culprit, raised_at, ended_at = JOBS["callback"][1], 0.0, []
    for file in traces.files(folder / "callback"):
        found = [
            json.loads(line)
            for line in file.read_bytes().splitlines()
            if line.startswith(b"{")
        ]
        started = found[0]["started"]
        if found[0]["rank"] == culprit:
            (failed,) = traces.of_kind(found, "raised")
            raised_at = started + failed["t"]
        else:
            ended_at.append(started + found[-1]["t"])
    assert 0 < raised_at < min(ended_at)


def test_who_catches_it_and_goes_on_is_not_accused(folder: Path) -> None:
    files = traces.files(folder / "caught")
    assert len(files) == RANKS
    for file in files:
        assert (
            len(traces.of_kind(traces.records(file), "raised", type="ValueError")) == 1
        )
    report = diagnosed(folder / "caught")
    assert not critical(report) and "exception" not in [
        one.id for one in report.findings
    ], report.verdict


def test_who_catches_it_and_ends_is_not_said_to_have_broken_a_job(folder: Path) -> None:
    report = diagnosed(folder / "stopped")
    assert not critical(report), report.verdict


def test_a_start_up_that_timed_out_is_called_so(folder: Path) -> None:
    report = diagnosed(folder / "alone")
    start_up = [finding for finding in report.findings if finding.id == "start-up"]
    assert len(start_up) == 1, report.verdict
    assert not start_up[0].ranks
    assert "Rank 0 waited for the process group in vain" in start_up[0].text
    assert "1/2 clients joined" in start_up[0].text


def torchrun(
    place: str, culprit: int, step: int, path: tuple[Path, ...], folder: Path
) -> Any:
    arguments = [f"+place={place}", f"+culprit={culprit}", f"+step={step}"]
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    variables = environment(*path, NEMO_PATCHES_TRACE=str(folder))
    done = run(
        [sys.executable, *launch, APP, *arguments], variables, LIMIT_S, cwd=folder
    )
    assert done.returncode != 0
    (folder / "stderr").write_text(done.stderr)
    return diagnosed(folder)


@pytest.mark.weekly  # torchrun with NeMo: test_auto_apply.py; PYTHONPATH alone: test_trainer_callbacks.py
def test_with_torchrun_on_pythonpath_alone(tmp_path: Path) -> None:
    # No entry points, whatever is installed.
    metadata = tmp_path / "nothing" / "nemo_patches-9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nemo-patches\nVersion: 9\n"
    )
    (jobs := tmp_path / "job").mkdir()
    report = torchrun("training_step", 1, 2, (metadata.parent, CHECKOUT), jobs)
    assert names(report, "training_step", 1), report.verdict


@pytest.mark.skipif(not RUNS, reason="HYDRA_RUNS=20 runs so many")
@pytest.mark.timeout(7200)
def test_many_by_chance(entry_point: Path, tmp_path: Path) -> None:
    chance, right, accused_wrongly = random.Random(28), 0, []
    for number in range(RUNS):
        place, culprit, step = (
            chance.choice(list(RAISED)),
            chance.randrange(2),
            chance.randint(1, 8),
        )
        path = [(CHECKOUT,), (entry_point, LAUNCHER)][number % 2]
        (folder := tmp_path / str(number)).mkdir()
        report = torchrun(place, culprit, step, path, folder)
        right += (is_right := names(report, place, culprit))
        accused = {rank for one in critical(report) for rank in one.ranks}
        accused_wrongly += [(number, report.verdict)] if accused - {culprit} else []
        print(number, place, culprit, step, is_right, report.verdict, flush=True)
        shutil.rmtree(folder)
    assert not accused_wrongly
    assert right >= RUNS * 19 / 20
