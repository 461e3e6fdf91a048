"""/dev/shm has little room.

Data loader workers pass their batches through it. If it is full, a worker is killed by a bus error, and its rank is
late or dies. A container has 64 MiB by default.
Link: https://docs.pytorch.org/docs/stable/multiprocessing.html#sharing-strategies
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import WARNING, Findings, warning
from nemo_patches.tools.doctor.machine import Machine, fact, size

WORST = WARNING
TOPIC = "/dev/shm"

_ENOUGH_BYTES = 1 << 30


def check(machine: Machine) -> Findings:
    """The free space in it, whatever uses the rest."""
    free = machine.shared_memory
    if free is not None and free < _ENOUGH_BYTES:
        what = f"{size(free)} are free in /dev/shm; a data loader with several workers may need more than "
        what += f"{size(_ENOUGH_BYTES)}"
        instead = "docker run --shm-size=16g, or --ipc=host; or num_workers: 0"
        yield warning(what, fact("/dev/shm, free", size(free)), instead)
