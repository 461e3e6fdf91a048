"""Which of an optimizer's parameters are to be equal on all ranks: those that DistributedDataParallel keeps so."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from nemo_patches.uneven.checksums import parts

# A hook of another module may do what it likes with the gradients: post-local SGD, for one, does not reduce them.
_REDUCING = ("default_hooks", "mixed_precision_hooks")
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."


@dataclass(frozen=True)
class Replicas:
    """The parameters of one optimizer that all ranks have alike, in its order.

    names: of each number of their checksums. layout: what must be the same on all ranks for these to be of the same
    things. reason: why there are none, or why they need not be alike. others: how many of the optimizer's are not
    among them.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    names: tuple[str, ...] = ()
    layout: str = ""
    wrappers: tuple[weakref.ref[DistributedDataParallel], ...] = ()
    others: int = 0
    reason: str = ""

    def were_not_synced(self) -> bool:
        """Whether the last forward was under `no_sync`, so that its gradients are local, or without gradients."""
        wrappers = (reference() for reference in self.wrappers)
        return any(one is not None and not getattr(one, "require_forward_param_sync", True) for one in wrappers)


class Wrappers:
    """The DistributedDataParallel modules that were made since `noted` is a hook on the registration of modules."""

    def __init__(self) -> None:
        # In the order in which they were made, which is that of all ranks.
        self._made: weakref.WeakKeyDictionary[DistributedDataParallel, None] = weakref.WeakKeyDictionary()

    def noted(self, module: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            self._made[module] = None

    def replicas(self, optimizer: torch.optim.Optimizer, size: int) -> Replicas:
        """size: of the world."""
        parameters = parameters_of(optimizer)
        names: dict[torch.Tensor, str] = {}
        holders: list[DistributedDataParallel] = []
        for wrapper in list(self._made):
            if wrapper.process_group.size() != size:
                continue
            ignored = getattr(wrapper, "parameters_to_ignore", ())
            own = {tensor: name for name, tensor in wrapper.module.named_parameters() if name not in ignored}
            if not own.keys().isdisjoint(parameters):
                holders.append(wrapper)
                names.update(own)
        found = [parameter for parameter in parameters if parameter in names]
        reason = _hook_of(holders) if found else _why_none(parameters)
        devices = {parameter.device for parameter in found}
        if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", "cuda"}:
            reason = (
                f"they are on {', '.join(sorted(map(str, devices)))}, and only those on one GPU, or CPU, are compared"
            )
        if reason:
            return Replicas(reason=reason)
        layout = "\n".join(f"{names[tensor]} {tuple(tensor.shape)} {tensor.dtype}" for tensor in found)
        of_numbers = tuple(names[tensor] for tensor in found for _ in range(parts(tensor)))
        references = tuple(map(weakref.ref, holders))
        return Replicas(tuple(found), of_numbers, layout, references, len(parameters) - len(found))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _why_none(parameters: Iterable[torch.Tensor]) -> str:
    if any(hasattr(parameter, "placements") for parameter in parameters):
        return "they are sharded, or replicated by other means than DDP (DTensor: FSDP2, tensor or model parallel)"
    if any(hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "_sharded_size") for parameter in parameters):
        return "they are sharded (FSDP)"
    return "no DistributedDataParallel over all ranks that was made since apply() has them, so they need not be equal"


def _hook_of(wrappers: Iterable[DistributedDataParallel]) -> str:
    for wrapper in wrappers:
        for hook, _ in getattr(wrapper, "_comm_hooks", ()):
            module = str(getattr(hook, "__module__", ""))
            if module.removeprefix(_HOOKS) not in _REDUCING:
                name = getattr(hook, "__qualname__", type(hook).__name__)
                return (
                    f"DDP has a communication hook, {module}.{name}, which need not give all ranks the same gradients"
                )
    return ""
