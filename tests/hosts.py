"""Hosts for tests: network namespaces with cables (veth) between them, and names of their own."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HOSTS = ("nemo-patches-a", "nemo-patches-b")
CABLES = ("cable-a", "cable-b")  # each host's interface
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Three hosts at a switch; each has its end of a cable, and the switch the other.
THREE = ("nemo-patches-a", "nemo-patches-b", "nemo-patches-c")
SWITCH = "nemo-patches-switch"
CABLE = "cable"
_NEW_NETWORK, _NEW_NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Two, with one cable. One test of a machine at a time. Skips the test where namespaces are not
    allowed.
    """
    with _made(_make):
        yield


@contextlib.contextmanager
def three_hosts() -> Iterator[None]:
    """Three, at a switch; as above."""
    with _made(_make_three):
        yield


def address_of(host: str) -> str:
    """Of THREE."""
    return f"10.78.0.{THREE.index(host) + 1}"


def unplug(host: str) -> None:
    """Of THREE: nothing comes from it any more, and nobody is told."""
    ip("-n", SWITCH, "link", "set", f"port-{host[-1]}", "down")


@contextlib.contextmanager
def _made(make: Callable[[], None]) -> Iterator[None]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root, and iproute2")
    with Path(tempfile.gettempdir(), "nemo-patches-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove()  # what a run that was killed has left
        try:
            try:
                make()
            except subprocess.CalledProcessError as error:
                pytest.skip(
                    f"network namespaces are not allowed here: {error.stderr.decode()}"
                )
            yield
        finally:
            _remove()


def _make() -> None:
    first, second = HOSTS
    for host in HOSTS:
        ip("netns", "add", host)
    ip(
        "link",
        "add",
        CABLES[0],
        "netns",
        first,
        "type",
        "veth",
        "peer",
        "name",
        CABLES[1],
        "netns",
        second,
    )
    for host, cable, address in zip(HOSTS, CABLES, ADDRESSES, strict=True):
        ip("-n", host, "addr", "add", f"{address}/24", "dev", cable)
        ip("-n", host, "link", "set", cable, "up")
        ip("-n", host, "link", "set", "lo", "up")


def _make_three() -> None:
    ip("netns", "add", SWITCH)
    ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
    ip("-n", SWITCH, "link", "set", "bridge", "up")
    for host in THREE:
        port = f"port-{host[-1]}"
        ip("netns", "add", host)
        ip(
            "link",
            "add",
            CABLE,
            "netns",
            host,
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            SWITCH,
        )
        ip("-n", SWITCH, "link", "set", port, "master", "bridge", "up")
        ip("-n", host, "addr", "add", f"{address_of(host)}/24", "dev", CABLE)
        ip("-n", host, "link", "set", CABLE, "up")
        ip("-n", host, "link", "set", "lo", "up")


def _remove() -> None:
    for host in (*THREE, SWITCH):
        subprocess.run(["ip", "netns", "del", host], capture_output=True, timeout=60)


def move_to(host: str) -> None:
    """This process (which has one thread so far) to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", host).open() as network:
        assert libc.setns(network.fileno(), _NEW_NETWORK) == 0, os.strerror(
            ctypes.get_errno()
        )
    assert libc.unshare(_NEW_NAMES) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(host)
