"""The thread that watches NCCL's watchdog.

If the watchdog itself hangs in a call of CUDA or NCCL, this thread ends the process when there has
been no heartbeat for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC. Without it such a hang never ends.
Link: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Findings, note, stops, warning
from nemo_patches.tools.doctor.machine import OFF, Machine

_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_LONG_S = 3600


def check(machine: Machine) -> Findings:
    """On by default, with 480 s in torch 2.5 and later, 600 before."""
    monitoring = machine.variable(_MONITORING, "1")
    heartbeat = machine.variable(_HEARTBEAT, "480")
    if str(monitoring.value).lower() in OFF:
        what = (
            f"{_MONITORING}={monitoring.value}: a watchdog that hangs is never ended,"
            " nor is its job"
        )
        yield warning(
            what, monitoring, f"{_MONITORING} not set, and a longer {_HEARTBEAT}"
        )
    elif heartbeat.given and not str(heartbeat.value).isdigit():
        what = f"{_HEARTBEAT}={heartbeat.value!r} is no number of seconds"
        yield stops(what, heartbeat, f"{_HEARTBEAT}=480")
    elif heartbeat.given and int(str(heartbeat.value)) > _LONG_S:
        hours = int(str(heartbeat.value)) / 3600
        what = (
            f"{_HEARTBEAT}={heartbeat.value}: a watchdog that hangs is ended after"
            f" {hours:.3g} h"
        )
        yield note(what, heartbeat, f"{_HEARTBEAT}=480")
