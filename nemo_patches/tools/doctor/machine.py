"""What decides on this machine how a hang ends:
the variables of NCCL and torch; torch is not imported here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nemo_patches.tools import counted
from nemo_patches.tools.doctor.config import Value

OFF = ("0", "n", "no", "false", "f")  # as torch reads a switch, in lower case
_PACKAGES = ("torch", "lightning", "pytorch-lightning")
# How the variables begin that rules may read and show
_READ = ("NCCL_", "TORCH_", "GLOO_")


@dataclass(frozen=True)
class Machine:
    """environment: its variables of NCCL and torch. torch: the installed version, empty where there
    is none.
    """

    host: str = "this machine"
    torch: str = ""
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        torch = f"torch {self.torch}" if self.torch else "without torch"
        return f"variables of NCCL and torch; {torch}, {counted(self.gpus, 'GPU')}"

    def variable(self, name: str, default: str = "") -> Value:
        """An environment variable, with what holds where it is not set."""
        value = self.environment.get(name)
        return Value(name, value or default, "environment" if value else "default")


def gather() -> Machine:
    return Machine(
        host=socket.gethostname(),
        torch=versions().get("torch", ""),
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        environment={
            name: value for name, value in os.environ.items() if name.startswith(_READ)
        },
    )


def versions() -> dict[str, str]:
    """Of torch and Lightning, as far as they are installed."""
    installed = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed
