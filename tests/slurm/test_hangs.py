"""nemo_patches under a real Slurm: switched on, and what a job that hangs says and does. Each job has
two tasks on two nodes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import cluster_page
import pytest
from cluster import LOGIN, Cluster, until
from jobs import CHECKOUT, HANGS, ON, PYTHON, TRAINING, Job, collect, diagnosed

WAITS = r"WARNING \[rank 0/2 sl-1\] no step for \d+ s\. rank 1 \(sl-2, pid \d+\): read_shard"


@pytest.mark.parametrize(
    "lines",
    [
        f"export PYTHONPATH={CHECKOUT}\nsrun {HANGS}",
        cluster_page.command("Slurm", "start with the fix").replace(PYTHON, HANGS),
        f"nemo-patches run -- srun {HANGS}",
    ],
    ids=["PYTHONPATH", "srun run", "run srun"],
)
def test_every_way_of_switching_on(
    cluster: Cluster, tmp_folder: Path, lines: str
) -> None:
    job = Job(cluster, tmp_folder, lines)
    job.said(WAITS)
    job.cancel()


def test_nemo_under_lightning_names_the_rank_that_its_length_sync_waits_for(
    cluster: Cluster, tmp_folder: Path
) -> None:
    """In its second attempt, which its trace's header tells from the first one."""
    lines = (
        'test -n "$SLURM_RESTART_COUNT" || { scontrol requeue $SLURM_JOB_ID; sleep 600; }\n'
        f"srun {TRAINING} kind=nemo fault=STOP@1@5"
    )
    trace = tmp_folder / "trace"
    env = {**ON, "NEMO_PATCHES_TRACE": str(trace)}
    job = Job(cluster, tmp_folder, lines, env=env)
    try:
        job.said(r"nemo_patches WARNING \[rank 0/2 .*rank 1\b", limit_s=400)
        job.signal(1, "CONT")
        job.said(r"task 0: step 20 ")
        headers = [json.loads(one.open().readline()) for one in trace.iterdir()]
        assert {one["rank"] for one in headers} == {0, 1}
        assert {one["job"] for one in headers} == {f"slurm {job.id}.0 restart 1"}
    finally:
        job.cancel()


def test_a_stall_ends_the_job_with_83_and_the_script_requeues_it_held(
    cluster: Cluster, tmp_folder: Path
) -> None:
    """By the page's batch script."""
    script = cluster_page.with_words(cluster_page.blocks("Slurm")[1], **{"600": "10"})
    training = f"{TRAINING} fault=STOP@1@20 once=1"
    assert PYTHON in script
    lines = script.replace(PYTHON, training).replace(
        "code=$?\n", "code=$?\necho the step ended with $code\n"
    )
    job = Job(cluster, tmp_folder, lines)
    job.said("the step ended with")
    assert "task 0: Exited with exit code 83" in job.text(), job.text()
    until(lambda: "Priority=0 " in job.info(), 300, "the job is held")
    until(lambda: job.state() == "PENDING", 300, f"it is pending: {job.info()}")
    code, text = diagnosed(cluster, job.log)
    job.cancel()
    assert code == 1, text
    assert re.match(r"Rank 1\b.*(heartbeat|stopped)", text), text + job.text()


def test_lightnings_requeue_by_a_signal_that_one_rank_handles(
    cluster: Cluster, tmp_folder: Path
) -> None:
    lines = f"srun {TRAINING} kind=lightning requeue=USR1"
    job = Job(cluster, tmp_folder, lines, env=ON)
    job.said("task 1: step 20 ")
    job.signal(1, "USR1")
    job.said(
        r"nemo_patches WARNING .*no step for .*rank 1 \(sl-2, pid \d+\): .*"
        r"while in a handler of SIGUSR1 \(Lightning's requeue\)"
    )
    done = cluster.on(LOGIN, f"cd {tmp_folder} && {collect(job)}")
    assert done.returncode == 0, done.stdout
    code, text = diagnosed(cluster, tmp_folder)
    job.cancel()
    assert code == 1, text
    assert "Rank 1 is in a handler of SIGUSR1 (Lightning's requeue)" in text, text
    assert "fewer batches" not in text


def test_a_suspended_job_goes_on(cluster: Cluster, tmp_folder: Path) -> None:
    job = Job(cluster, tmp_folder, f"srun {TRAINING} steps=60 pace_s=0.2", env=ON)
    job.said("task 1: step 10 ")
    assert cluster.on(LOGIN, f"scontrol suspend {job.id}").returncode == 0
    until(lambda: job.state() == "SUSPENDED", 300, "the job is suspended")
    cluster.on(LOGIN, f"scontrol resume {job.id}")
    assert job.ended() == "COMPLETED"
    assert "no step for" not in job.text()
