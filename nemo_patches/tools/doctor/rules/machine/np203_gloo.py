"""Gloo does not work here.

A job that creates a CPU process group stops with an error. The length sync has its own sockets. If GLOO_SOCKET_IFNAME
names no interface with an address, the sync ends on every rank, and each continues with its own lengths, which is
safe.
Link: https://docs.pytorch.org/docs/stable/distributed.html#common-environment-variables
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_patches.tools.doctor.finding import Finding, Severity
from nemo_patches.tools.doctor.machine import Machine

WORST = Severity.WARNING
TOPIC = "Gloo"


def check(machine: Machine) -> Iterator[Finding]:
    """By a group of one rank, made in a process of its own."""
    if not machine.gloo.problem or "torch" not in machine.versions:
        return
    interface = machine.variable("GLOO_SOCKET_IFNAME")
    yield Finding(
        Severity.WARNING,
        f"Gloo does not work here: {machine.gloo.problem}",
        (interface,),
        "GLOO_SOCKET_IFNAME: the name of an interface of this machine (ip -brief addr)" if interface.given else "",
    )
