"""Gloo uses a loopback address, which no other host can reach.

Gloo uses the address of the interface in GLOO_SOCKET_IFNAME, or else the address that the host's own name resolves
to, which on many systems is 127.0.1.1. The ranks of a CPU process group on other hosts then cannot connect. The
length sync does not depend on the host's name: it uses that interface, or else the address on the route to the job's
store.
Link: https://docs.pytorch.org/docs/stable/distributed.html#common-environment-variables
"""

from __future__ import annotations

import ipaddress

from nemo_patches.tools.doctor.finding import NOTE, WARNING, Finding, Findings
from nemo_patches.tools.doctor.machine import Machine, fact

WORST = WARNING
TOPIC = "Gloo's address"


def check(machine: Machine) -> Findings:
    """Of no concern to a job on one host, so without a sign of several hosts it is a note."""
    address = machine.gloo.address
    if not address or not ipaddress.ip_address(address).is_loopback:
        return
    yield Finding(
        WARNING if machine.several_hosts else NOTE,
        f"Gloo takes {address}, which ranks on other hosts cannot reach"
        + ("" if machine.several_hosts else "; of no concern to a job on this host alone"),
        (machine.variable("GLOO_SOCKET_IFNAME"), fact("Gloo's address", address)),
        "GLOO_SOCKET_IFNAME: the interface that leads to the other hosts (ip -brief addr)",
    )
