"""The memory limit of this process's cgroup (a container, a Slurm job).

At the limit the kernel kills a process, often a data loader's worker, and the job is not told: the rank waits for the
worker, and all others wait for the rank.
Link: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import WARNING, Findings, note, warning
from nemo_patches.tools.doctor.machine import Machine, fact, size

WORST = WARNING
TOPIC = "memory limit"

_NEARLY_FULL = 0.9


def check(machine: Machine) -> Findings:
    """The page cache does not count as used: the kernel gives that back."""
    memory = machine.memory
    if memory is None:
        return
    read = (
        fact("memory limit", size(memory.limit)),
        fact("used", size(memory.used)),
        fact("processes killed for memory so far", memory.killed),
    )
    if memory.used > _NEARLY_FULL * memory.limit:
        what = f"{size(memory.used)} of {size(memory.limit)} memory are in use before anything has started"
        yield warning(what, read, "a higher limit, or end what uses it")
        return
    killed = f"; {memory.killed} processes were killed at it so far (dmesg names them)" if memory.killed else ""
    yield note(f"a limit of {size(memory.limit)} on memory, all ranks of this host together{killed}", read)
