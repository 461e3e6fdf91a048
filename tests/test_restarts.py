"""torchrun on two nodes that restart: their restart counts differ then, and the length sync works
as before.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import free_port, run_ranks, wait_until
from torch import nn

from nemo_patches.sync.length_sync import counters, synced_length, use
from nemo_patches.sync.settings import Settings

# Of torchrun and its store, not of NeMo's version.
pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]


def train(folder: Path) -> None:
    """The first attempt of the first node fails; the second node restarts for that alone."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    use(Settings(timeout=datetime.timedelta(seconds=60)))
    encoder = nn.Linear(1, 1)
    lengths = [synced_length(encoder, 100 * step + rank) for step in range(5)]
    last = folder / "last attempt"
    if os.environ["GROUP_RANK"] == "0":
        if not (folder / "failed").exists():
            (folder / "failed").touch()
            os._exit(3)
        last.touch()
    # Until this node's agent hears that the other one restarts.
    wait_until(last.exists, 100)
    restart, timeouts = os.environ["TORCHELASTIC_RESTART_COUNT"], counters()[0].timeouts
    found = {"restart": restart, "lengths": lengths, "timeouts": timeouts}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def node(_: int, __: int, endpoint: str, folder: Path) -> None:
    """torchrun's agent, with a rank that it forks."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # A store for each attempt: in one for all, Gloo itself may find an earlier attempt's addresses.
    os.environ.update(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="restarts",
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        max_restarts=3,
        monitor_interval=0.2,
        start_method="fork",
    )
    elastic_launch(config, train)(folder)


def test_lengths_are_agreed_on_after_restarts_that_the_nodes_count_differently(
    tmp_path: Path,
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = run_ranks(node, 2, endpoint, tmp_path, group=False, limit=150.0)
    found = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)
    ]
    assert found[0]["restart"] != found[1]["restart"], "the case that this test is for"
    for of_rank in found:
        assert of_rank["lengths"] == [100 * step + 1 for step in range(5)]
        assert of_rank["timeouts"] == 0
    assert not any(
        one.lines(words) for one in nodes for words in ("not patched", "not every rank")
    )
