"""What signals do to a job under a real Slurm: stall_exit's end and the requeue after it, Lightning's
requeue, suspension.
"""

from __future__ import annotations

import re
from pathlib import Path

import cluster_page
import pytest
from cluster import LOGIN, Cluster, until
from jobs import ON, PYTHON, TRAINING, Job, collect, diagnosed

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm_restart.sh"


@pytest.mark.parametrize(
    ("fault", "is_requeued", "said"),
    [
        ("STOP", True, "task 0: Exited with exit code 83"),
        ("KILL", True, "task 1: Killed"),
        ("0", False, "task 0: Exited with exit code 1"),
        ("raise", False, "task 1: Exited with exit code 1"),
    ],
    ids=["stopped", "killed", "ended", "raises"],
)
def test_the_restart_script_requeues_a_stall_held_and_no_error(
    cluster: Cluster, tmp_folder: Path, fault: str, is_requeued: bool, said: str
) -> None:
    """Under Lightning, which handles SIGTERM: srun's code of a stall is 137 where a rank goes on for
    longer than KillWait, and else the highest that a rank ended with.
    """
    script = cluster_page.with_words(SCRIPT.read_text(), **{"600": "10"})
    training = f"{TRAINING} kind=lightning fault={fault}@1@20 once=1"
    assert PYTHON in script
    told = "code=${PIPESTATUS[0]}\necho the step ended with $code\n"
    lines = script.replace(PYTHON, training).replace(told.splitlines()[0] + "\n", told)
    job = Job(cluster, tmp_folder, lines)
    job.said("the step ended with")
    assert said in job.text(), job.text()
    if not is_requeued:
        assert job.ended() == "FAILED"
        return
    if fault == "STOP":
        assert re.search(r"the step ended with (83|137)\n", job.text()), job.text()
    until(lambda: "Priority=0 " in job.info(), 300, "the job is held")
    until(lambda: job.state() == "PENDING", 300, f"it is pending: {job.info()}")
    code, text = diagnosed(cluster, job.log)
    job.cancel()
    assert code == 1, text
    if fault == "KILL":
        assert "task 1 on sl-2: Killed" in text.splitlines()[0], text + job.text()
    else:
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
