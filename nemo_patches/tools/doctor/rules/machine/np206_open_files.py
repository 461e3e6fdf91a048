"""The limit on open files, compared with the possible number of ranks.

Each rank has up to three connections to the job's store, two of them of nemo_patches, and a Gloo group has one to
each other rank: on the store's host, four files for each rank. A process that runs out of files can neither connect
nor read audio.
Link: docs/design.md
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, WARNING, Finding, Findings
from nemo_patches.tools.doctor.machine import Machine, fact

WORST = WARNING
TOPIC = "open files"

_FILES_PER_RANK = (
    4  # on the host of the store's server: a Gloo group's connection, two of ours to the store, torch's own
)
_OTHER_FILES = 300  # torch, NeMo, the first encoders, audio, data loader workers
_FEW_RANKS = 512
_TOO_FEW = "a rank may need more by itself"


def check(machine: Machine) -> Findings:
    """The soft limit, which a process may raise to the hard one."""
    soft, hard = machine.open_files
    if soft is None:
        return
    enough_for = max((soft - _OTHER_FILES) // _FILES_PER_RANK, 0)
    ranks = machine.count("WORLD_SIZE")
    if enough_for >= (ranks or _FEW_RANKS):
        return
    wanted = _OTHER_FILES + _FILES_PER_RANK * (ranks or _FEW_RANKS)
    yield Finding(
        WARNING if ranks or not enough_for else NOTE,
        (
            f"{soft} open files are enough for about {enough_for} ranks"
            if enough_for
            else f"{soft} open files: {_TOO_FEW}"
        )
        + (f", and there are {ranks} ranks" if ranks else ""),
        (fact("open files, soft limit", soft), fact("hard limit", "unlimited" if hard is None else hard)),
        f"ulimit -n {wanted}, before the job starts",
    )
