"""torchrun on two nodes that restart: their restart counts differ then, and the length sync works
as before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

# Of torchrun and its store, not of NeMo's version.
pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

LIMIT_S = 150
WORKER = """
import datetime, json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from nemo_patches.sync.length_sync import counters, synced_length, use
from nemo_patches.sync.settings import Settings
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo")
use(Settings(timeout=datetime.timedelta(seconds=60)))
encoder = torch.nn.Linear(1, 1)
lengths = [synced_length(encoder, 100 * step + rank) for step in range(5)]
last = folder / "last attempt"
if os.environ["GROUP_RANK"] == "0":
    if not (folder / "failed").exists():
        (folder / "failed").touch()
        os._exit(3)
    last.touch()
while not last.exists():  # until this node's agent hears that the other one restarts
    time.sleep(0.02)
restart, timeouts = os.environ["TORCHELASTIC_RESTART_COUNT"], counters()[0].timeouts
(folder / f"rank-{rank}.json").write_text(json.dumps({"restart": restart, "lengths": lengths, "timeouts": timeouts}))
dist.barrier()
"""


def test_lengths_are_agreed_on_after_restarts_that_the_nodes_count_differently(
    tmp_path: Path,
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    endpoint = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=3",
    ]
    command += [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-id=restarts",
        "--monitor-interval=0.2",
    ]
    nodes = [
        subprocess.Popen(
            [*command, str(script), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A store for each attempt: in one for all, Gloo itself may find an earlier attempt's
            # addresses.
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )
        for _ in range(2)
    ]
    try:
        logs = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(
        log[-3000:] for log in logs
    )
    found = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)
    ]
    assert found[0]["restart"] != found[1]["restart"], "the case that this test is for"
    for of_rank in found:
        assert of_rank["lengths"] == [100 * step + 1 for step in range(5)]
        assert of_rank["timeouts"] == 0
    assert not any(
        "not patched" in log or "not every rank's length" in log for log in logs
    )
