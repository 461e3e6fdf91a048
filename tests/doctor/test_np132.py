"""NP132: a strategy's class and sizes, compared with Lightning's own where it is installed."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path

import pytest
from configs import NEST, NOTE, WARNING, found

from nemo_patches.tools.doctor.known_keys import DDP_STRATEGY, STRATEGY_CLASSES

pytestmark = pytest.mark.one_nemo

OURS = "lightning.pytorch.strategies."


def strategy(target: str, **keywords: object) -> str:
    return f"trainer.strategy={{{', '.join([f'_target_: {target}', *(f'{k}: {v}' for k, v in keywords.items())])}}}"


@pytest.mark.parametrize(
    "target",
    [
        "pytorch_lightning.strategies.DDPStrategy",
        "lightning.fabric.strategies.DDPStrategy",
        "torch.nn.parallel.DistributedDataParallel",
        "DDPStrategy",
        f"{OURS}DDPStrategyy",
        f"{OURS}ddp.DistributedStrategy",
    ],
)
def test_classes_that_are_no_strategy_of_lightning_pytorch(
    tmp_path: Path, target: str
) -> None:
    (finding,) = found(tmp_path, "NP132", NEST, strategy(target))
    assert finding.severity is WARNING
    assert finding.instead == f"_target_: {OURS}DDPStrategy"


def test_a_class_of_ones_own_is_refused_by_nemo_3_alone(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP132", NEST, strategy("my.Strategy"))
    assert finding.severity is NOTE and "NeMo 3.0" in finding.what
    taken = (
        f"{OURS}DDPStrategy",
        f"{OURS}ddp.DDPStrategy",
        "nemo.collections.speechlm2.parts.parallel.Automodel",
    )
    for target in taken:
        assert found(tmp_path, "NP132", NEST, strategy(target)) == []
    assert (
        found(tmp_path, "NP132", NEST)
        == found(tmp_path, "NP132", NEST, "trainer.strategy='???'")
        == []
    )


def test_keywords_that_ddp_does_not_take(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path,
        "NP132",
        NEST,
        strategy(f"{OURS}DDPStrategy", find_unused_parameter=True),
    )
    assert finding.severity is WARNING
    assert finding.instead == "find_unused_parameters: True"
    assert (
        found(
            tmp_path,
            "NP132",
            NEST,
            strategy(f"{OURS}DDPStrategy", static_graph=True, _recursive_=False),
        )
        == []
    )


@pytest.mark.parametrize(
    ("data", "tensor", "devices", "nodes", "stops"),
    [
        (2, 2, 8, 1, True),
        (4, 2, 8, 1, False),
        (4, 2, 8, 2, True),
        (2, "auto", 8, 2, False),
        ("auto", "auto", 8, 2, False),
        ("auto", 1, 8, 1, True),
        ("auto", 8, 8, 4, False),
        (2, 2, -1, 1, False),
        ("'???'", 2, 8, 1, False),
        (1, 1, 1, 1, False),
        (2, 1, 1, 1, True),
    ],
)
def test_sizes_make_up_the_ranks(
    tmp_path: Path, data: object, tensor: object, devices: int, nodes: int, stops: bool
) -> None:
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor}
    given = strategy(f"{OURS}ModelParallelStrategy", **sizes)
    findings = found(
        tmp_path,
        "NP132",
        NEST,
        given,
        f"trainer.devices={devices}",
        f"trainer.num_nodes={nodes}",
    )
    assert [finding.severity for finding in findings] == [WARNING] * stops
    assert all("the job stops at its start" in finding.what for finding in findings)


def test_lightning_has_these_classes_and_ddp_these_keywords() -> None:
    with contextlib.suppress(ImportError):
        import torch
        from lightning.fabric.strategies.model_parallel import _setup_device_mesh
        from lightning.pytorch import Trainer, strategies
        from torch.nn.parallel import DistributedDataParallel

        assert {name for name in dir(strategies) if name.endswith("Strategy")} <= set(
            STRATEGY_CLASSES
        )
        taken = {
            name
            for made in (
                strategies.DDPStrategy.__init__,
                DistributedDataParallel.__init__,
            )
            for name in inspect.signature(made).parameters
        }
        assert taken - {"self", "module", "kwargs", "device_ids"} <= DDP_STRATEGY
        with pytest.raises(TypeError):
            DistributedDataParallel(torch.nn.Linear(1, 1), find_unused_parameter=True)  # type: ignore[call-arg]
        with pytest.raises(
            RuntimeError, match="multiplied should equal the world size"
        ):
            _setup_device_mesh(2, 2, 8, torch.device("cpu"))
        with contextlib.suppress(ImportError):
            # The same name, and no strategy of a Trainer's.
            from lightning.fabric.strategies import DDPStrategy

            with pytest.raises(ValueError, match="invalid strategy"):
                Trainer(
                    accelerator="cpu", devices=1, logger=False, strategy=DDPStrategy()
                )  # type: ignore[arg-type]
