"""A strategy, keywords of it, or sizes of a mesh that the trainer refuses.

Lightning's Trainer accepts only strategies of lightning.pytorch: one of pytorch_lightning or
lightning.fabric is refused, although it has the same name. NeMo 3.0 accepts no other _target_ at
all. DDPStrategy passes unknown keywords to DistributedDataParallel, which refuses them. The product
of the sizes of a ModelParallelStrategy must be the number of ranks. The job stops at its start,
when it has all its machines.
Link: https://lightning.ai/docs/pytorch/stable/extensions/strategy.html
"""

from __future__ import annotations

from nemo_patches.tools import counted
from nemo_patches.tools.doctor.finding import Findings, note, stops
from nemo_patches.tools.doctor.job import Job, count
from nemo_patches.tools.doctor.known_keys import (
    DDP_STRATEGY,
    STRATEGY_CLASSES,
    TABLE,
    closest,
)

BAD = """\
trainer:
  devices: 8
  strategy:
    _target_: lightning.pytorch.strategies.ModelParallelStrategy
    data_parallel_size: 2
    tensor_parallel_size: 2
"""
GOOD = BAD.replace("data_parallel_size: 2", "data_parallel_size: 4")

_OURS = "lightning.pytorch.strategies."


def check(job: Job) -> Findings:
    """Of a strategy with a _target_, on any number of ranks."""
    target = job.get("trainer.strategy._target_")
    if not job.has_trainer or not isinstance(target.value, str):
        return
    module, _, name = target.value.rpartition(".")
    if target.value.startswith(tuple(TABLE["strategies_not_taken"])) or not module:
        yield stops(
            f"{target.key}: {target.value} is no strategy of lightning.pytorch",
            target,
            f"_target_: {_OURS}{name if name in STRATEGY_CLASSES else 'DDPStrategy'}",
        )
    elif module.startswith("lightning.pytorch.") and name not in STRATEGY_CLASSES:
        close = closest(name, STRATEGY_CLASSES) or "DDPStrategy"
        what = f"{target.key}: lightning.pytorch has no strategy {name}"
        yield stops(what, target, f"_target_: {_OURS}{close}")
    elif not module.startswith(("lightning.pytorch.", "nemo.")):
        what = (
            f"{target.key}: NeMo 3.0 makes no {target.value} from a config, and stops"
            " the job at its start"
        )
        yield note(what, target, "a strategy made in the training script")
    if name == "DDPStrategy":
        yield from _keywords(job)
    elif name == "ModelParallelStrategy":
        yield from _sizes(job)


def _keywords(job: Job) -> Findings:
    for key in job.get("trainer.strategy").value:
        # Hydra's own: _target_, _recursive_.
        if key not in DDP_STRATEGY and not key.startswith("_"):
            value = job.get(("trainer", "strategy", key))
            close = closest(key, DDP_STRATEGY)
            instead = f"{close}: {value.value}" if close else "no such key"
            yield stops(f"{value.key}: DDPStrategy takes no {key}", value, instead)


def _sizes(job: Job) -> Findings:
    """What auto is: as many as nodes, and as devices of a node."""
    data = job.get("trainer.strategy.data_parallel_size", "auto")
    tensor = job.get("trainer.strategy.tensor_parallel_size", "auto")
    nodes = count(job.nodes.value) if data.value == "auto" else data.number
    devices = count(job.devices.value) if tensor.value == "auto" else tensor.number
    if not job.ranks or nodes is None or devices is None:
        return
    product = nodes * devices
    if product != job.ranks:
        sizes = (
            f"{nodes:.0f} (data_parallel_size) times {devices:.0f}"
            " (tensor_parallel_size)"
        )
        yield stops(
            f"{sizes} is {product:.0f}, and the job has {counted(job.ranks, 'rank')}",
            (data, tensor, job.devices, job.nodes),
            "sizes that make up the number of ranks; auto is the number of nodes"
            " (data), and of devices (tensor)",
        )
