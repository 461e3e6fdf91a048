"""Try Gloo: `python -m nemo_patches.tools.doctor.gloo_probe` prints the result, for machine.py.

Which address Gloo has taken is read from the kernel (Linux), as torch does not tell it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

MARK = "nemo_patches gloo: "  # before the answer: torch, or a sitecustomize, may print things of their own
_LISTENING = "0A"
_ORDER = sys.byteorder


@dataclass(frozen=True)
class Gloo:
    """The result. problem: why Gloo does not work, empty where it does.

    address: where it listens, as other ranks get it; empty where the system does not tell.
    """

    problem: str = ""
    address: str = ""


def probe() -> Gloo:
    """Make a Gloo group of one rank, as GLOO_SOCKET_IFNAME has it, and look where it listens."""
    try:
        import torch.distributed as dist
    except ModuleNotFoundError as error:
        return Gloo(f"{error.name} is not installed")
    if not dist.is_available() or not dist.is_gloo_available():
        return Gloo("this build of torch has none")
    before = set(listening())
    try:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    except RuntimeError as error:
        return Gloo(str(error).strip().splitlines()[0])
    address = next((address for address, _ in sorted(set(listening()) - before)), "")
    del group
    return Gloo(address=address)


def listening() -> list[tuple[str, int]]:
    """The addresses and ports at which this process listens; empty where the system does not tell."""
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if socket := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{name}")):
                    inodes.add(socket[1])
    addresses = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and fields[9] in inodes:
                    address, _, port = fields[1].partition(":")
                    addresses.append((_address(address), int(port, 16)))
    return addresses


def _address(text: str) -> str:
    """From the kernel's words of 32 bits, each in this machine's own order of bytes."""
    words = [int(text[start : start + 8], 16).to_bytes(4, _ORDER) for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


if __name__ == "__main__":
    print(MARK + json.dumps(asdict(probe())), flush=True)
