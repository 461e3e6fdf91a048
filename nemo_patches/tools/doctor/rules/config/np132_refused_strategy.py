"""A strategy class that the trainer refuses, keywords that it does not accept, or sizes that do not match the ranks.

Lightning's Trainer accepts only strategies of lightning.pytorch: one of pytorch_lightning or lightning.fabric is
refused, although it has the same name. NeMo 3.0 accepts no other _target_ at all. DDPStrategy passes unknown keywords
to DistributedDataParallel, which refuses them. The product of the sizes of a ModelParallelStrategy must be the number
of ranks. The job stops at its start, when it has all its machines.
Link: https://lightning.ai/docs/pytorch/stable/extensions/strategy.html
"""

from __future__ import annotations

from difflib import get_close_matches

from nemo_patches.tools.doctor.finding import WARNING, Findings, note, stops, warning
from nemo_patches.tools.doctor.job import Job, count
from nemo_patches.tools.doctor.known_keys import DDP_STRATEGY, STRATEGY_CLASSES

WORST = WARNING
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
_NOT_TAKEN = ("pytorch_lightning.", "lightning.fabric.", "lightning_fabric.", "torch.")
_AS_CLOSE = 0.85  # of difflib


def check(job: Job) -> Findings:
    """Of a strategy with a _target_, on any number of ranks."""
    target = job.get("trainer.strategy._target_")
    if not job.has_trainer or not isinstance(target.value, str):
        return
    module, _, name = target.value.rpartition(".")
    if target.value.startswith(_NOT_TAKEN) or not module:
        instead = f"_target_: {_OURS}{name if name in STRATEGY_CLASSES else 'DDPStrategy'}"
        what = f"{target.key}: {target.value} is no strategy of lightning.pytorch"
        yield stops(what, target, instead)
    elif module.startswith("lightning.pytorch.") and name not in STRATEGY_CLASSES:
        close = get_close_matches(name, STRATEGY_CLASSES, 1, _AS_CLOSE)
        what = f"{target.key}: lightning.pytorch has no strategy {name}"
        yield stops(what, target, f"_target_: {_OURS}{close[0] if close else 'DDPStrategy'}")
    elif not module.startswith(("lightning.pytorch.", "nemo.")):
        what = f"{target.key}: NeMo 3.0 makes no {target.value} from a config, and stops the job at its start"
        yield note(what, target, "a strategy made in the training script")
    if name == "DDPStrategy":
        yield from _keywords(job)
    elif name == "ModelParallelStrategy":
        yield from _sizes(job)


def _keywords(job: Job) -> Findings:
    section = job.get("trainer.strategy").value
    for key in section if isinstance(section, dict) else ():
        if key not in DDP_STRATEGY and not key.startswith("_"):  # Hydra's own: _target_, _recursive_
            value = job.get(("trainer", "strategy", key))
            close = get_close_matches(key, DDP_STRATEGY, 1, _AS_CLOSE)
            what = f"{value.key}: DDPStrategy takes no {key}"
            yield stops(what, value, f"{close[0]}: {value.value}" if close else "no such key")


def _sizes(job: Job) -> Findings:
    """What auto is: as many as nodes, and as devices of a node."""
    data, tensor = (job.get(("trainer", "strategy", f"{kind}_parallel_size"), "auto") for kind in ("data", "tensor"))
    devices, nodes = count(job.devices.value), count(job.nodes.value)
    sizes = [nodes if data.value == "auto" else data.number, devices if tensor.value == "auto" else tensor.number]
    if not job.ranks or None in sizes or not devices or not nodes:
        return
    product = int((sizes[0] or 0) * (sizes[1] or 0))
    if product != job.ranks:
        what = (
            f"{int(sizes[0] or 0)} (data_parallel_size) times {int(sizes[1] or 0)} (tensor_parallel_size) is {product}"
        )
        yield warning(
            f"{what}, and there {'is' if job.ranks == 1 else 'are'} {job.ranks} rank{'s' * (job.ranks > 1)}: the job "
            "stops at its start",
            (data, tensor, job.devices, job.nodes),
            "sizes that make up the number of ranks; auto is the number of nodes (data), and of devices (tensor)",
        )
