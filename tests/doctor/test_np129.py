"""NP129: a resume reads a stream from its beginning; that seeds are the same in each launch is seen in Lhotse, run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from configs import LHOTSE, NOTE, found

pytestmark = pytest.mark.one_nemo

STREAM = "+model.train_ds.tarred_audio_filepaths=audio.tar"
RESUMES = "+exp_manager.resume_if_exists=true"
RANDOMIZED = "model.train_ds.shard_seed=randomized"


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ((STREAM, RESUMES, RANDOMIZED), True),
        ((STREAM, RESUMES, RANDOMIZED, "trainer.devices=1"), True),
        ((STREAM, RESUMES, RANDOMIZED, "+model.train_ds.seed=7"), True),
        ((STREAM, RESUMES), True),  # shard_seed: 0
        ((STREAM, RESUMES, "model.train_ds.shard_seed=trng"), False),
        ((STREAM, RESUMES, "~model.train_ds.shard_seed"), False),
        ((STREAM, RESUMES, RANDOMIZED, "+model.train_ds.seed=trng"), False),
        ((STREAM, RESUMES, RANDOMIZED, "+model.train_ds.seed=${oc.env:SEED}"), False),
        ((STREAM, RANDOMIZED), False),
        ((STREAM, RANDOMIZED, "+exp_manager.resume_if_exists=false"), False),
        ((RESUMES, RANDOMIZED), False),  # no stream: its epochs begin anew
    ],
)
def test_a_stream_is_read_in_the_same_order_again(tmp_path: Path, overrides: tuple[str, ...], same: bool) -> None:
    said = found(tmp_path, "NP129", LHOTSE, *overrides)
    assert [finding.severity for finding in said] == [NOTE] * same


def test_randomized_is_the_same_in_every_launch() -> None:
    pytest.importorskip("lhotse")
    program = (
        "import torch\n"
        "from lhotse.dataset.dataloading import make_worker_init_fn, resolve_seed\n"
        "from types import SimpleNamespace\n"
        "torch.utils.data.get_worker_info = lambda: SimpleNamespace(id=0, num_workers=8)\n"
        "for launch in range(2):\n"
        "    make_worker_init_fn(rank=1, world_size=2, seed=0)(0)\n"
        "    print(resolve_seed('randomized'), resolve_seed('trng'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    (first, other), (again, another) = (line.split() for line in done.stdout.splitlines())
    assert first == again and other != another
