"""NP136: ranks without a data loader."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from configs import NOTE, found

pytestmark = pytest.mark.one_nemo

TEXT = """\
trainer: {devices: 8, strategy: {_target_: nemo.collections.speechlm2.parts.parallel.AutomodelParallelStrategy}}
data: {train_ds: {cuts_path: a, batch_size: 8, shard_seed: 0}}
"""


@pytest.mark.parametrize("key", ["tp_size", "cp_size", "tensor_parallel_size"])
def test_where_one_rank_reads_for_others(tmp_path: Path, key: str) -> None:
    (finding,) = found(tmp_path, "NP136", TEXT, f"+trainer.strategy.{key}=4")
    assert finding.severity is NOTE
    assert finding.what.startswith("one of 4 ranks")


def test_the_sizes_multiply(tmp_path: Path) -> None:
    sizes = ("+trainer.strategy.tp_size=4", "+trainer.strategy.cp_size=2")
    (finding,) = found(tmp_path, "NP136", TEXT, *sizes)
    assert finding.what.startswith("one of 8 ranks")


def test_lightnings_mesh_has_other_names_and_each_rank_reads(tmp_path: Path) -> None:
    lightning = (
        "trainer.strategy._target_=lightning.pytorch.strategies.ModelParallelStrategy"
    )
    size = "+trainer.strategy.tensor_parallel_size=4"
    (finding,) = found(tmp_path, "NP136", TEXT, lightning, size)
    assert finding.what.startswith("each of 4 ranks reads by itself")


def test_not_where_each_reads_its_own(tmp_path: Path) -> None:
    assert found(tmp_path, "NP136", TEXT) == []
    assert found(tmp_path, "NP136", TEXT, "+trainer.strategy.tp_size=1") == []
    assert (
        found(
            tmp_path,
            "NP136",
            TEXT.replace("data:", "model:"),
            "+trainer.strategy.tp_size=4",
        )
        == []
    )


@pytest.mark.installed
def test_nemos_axes_are_not_those_of_lightnings_mesh() -> None:
    nemo, lightning = (importlib.util.find_spec(name) for name in ("nemo", "lightning"))
    if nemo is None or lightning is None:
        pytest.skip("NeMo is not installed")
    shared = "collections/common/data/lhotse/broadcasting.py"
    source = Path(str(nemo.origin)).parent / shared
    if not source.exists():
        pytest.skip("NeMo before 3.0 broadcasts no batches")
    assert 'axes: tuple[str, ...] = ("cp", "tp")' in source.read_text()
    mesh = Path(str(lightning.origin)).parent / "fabric/strategies/model_parallel.py"
    assert 'mesh_dim_names=("data_parallel", "tensor_parallel")' in mesh.read_text()
