"""Two hosts for tests: network namespaces with a cable (veth) between them, and names of their own."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HOSTS = ("nemo-patches-a", "nemo-patches-b")
CABLES = ("cable-a", "cable-b")  # each host's interface
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NEW_NETWORK, _NEW_NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """One test of a machine at a time. Skips the test where namespaces are not allowed."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root, and iproute2")
    with Path(tempfile.gettempdir(), "nemo-patches-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove()  # what a run that was killed has left
        try:
            _make()
            yield
        finally:
            _remove()


def _make() -> None:
    first, second = HOSTS
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", CABLES[0], "netns", first, "type", "veth", "peer", "name", CABLES[1], "netns", second)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode()}")
    for host, cable, address in zip(HOSTS, CABLES, ADDRESSES, strict=True):
        ip("-n", host, "addr", "add", f"{address}/24", "dev", cable)
        ip("-n", host, "link", "set", cable, "up")
        ip("-n", host, "link", "set", "lo", "up")


def _remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, timeout=60)


def move_to(host: str) -> None:
    """This process (which has one thread so far) to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", host).open() as network:
        assert libc.setns(network.fileno(), _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(_NEW_NAMES) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(host)
