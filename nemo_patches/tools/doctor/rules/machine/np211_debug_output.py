"""What NCCL and torch.distributed log, and what that costs.

Only NCCL's warnings report a link or a transport that fails. TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective
on all ranks before it runs: it finds mismatches, but waits for every rank each time.
Link: https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import WARNING, Findings, note, warning
from nemo_patches.tools.doctor.machine import Machine

WORST = WARNING
TOPIC = "debug output"

_LEVELS = ("OFF", "INFO", "DETAIL")


def check(machine: Machine) -> Findings:
    """NCCL_DEBUG is asked for only where there are GPUs."""
    torch, nccl = machine.variable("TORCH_DISTRIBUTED_DEBUG", "OFF"), machine.variable("NCCL_DEBUG")
    level = str(torch.value).upper()
    if level not in _LEVELS:
        what = f"{torch.key}={torch.value!r} is not allowed: the job stops at its start; allowed: {', '.join(_LEVELS)}"
        yield warning(what, torch, "TORCH_DISTRIBUTED_DEBUG=INFO, or not set")
    elif level == "DETAIL":
        what = f"{torch.key}=DETAIL: every collective first waits for all ranks to compare it, which is slow"
        yield note(what, torch, "TORCH_DISTRIBUTED_DEBUG not set, once the fault is found")
    if machine.gpus and not nccl.given:
        yield note("NCCL says nothing of its errors: set NCCL_DEBUG=WARN", nccl, "NCCL_DEBUG=WARN")
    elif str(nccl.value).upper() == "TRACE":
        what = "NCCL_DEBUG=TRACE: a line for every call on every rank, which slows the job"
        yield note(what, nccl, "NCCL_DEBUG=WARN")
