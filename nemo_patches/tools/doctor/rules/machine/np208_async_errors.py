"""What NCCL's watchdog does when a collective fails or times out.

By default PyTorch ends the process when a collective takes longer than the process group's timeout.
If error handling is switched off, it only logs this, and the job hangs for ever.
Link: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import ERROR, Findings, error
from nemo_patches.tools.doctor.machine import Machine

WORST = ERROR

_NAME = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_OLD_NAME = "NCCL_ASYNC_ERROR_HANDLING"
_DEFAULT = "3"
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def check(machine: Machine) -> Findings:
    """The new name of a variable counts where both are set."""
    new = machine.variable(_NAME, _DEFAULT)
    old = machine.variable(_OLD_NAME)
    counts = old if old.given and not new.given else new
    # A blocking wait raises when its time is over.
    blocks = any(machine.variable(name, "0").value != "0" for name in _BLOCKING)
    if counts.value == "0" and not blocks:
        yield error(
            f"{counts.key}=0: a collective that times out is only logged, and the job"
            " hangs for ever",
            counts,
            f"{_NAME} not set at all, or 3, the default of torch 2.2 and later",
        )
