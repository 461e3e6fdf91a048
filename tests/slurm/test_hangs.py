"""nemo_patches under a real Slurm: switched on, and what a job that hangs says and does. Each job has
two tasks on two nodes.
"""

from __future__ import annotations

import json
from pathlib import Path

import cluster_page
import pytest
from cluster import Cluster
from jobs import CHECKOUT, HANGS, ON, PYTHON, TRAINING, Job

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
