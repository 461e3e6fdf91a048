"""nemo_patches under a real Slurm: switched on, asked while a job hangs, and reading what Slurm
leaves behind. Each job has two tasks on two nodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import cluster_page
import pytest
from cluster import LOGIN, Cluster, missing, until
from jobs import CHECKOUT, ON, TRAINING, Job

# These look at the same jobs: with several workers, on one of them.
at_a_hung_job = pytest.mark.xdist_group("hung")
PYTHON = "python train.py"  # in the page's commands
HANGS = f"{TRAINING} fault=sleep@1@20"
COLLECT = cluster_page.command("Slurm", "look while it hangs")
WAITS = r"WARNING \[rank 0/2 sl-1\] no step for \d+ s\. rank 1 \(sl-2, pid \d+\): read_shard"


def collect(job: Job) -> str:
    return cluster_page.with_words(COLLECT, NODES="2", J=job.id)


def diagnosed(cluster: Cluster, what: object, host: str = LOGIN) -> tuple[int, str]:
    done = cluster.on(host, f"nemo-patches diagnose {what}", limit_s=300)
    return done.returncode, done.stdout


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


@at_a_hung_job
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


@at_a_hung_job
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


@at_a_hung_job
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


@at_a_hung_job
def test_a_step_in_which_no_rank_runs_says_so(cluster: Cluster, hung: Job) -> None:
    done = cluster.on(LOGIN, "srun --overlap -w sl-1 -n 1 nemo-patches stacks")
    assert done.returncode != 0
    assert "no rank of Slurm's job" in done.stdout


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


def _preempt(job: Job) -> None:
    job.said("task 1: step 20 ")
    urgent = "-p urgent -N 2 --exclusive"
    Job(job.cluster, job.folder / "urgent", "true", urgent).ended()
    job.said("srun: error: .*Terminated", times=2)


def _nothing(job: Job) -> None:
    pass


@pytest.mark.parametrize(
    ("how", "options", "act", "first", "never"),
    [
        ("", "", _cancel, r"^The job was ended \(Slurm: CANCELLED AT", "memory"),
        ("", "", _limit, r"^The job reached its time limit", "memory"),
        ("", "", _requeue, r"^Slurm has requeued the job", "memory"),
        ("", "", _lose_node, r"^A node of the job failed \(Slurm", "memory"),
        ("", "", _preempt, r"^The job was preempted \(Slurm: CANCELLED AT", "memory"),
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
        "preempted",
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
    if act not in (_requeue, _lose_node, _preempt):
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


def test_doctor_meets_where_lightning_does(cluster: Cluster, tmp_folder: Path) -> None:
    command = "srun -N 2 -n 2 nemo-patches doctor --ranks"
    done = cluster.on(LOGIN, f"cd {tmp_folder} && {command}", limit_s=300)
    assert "2 of 2 ranks answered, on 2 hosts" in done.stdout, done.stdout


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
