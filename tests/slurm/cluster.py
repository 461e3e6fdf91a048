"""A real Slurm on one machine: each host is a set of namespaces of its own (network, processes,
name, IPC, mounts, /tmp, /dev/shm). Root, and Debian's packages (PACKAGES); no systemd, no cgroups.

The login host has slurmctld, the nodes have slurmd. A host ends when its first process's standard
input closes, so nothing of a cluster outlives the process that made it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2"
# Where a machine keeps Slurm's commands off everybody's PATH: with srun there, Lightning warns in
# every run that srun is not used.
ASIDE = "/opt/slurm-bin"
PROGRAMS = ("srun", "sbatch", "slurmctld", "slurmd", "munged", "ip", "nsenter")
PATH = f"{ASIDE}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELL_PATH = f"{Path(sys.executable).parent}:{PATH}"  # with nemo-patches and py-spy
NETWORK = "10.87.0"
LOGIN = "sl-0"
_BOOT_S = 120.0

# The first process of a host. $1: the host's name, $2: the cluster's folder, $3: the folder that all
# hosts share. /tmp becomes the host's own, but for that folder.
_HOST = r"""
hostname "$1"
mount --make-rprivate /
mount -t proc proc /proc
ip link set lo up
mount -t tmpfs tmpfs /run
mkdir -p /run/shared /run/munge /run/slurmd /run/slurmstate /run/jobtmp
mount --bind "$3" /run/shared
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
chmod 1777 /tmp /dev/shm
chmod 755 /run /run/munge
mkdir -p "$3"
mount --bind /run/shared "$3"
mkdir -p /etc/slurm
mount --bind "$2" /etc/slurm
mount --bind "$2/hosts" /etc/hosts
install -m 400 "$2/munge.key" /run/munge/key
munged --force --key-file /run/munge/key --socket /run/munge/munge.socket.2 \
    --pid-file /run/munge/pid --log-file "$2/munged.$1.log" --seed-file /run/munge/seed
echo ready > "$2/$1.ready"
while read -r _; do :; done
"""


def missing() -> str:
    """Why no cluster can be made here; empty if one can."""
    if os.geteuid():
        return "a Slurm of namespaces needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"no {', '.join(absent)} here: apt-get install {PACKAGES}"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True
    )
    return "" if tried.returncode == 0 else "namespaces are not allowed here"


class Cluster:
    """shared: a folder that all hosts see. job_tmp: each job has a /tmp of its own
    (job_container/tmpfs). preempts: a job in the partition "urgent" takes the nodes of others.
    """

    def __init__(
        self,
        shared: Path,
        nodes: int = 2,
        job_tmp: bool = False,
        preempts: bool = False,
    ) -> None:
        self.nodes = [f"sl-{number}" for number in range(1, nodes + 1)]
        self.shared = shared
        self._folder = shared / "cluster"
        self._job_tmp = job_tmp
        self._preempts = preempts
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts.values():
            assert host.stdin is not None
            host.stdin.close()
        for host in self._hosts.values():
            try:
                host.wait(60)
            except subprocess.TimeoutExpired:
                host.kill()
                host.wait()

    def on(
        self,
        host: str,
        command: str,
        limit_s: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run it as in a login shell on that host, which has no variables of Slurm."""
        return subprocess.run(
            [*self._enter(host), "bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
            cwd=self.shared,
            env={"PATH": SHELL_PATH, "HOME": "/root", "LANG": "C.UTF-8"},
        )

    def restart_node(self, host: str) -> None:
        self._run(host, f"slurmd -N {host}")

    def _enter(self, host: str) -> list[str]:
        pid = str(self._pids[host])
        kinds = ["-n", "-m", "-u", "-i", "-p", f"--wd={self.shared}"]
        return ["nsenter", "-t", pid, *kinds, "--"]

    def _run(self, host: str, command: str) -> str:
        done = self.on(host, command)
        assert done.returncode == 0, f"{host}: {command}: {done.stdout}"
        return done.stdout

    def _start(self) -> None:
        self._write_files()
        hosts = [LOGIN, *self.nodes]
        for host in hosts:
            self._boot(host)
        # The network is a bridge on the login host; each other host has one cable to it.
        self._run(LOGIN, "ip link add br0 type bridge && ip link set br0 up")
        self._run(LOGIN, f"ip addr add {NETWORK}.1/24 dev br0")
        for number, host in enumerate(hosts):
            if host == LOGIN:
                continue
            cable = f"p{number}"
            add = f"ip link add name {cable} type veth peer name eth0 netns"
            subprocess.run(
                f"nsenter -t {self._pids[LOGIN]} -n -- {add} {self._pids[host]}",
                shell=True,
                check=True,
            )
            self._run(LOGIN, f"ip link set {cable} master br0 up")
            self._run(
                host,
                f"ip addr add {NETWORK}.{number + 1}/24 dev eth0 && ip link set eth0 up",
            )
        self._run(LOGIN, "slurmctld -c")
        for host in self.nodes:
            self.restart_node(host)
        until(self._is_idle, _BOOT_S, "all nodes are idle")

    def _is_idle(self) -> bool:
        return self.on(LOGIN, "sinfo -h -t idle -o %D").stdout.strip() == str(
            len(self.nodes)
        )

    def _boot(self, host: str) -> None:
        with (self._folder / f"{host}.boot").open("wb") as log:
            self._hosts[host] = subprocess.Popen(
                [
                    *[
                        "unshare",
                        "--mount",
                        "--uts",
                        "--ipc",
                        "--net",
                        "--pid",
                        "--fork",
                        "--kill-child",
                    ],
                    *("bash", "-c", _HOST, "host", host),
                    *(str(self._folder), str(self.shared)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"PATH": PATH},
            )
        ready = self._folder / f"{host}.ready"
        until(ready.exists, _BOOT_S, f"{host} is up")
        pid = self._hosts[host].pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self._pids[host] = int(children[0])

    def _write_files(self) -> None:
        self._folder.mkdir()
        settings = _SETTINGS.format(folder=self._folder, last=len(self.nodes))
        if self._preempts:
            settings += _PREEMPTS
        if self._job_tmp:
            settings += "JobContainerType=job_container/tmpfs\nPrologFlags=contain\n"
            (self._folder / "job_container.conf").write_text(
                "AutoBasePath=true\nBasePath=/run/jobtmp\n"
            )
        (self._folder / "slurm.conf").write_text(settings)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        names = [
            f"{NETWORK}.{number + 1} {host}"
            for number, host in enumerate([LOGIN, *self.nodes])
        ]
        text = "\n".join(["127.0.0.1 localhost", *names, ""])
        (self._folder / "hosts").write_text(text)
        (self._folder / "munge.key").write_bytes(os.urandom(128))
        (self._folder / "munge.key").chmod(0o400)


# cred_expire: else a requeued job waits two minutes. The timeouts: a busy machine is no lost node.
_SETTINGS = """\
ClusterName=sl
SlurmctldHost=sl-0
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=15
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=/run/slurmstate
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%h.log
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=2
BatchStartTimeout=300
SlurmdTimeout=300
MessageTimeout=100
TCPTimeout=30
MinJobAge=300
RebootProgram=/bin/true
NodeName=sl-[1-{last}] CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
_PREEMPTS = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL OverSubscribe=NO PriorityTier=2
"""


def until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.1)
