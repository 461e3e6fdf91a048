"""Gloo does not work here.

A job that creates a CPU process group stops with an error. The length sync has its own sockets. If GLOO_SOCKET_IFNAME
names no interface with an address, the sync ends on every rank, and each continues with its own lengths, which is
safe.
Link: https://docs.pytorch.org/docs/stable/distributed.html#common-environment-variables
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import WARNING, Findings, warning
from nemo_patches.tools.doctor.machine import Machine

WORST = WARNING
TOPIC = "Gloo"


def check(machine: Machine) -> Findings:
    """By a group of one rank, made in a process of its own."""
    if not machine.gloo.problem or "torch" not in machine.versions:
        return
    interface = machine.variable("GLOO_SOCKET_IFNAME")
    yield warning(
        f"Gloo does not work here: {machine.gloo.problem}",
        interface,
        "GLOO_SOCKET_IFNAME: the name of an interface of this machine (ip -brief addr)" if interface.given else "",
    )
