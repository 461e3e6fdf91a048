"""Packages that torch's debug server needs to show the stacks of all ranks of a running job, and that are missing.

Only a training script can start it, with torch.distributed.debug.start_debug_server; there is no variable. Without
jinja2 or tabulate, which torch 2.13 imports there, that call fails on rank 0 alone, and the other ranks go on and
wait for it. Its port (25999) is for trusted networks only. Whether a job starts it cannot be seen on the machine.
Link: https://github.com/pytorch/pytorch/pull/167395
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.machine import Machine, fact

WORST = NOTE
TOPIC = "packages of torch's debug server"


def check(machine: Machine) -> Findings:
    """Nothing where this torch has no such server: then no script can start it."""
    if machine.debug_server_lacks:
        missing = " and ".join(machine.debug_server_lacks)
        what = f"torch's debug server needs {missing}: a script that starts it fails on rank 0 alone"
        yield note(what, fact("not installed", missing), f"pip install {missing}, on every host")
