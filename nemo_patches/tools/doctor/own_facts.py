"""What a rank tells the others about itself: its versions, settings, variables and device."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from nemo_patches.tools import status
from nemo_patches.tools.doctor import machine
from nemo_patches.tools.doctor.rank_place import RankPlace
from nemo_patches.tools.doctor.ranks import Facts

_OF_A_HOST = ("_IFNAME", "_HCA")  # variables that end so are a host's own, and may differ


def gather(here: RankPlace, loaders: Mapping[str, str]) -> Facts:
    """Imports torch. loaders: what a config makes of this rank's data loaders."""
    versions = machine.versions()
    try:
        report = status.examine()
        versions = {**report.versions, **{name: versions[name] for name in versions if "lightning" in name}}
        chosen = {setting.name: setting.value for setting in report.settings}
        unpatched, auto_apply = report.reasons, report.auto_apply
    except status.StatusError as error:
        chosen, unpatched, auto_apply = {}, (str(error),), "off"
    device, identity = _device(here.local_rank)
    return Facts(
        rank=here.rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device,
        device_id=identity,
        versions=versions,
        settings=chosen,
        environment=_comparable(os.environ),
        unpatched=unpatched,
        auto_apply=auto_apply,
        loaders=dict(loaders),
    )


def _comparable(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that ought to be the same on all ranks; our own are among the settings."""
    return {
        name: value
        for name, value in machine.environment(variables).items()
        if name.startswith(("NCCL_", "TORCH_", "GLOO_")) and not name.endswith(_OF_A_HOST)
    }


def _device(local_rank: int) -> tuple[str, str]:
    """The GPU that Lightning would give this rank, and what tells it from others; or the CPU."""
    import torch

    if not torch.cuda.is_available():
        return "CPU", ""
    if local_rank >= torch.cuda.device_count():
        return f"no GPU of its own: {torch.cuda.device_count()} on this host", ""
    properties = torch.cuda.get_device_properties(local_rank)
    return f"cuda:{local_rank} {properties.name}", str(getattr(properties, "uuid", ""))
