"""A job that hangs under a real Slurm, looked at from its nodes and from the login node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import LOGIN, Cluster, missing
from jobs import HANGS, ON, TRAINING, Job, collect, diagnosed


@pytest.fixture(scope="module")
def hung(cluster: Cluster, shared: Path) -> Iterator[Job]:
    """A job that runs nothing of nemo_patches, and hangs."""
    job = Job(cluster, shared / "hung", f"srun {HANGS}")
    job.said("fault sleep")
    yield job
    job.cancel()


@pytest.fixture(scope="module")
def healthy(cluster: Cluster, hung: Job, shared: Path) -> Iterator[Job]:
    """Another job on the same nodes."""
    job = Job(cluster, shared / "healthy", f"srun {TRAINING} kind=bare steps=100000")
    job.said("task 1: step 20 ")
    yield job
    job.cancel()


def test_the_documented_command_names_the_rank(
    cluster: Cluster, hung: Job, healthy: Job, tmp_folder: Path
) -> None:
    """Its own tasks are no ranks, and neither are those of another job on these nodes."""
    done = cluster.on(LOGIN, f"cd {tmp_folder} && {collect(hung)}")
    assert done.returncode == 0, done.stdout
    for node in cluster.nodes:
        found = json.loads((tmp_folder / f"{node}.json").read_text())
        [job] = found["jobs"]
        assert [one["rank"]["found_by"] for one in job["ranks"]] == ["Slurm"]
        assert job["ranks"][0]["rank"]["job"] == hung.id
    code, text = diagnosed(cluster, tmp_folder)
    assert code == 1, text
    assert text.startswith("Rank 1: it is in read_shard"), text


def test_a_folder_of_two_jobs_gives_two_verdicts(
    cluster: Cluster, hung: Job, healthy: Job, tmp_folder: Path
) -> None:
    for node in cluster.nodes:
        done = cluster.on(node, f"nemo-patches stacks --json > {tmp_folder}/{node}")
        assert done.returncode == 0, done.stdout
    code, text = diagnosed(cluster, tmp_folder)
    assert code == 1, text
    assert "Rank 1: it is in read_shard" in text
    assert "ranks 0-1 went on" in text


@pytest.mark.parametrize("by", ["name", "folder"])
def test_one_of_two_jobs_is_chosen(
    cluster: Cluster, hung: Job, healthy: Job, by: str
) -> None:
    chosen = hung.id if by == "name" else hung.folder
    code, text = diagnosed(cluster, f"--job {chosen}", "sl-2")
    assert "Rank 1 is in no collective: it is in read_shard" in text, text
    assert "---" not in text
    assert code == 2  # nothing of the other node is known here


def test_a_login_node_is_told_of_srun(cluster: Cluster) -> None:
    code, text = diagnosed(cluster, "")
    assert code == 2
    assert "srun --overlap --jobid J -N NODES" in text
    assert "--pids" not in text


def test_a_step_in_which_no_rank_runs_says_so(cluster: Cluster, hung: Job) -> None:
    done = cluster.on(LOGIN, "srun --overlap -w sl-1 -n 1 nemo-patches stacks")
    assert done.returncode != 0
    assert "no rank of Slurm's job" in done.stdout


@pytest.fixture(scope="module")
def with_job_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose jobs have a /tmp of their own (job_container/tmpfs)."""
    if why := missing():
        pytest.skip(why)
    with Cluster(tmp_path_factory.mktemp("job_tmp"), nodes=1, job_tmp=True) as made:
        yield made


def test_a_shell_on_the_node_finds_a_job_that_has_a_tmp_of_its_own(
    with_job_tmp: Cluster,
) -> None:
    options = "-N 1 --ntasks-per-node=2"
    folder = with_job_tmp.shared / "job"
    job = Job(with_job_tmp, folder, f"srun {HANGS}", options, ON)
    line = job.said(r"INFO \[.*this report is in /tmp/nemo_patches-0/")
    assert "Slurm removes that folder with the job: to keep it, set TMPDIR" in line
    assert not with_job_tmp.on("sl-1", "ls /tmp/nemo_patches-0").stdout.startswith("1")
    for what in ("", f"--job {job.id}"):
        code, text = diagnosed(with_job_tmp, what, "sl-1")
        assert code == 1, text
        assert "Rank 1: it is in read_shard" in text, text
    job.cancel()
