"""What Slurm leaves behind, read afterwards; and what meets where its tasks do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import LOGIN, Cluster, missing
from jobs import TRAINING, Job, diagnosed


def _cancel(job: Job) -> None:
    job.said("task 1: step 20 ")
    job.cluster.on(LOGIN, f"scancel {job.id}")


def _requeue(job: Job) -> None:
    job.said("task 1: step 20 ")
    job.cluster.on(LOGIN, f"scontrol requeuehold {job.id}")
    job.said("srun: error: .*Terminated", times=2)


def _limit(job: Job) -> None:
    job.said("task 1: step 20 ")
    done = job.cluster.on(LOGIN, f"scontrol update jobid={job.id} timelimit=0:01")
    assert done.returncode == 0, done.stdout


def _lose_node(job: Job) -> None:
    job.said("task 1: step 20 ")
    node = "scontrol update nodename=sl-2 state="
    done = job.cluster.on(LOGIN, f"{node}down reason=test")
    assert done.returncode == 0, done.stdout
    job.said("NODE FAIL")
    job.cluster.on(LOGIN, f"{node}resume")


def _nothing(job: Job) -> None:
    pass


@pytest.mark.parametrize(
    ("how", "options", "act", "first", "never"),
    [
        ("", "", _cancel, r"^The job was ended \(Slurm: CANCELLED AT", "memory"),
        ("", "", _limit, r"^The job reached its time limit", "memory"),
        ("", "", _requeue, r"^Slurm has requeued the job", "memory"),
        ("", "", _lose_node, r"^A node of the job failed \(Slurm", "memory"),
        ("KILL@1@20", "", _nothing, r"was killed .*task 1 on sl-2: Killed", "xit code"),
        (
            "137@1@20",
            "",
            _nothing,
            r"exit code 137 \(SIGKILL\).*task 1 on sl-2",
            "dead",
        ),
        ("raise@1@20", "--label", _nothing, r"^Rank 1 raised RuntimeError", "memory"),
    ],
    ids=[
        "scancel",
        "time limit",
        "requeue",
        "node",
        "killed",
        "exit 137",
        "labelled",
    ],
)
def test_how_slurm_says_that_a_job_ended(
    cluster: Cluster,
    tmp_folder: Path,
    how: str,
    options: str,
    act: object,
    first: str,
    never: str,
) -> None:
    """Without torch in the job: what is judged is what Slurm and Python write."""
    lines = f"srun --kill-on-bad-exit {options} {TRAINING} kind=bare fault={how}"
    job = Job(cluster, tmp_folder, lines)
    assert callable(act)
    act(job)
    if act not in (_requeue, _lose_node):
        job.ended()
    code, text = diagnosed(cluster, job.log)
    job.cancel()
    assert code == 1, text + job.text()
    assert re.search(first, text, re.MULTILINE), text + job.text()
    assert never not in text.splitlines()[0] + text.splitlines()[1], text


def test_a_requeued_job_that_completes_is_not_judged_by_its_first_attempt(
    cluster: Cluster, tmp_folder: Path
) -> None:
    lines = f"srun {TRAINING} kind=bare steps=40 fault=raise@1@39 once=1"
    # The first attempt is ended before it fails; its end is no verdict on the second one.
    job = Job(cluster, tmp_folder, lines)
    job.said("task 1: step 20 ")
    cluster.on(LOGIN, f"scontrol requeue {job.id}")
    job.said("attempt 1", times=2)
    assert job.ended() == "COMPLETED"
    code, text = diagnosed(cluster, job.log)
    assert code != 1, text + job.text()
    assert "raised" not in text
    assert "CANCELLED" not in text


def test_how_slurm_says_that_a_job_was_preempted(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if why := missing():
        pytest.skip(why)
    shared = tmp_path_factory.mktemp("preempts")
    for each in (shared, shared.parent):
        each.chmod(0o755)
    with Cluster(shared, preempts=True) as cluster:
        options = "-N 2 --ntasks-per-node=1 --no-requeue"
        job = Job(cluster, shared / "job", f"srun {TRAINING} kind=bare", options)
        job.said("task 1: step 20 ")
        urgent = Job(cluster, shared / "urgent", "true", "-p urgent -N 2 --exclusive")
        assert urgent.ended() == "COMPLETED"
        assert job.ended() == "PREEMPTED"
        code, text = diagnosed(cluster, job.log)
    assert code == 1, text + job.text()
    assert text.startswith("The job was preempted (Slurm: CANCELLED AT"), text


def test_doctor_meets_where_lightning_does(cluster: Cluster, tmp_folder: Path) -> None:
    command = "NEMO_PATCHES_TIMEOUT=120 srun -N 2 -n 2 nemo-patches doctor --ranks"
    done = cluster.on(LOGIN, f"cd {tmp_folder} && {command}", limit_s=300)
    assert "2 of 2 ranks answered, on 2 hosts" in done.stdout, done.stdout
