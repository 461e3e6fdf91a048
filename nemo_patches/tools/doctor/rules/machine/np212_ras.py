"""NCCL's RAS, which shows from outside which ranks of a running job do not answer: switched off, or not available.

From NCCL 2.24 on it is on by default; `ncclras` asks it on any host of the job, at localhost:28028 unless
NCCL_RAS_ADDR sets another address. If several jobs run on a host, each needs its own address. For stacks of all ranks
see NP213.
Link: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

from packaging.version import Version

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.machine import Machine, fact, parsed

WORST = NOTE
TOPIC = "NCCL's RAS"

_SWITCH = "NCCL_RAS_ENABLE"
_SINCE = Version("2.24")


def check(machine: Machine) -> Findings:
    """A switch that is off, wherever that is; an NCCL without it, by its package's version."""
    switch = machine.variable(_SWITCH)
    if switch.given and str(switch.value).strip() == "0":
        what = f"{_SWITCH}=0: when a job hangs, ncclras cannot be asked which rank does not answer"
        yield note(what, switch, f"no {_SWITCH}; it costs one idle thread for each process")
    elif (nccl := parsed(machine.nccl)) and nccl < _SINCE:
        what = f"NCCL {machine.nccl} has no RAS, which tells which ranks of a job that hangs do not answer"
        yield note(what, fact("NCCL", machine.nccl), f"NCCL {_SINCE} or later")
