"""Where a running job's store is: `--job` as it was given, looked up and tried. Needs no torch, unlike what asks it."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import NamedTuple

from nemo_patches.channel.safe_text import safe
from nemo_patches.tools.diagnose.folder import UnreadableError, is_port

CONNECT_S = 5.0


class Address(NamedTuple):
    """text: HOST:PORT. server: the host's address, which has just answered."""

    text: str
    server: str
    port: int


def address_of(job: str) -> Address:
    """job: where its store is, HOST:PORT, or the folder that its processes on this machine work in. UnreadableError."""
    address = _address_of(Path(job)) if os.path.isdir(job) else job
    host, _, port = address.rpartition(":")
    if not host or not is_port(port):
        wanted = "HOST:PORT is wanted, the job's MASTER_ADDR and MASTER_PORT, or the folder that it works in"
        raise UnreadableError(f"--job={safe(address, 100)}: {wanted}")
    try:
        # Not by torch's client, which tries again and again, and logs each time.
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as probe:
            return Address(address, str(probe.getpeername()[0]), int(port))
    except UnicodeError as error:
        raise UnreadableError(f"--job={address}: no host can have that name") from error
    except OSError as error:
        raise UnreadableError(f"--job={address}: {error.strerror or error}") from error


def _address_of(folder: Path) -> str:
    """MASTER_ADDR and MASTER_PORT of the job whose processes work in this folder. Raises UnreadableError.

    Linux tells with what variables a process was started: torchrun, and Lightning for all ranks but the first, hand
    these two over; who sets them in a running process is not seen.
    """
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if (process / "cwd").samefile(folder):
                variables = dict(
                    pair.partition("=")[::2] for pair in os.fsdecode((process / "environ").read_bytes()).split("\0")
                )
                found.add((variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")))
    addresses = sorted(f"{host}:{port}" for host, port in found if host and port)
    if not addresses:
        raise UnreadableError(
            f"--job={folder}: no process of yours on this machine works there and was started with MASTER_ADDR and "
            "MASTER_PORT, as torchrun does; run it on a host of the job, or give HOST:PORT"
        )
    if len(addresses) > 1:
        raise UnreadableError(f"--job={folder}: several jobs work there; give one of {', '.join(addresses)}")
    return addresses[0]
