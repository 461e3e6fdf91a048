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
    text = str(heartbeat.value)
    if str(monitoring.value).lower() in OFF:
        yield warning(
            f"{_MONITORING}={monitoring.value}: a watchdog that hangs is never ended,"
            " nor is its job",
            monitoring,
            f"{_MONITORING} not set, and a longer {_HEARTBEAT}",
        )
    elif not text.isdigit():
        what = f"{_HEARTBEAT}={text!r} is no number of seconds"
        yield stops(what, heartbeat, f"{_HEARTBEAT}=480")
    elif int(text) > _LONG_S:
        yield note(
            f"{_HEARTBEAT}={text}: a watchdog that hangs is ended after"
            f" {int(text) / 3600:.3g} h",
            heartbeat,
            f"{_HEARTBEAT}=480",
        )
