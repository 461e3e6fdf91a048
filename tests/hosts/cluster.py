"""Hosts for tests: namespaces with a network card at a switch, processes, names and folders of
their own.

A host lives as long as its first process, which the kernel ends with this one, whatever ends this
one; all other processes of the host end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SHARED = Path("/mnt")  # on every host: the folder that all hosts share
CARD = "eth0"
SECOND_CARD = "eth1"
LIMIT_S = 60

# As in <linux/sched.h>
_NEW_MOUNTS = 0x00020000
_NEW_NAMES = 0x04000000
_NEW_IPC = 0x08000000
_NEW_PIDS = 0x20000000
_NEW_NETWORK = 0x40000000
_EVERYTHING = _NEW_MOUNTS | _NEW_NAMES | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK

_CHECKOUT = Path(__file__).parents[2]
_UNSHARE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child", "--net")
_OF_A_HOST = ("--uts", "--ipc", "--mount", "--pid", "--mount-proc")
# The shared folder first, and the checkout back: both may be below /tmp.
_BOOT = """
set -e
hostname "$1"
if [ -n "$2" ]; then
    mount --bind "$2" /mnt
    mount --bind "/mnt/hosts.$1" /etc/hosts
    exec 9< "$3"
    mount -t tmpfs tmpfs /tmp
    if [ ! -e "$3" ]; then
        mkdir -p "$3"
        mount --no-canonicalize --bind /proc/self/fd/9 "$3"
    fi
    mount -t tmpfs tmpfs /dev/shm
fi
ip link set lo up
"""
# It reaps what the host's other processes leave behind.
_FIRST_PROCESS = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
"""


@dataclass(frozen=True)
class Host:
    """pid: of its first process, as this process sees it."""

    name: str
    pid: int
    address: str
    second_address: str = ""  # of its second card
    six: str = ""  # its address in IPv6

    def command(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        folder: Path = SHARED,
    ) -> list[str]:
        """A command line that runs on this host, as root, in this folder; prefix: such as setpriv."""
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        enter = ["nsenter", "--target", str(self.pid), "--all", "--"]
        return [*enter, *prefix, "env", "-C", str(folder), *variables, *command]

    def run(self, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """As `command`; its exit code, output and errors."""
        return subprocess.run(
            self.command(*command, **more),
            capture_output=True,
            text=True,
            timeout=3 * LIMIT_S,
        )

    def ip(self, *arguments: str) -> None:
        _in_network(self.pid, "ip", *arguments)

    def firewall(self, *arguments: str) -> None:
        _in_network(self.pid, "iptables", "-w", *arguments)

    def lose_power(self) -> None:
        """Its processes end at once, and nothing of it sends a packet any more."""
        self.ip("link", "set", CARD, "down")
        os.kill(self.pid, signal.SIGKILL)

    def move_here(self) -> None:
        """This process, which has one thread so far: its network and its host's name."""
        self._enter(_NEW_NETWORK | _NEW_NAMES)

    def enter(self) -> None:
        """This process altogether, and what it forks from now on."""
        self._enter(_EVERYTHING)
        os.chdir(SHARED)

    def _enter(self, kinds: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        here = os.pidfd_open(self.pid)
        if libc.setns(here, kinds) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {self.name}")
        os.close(here)


@contextlib.contextmanager
def made_hosts(
    letters: str = "ab",
    shared: Path | None = None,
    names: Mapping[str, str] | None = None,
    only_six: bool = False,
) -> Iterator[list[Host]]:
    """Hosts nemo-a, nemo-b, ...; a test is skipped where they are not allowed.

    shared: the folder that all of them share; without one, they have this machine's folders. names:
    by letter, what /etc/hosts says there in place of all hosts' names. only_six: no IPv4.
    """
    skip_unless_allowed("ip", "nsenter", "setpriv", "unshare")
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_first_process(_UNSHARE, ""))
        for bridge in ("br0", "br1"):
            _in_network(switch, "ip", "link", "add", bridge, "type", "bridge")
            _in_network(switch, "ip", "link", "set", bridge, "up")
        if shared is not None:
            _write_names(letters, shared, names or {}, only_six)
        hosts = []
        for number, letter in enumerate(letters, 1):
            name = f"nemo-{letter}"
            boot = f"set -- {name} '{shared or ''}' '{_CHECKOUT}'{_BOOT}"
            pid = stack.enter_context(_first_process((*_UNSHARE, *_OF_A_HOST), boot))
            six = f"fd88::{number}"
            host = Host(name, pid, f"10.88.0.{number}", f"10.99.0.{number}", six)
            _plug(switch, host, only_six)
            hosts.append(host)
        yield hosts


def skip_unless_allowed(*programs: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("made hosts need root")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"made hosts need {', '.join(missing)}")
    tried = subprocess.run([*_UNSHARE, *_OF_A_HOST, "true"], capture_output=True)
    if tried.returncode != 0:
        pytest.skip(f"made hosts: {tried.stderr.decode().strip()}")


def _write_names(
    letters: str, shared: Path, names: Mapping[str, str], only_six: bool
) -> None:
    network = "fd88::" if only_six else "10.88.0."
    every = "".join(f"{network}{n} nemo-{one}\n" for n, one in enumerate(letters, 1))
    for letter in letters:
        own = names.get(letter, every)
        text = f"127.0.0.1 localhost\n::1 localhost\n{own}"
        (shared / f"hosts.nemo-{letter}").write_text(text)


@contextlib.contextmanager
def _first_process(unshare: Sequence[str], boot: str) -> Iterator[int]:
    """Its process id, as this process sees it."""
    script = f'{boot}\nexec "{sys.executable}" -I -S -c "$PROGRAM"'
    process = subprocess.Popen(
        [*unshare, "sh", "-c", script],
        env={**os.environ, "PROGRAM": _FIRST_PROCESS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"a host has not booted: {process.stderr.read()}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        first = int(children.read_text())
        yield first
        if process.poll() is None:  # else it has lost power
            os.kill(first, signal.SIGKILL)
            process.wait(LIMIT_S)
    finally:
        process.kill()  # and the kernel its child, which is the host's first process
        process.communicate()


def _plug(switch: int, host: Host, only_six: bool) -> None:
    letter = host.name[-1]
    addresses = {CARD: f"{host.address}/24", SECOND_CARD: f"{host.second_address}/24"}
    for bridge, (card, address) in zip(("br0", "br1"), addresses.items(), strict=True):
        port = f"{letter}-{card}"
        cable = ("type", "veth", "peer", "name", card, "netns", str(host.pid))
        _in_network(switch, "ip", "link", "add", port, *cable)
        _in_network(switch, "ip", "link", "set", port, "master", bridge, "up")
        if not only_six:
            host.ip("addr", "add", address, "dev", card)
        host.ip("link", "set", card, "up")
    if only_six:
        host.ip("addr", "add", f"{host.six}/64", "dev", CARD, "nodad")


def _in_network(pid: int, *command: str) -> None:
    enter = ("nsenter", "--target", str(pid), "--net", "--")
    done = subprocess.run(
        [*enter, *command], capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether it has come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
