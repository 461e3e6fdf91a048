"""What signals do to a job under a real Slurm: stall_exit's end and the requeue after it, Lightning's
requeue, suspension.
"""

from __future__ import annotations

import re
from pathlib import Path

import cluster_page
from cluster import LOGIN, Cluster, until
from jobs import ON, PYTHON, TRAINING, Job, collect, diagnosed


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
