"""What NCCL's watchdog does when a collective fails or times out.

By default PyTorch ends the process when a collective takes longer than the process group's timeout.
If error handling is switched off, it only logs this, and the job hangs for ever.
TORCH_NCCL_BLOCKING_WAIT makes each wait block the host, which changes where a hang is seen.
Link: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import ERROR, Findings, error, note
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
    values = map(machine.variable, _BLOCKING)
    blocking = next(
        (value for value in values if value.given and value.value != "0"), None
    )
    if (
        counts.value == "0" and blocking is None
    ):  # a blocking wait raises when its time is over
        what = (
            f"{counts.key}=0: a collective that times out is only logged, and the job"
            " hangs for ever"
        )
        yield error(
            what,
            counts,
            f"{_NAME} not set at all, or 3, the default of torch 2.2 and later",
        )
    elif old.given:
        yield note(
            f"{_OLD_NAME} is the old name of {_NAME}, which torch warns about",
            (old, new),
        )
    if blocking is not None:
        what = f"{blocking.key}: every wait for NCCL blocks the host, which is slower"
        yield note(what, blocking, f"{blocking.key} not set")
