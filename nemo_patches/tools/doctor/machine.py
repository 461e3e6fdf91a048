"""The facts about this machine and its Python environment that rules go by; torch and NeMo are not imported here.

What only torch can tell (whether Gloo works, and at which address), gloo_probe.py finds out in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from packaging.version import InvalidVersion, Version

import nemo_patches
from nemo_patches.tools import status
from nemo_patches.tools.doctor import gloo_probe
from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.gloo_probe import Gloo

GLOO_LIMIT = timedelta(seconds=60)  # torch's import can take long on a network file system
PACKAGES = ("nemo_toolkit", "torch", "lightning", "pytorch-lightning")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")  # as torch's own packages bring it
_DEBUG_SERVER_NEEDS = ("jinja2", "tabulate")  # it imports them when it starts, as read in torch 2.13
# What a finding may show of the environment: nothing else is kept.
_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "NEMO_PATCHES_")
_NAMES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SLURM_NNODES")
_GIBIBYTE = 1 << 30
OFF = ("0", "n", "no", "false", "f")  # as torch reads a switch, in lower case


@dataclass(frozen=True)
class Memory:
    """The memory of this process's cgroup, in bytes; used: without the page cache. killed: processes, at the limit."""

    limit: int
    used: int = 0
    killed: int = 0


@dataclass(frozen=True)
class Machine:
    """What rules may know of this machine. None or empty: there is none, or it cannot be told.

    versions, needs: installed version, and NeMo's own requirement, by package. environment: the variables that rules
    may read. shared_memory: free bytes of /dev/shm. open_files: soft and hard limit, None for unlimited. nccl: the
    version of the package that torch's own brings along. debug_server_lacks: what torch's debug server cannot import.
    """

    host: str = "this machine"
    versions: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    status: status.EnvironmentStatus | None = None
    gloo: Gloo = field(default_factory=Gloo)
    gpus: int = 0
    shared_memory: int | None = None
    open_files: tuple[int | None, int | None] = (None, None)
    memory: Memory | None = None
    nccl: str = ""
    debug_server_lacks: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        versions = [f"{name} {version}" for name, version in self.versions.items()] or ["neither NeMo nor torch"]
        gpus = f"{self.gpus} GPU{'s' * (self.gpus != 1)}"
        return "; ".join((f"this machine with {sys.executable}", ", ".join(versions), gpus))

    def variable(self, name: str, default: str = "") -> Value:
        """An environment variable, with what holds where it is not set."""
        value = self.environment.get(name)
        return Value(name, value, "environment") if value else Value(name, default, "default")

    @property
    def several_hosts(self) -> bool:
        """Whether this process's environment is that of a job on several hosts."""
        here, all_ranks = self.count("LOCAL_WORLD_SIZE"), self.count("WORLD_SIZE")
        return (self.count("SLURM_NNODES") or 1) > 1 or bool(here and all_ranks and all_ranks > here)

    def count(self, name: str) -> int | None:
        text = self.environment.get(name, "")
        return int(text) if text.isdigit() else None


def fact(name: str, value: object) -> Value:
    """Something a rule read on this machine."""
    return Value(name, value, "this machine")


def parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


def size(number: int) -> str:
    return f"{number / _GIBIBYTE:.3g} GiB" if number >= _GIBIBYTE else f"{number / (1 << 20):.3g} MiB"


def gather() -> Machine:
    """Collect the facts; what cannot be found out stays empty."""
    return Machine(
        host=socket.gethostname(),
        versions=versions(),
        needs=_needs(),
        environment=environment(os.environ),
        status=_status(),
        gloo=gloo(),
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        shared_memory=_shared_memory(),
        open_files=_open_files(),
        memory=memory(),
        nccl=_nccl(),
        debug_server_lacks=debug_server_lacks(_folder_of_torch()),
    )


def versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _nccl() -> str:
    for name in _NCCL:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _folder_of_torch() -> Path | None:
    found = importlib.util.find_spec("torch")  # a top-level package is found without running it
    return Path(found.origin).parent if found and found.origin else None


def debug_server_lacks(torch: Path | None, needs: Iterable[str] = _DEBUG_SERVER_NEEDS) -> tuple[str, ...]:
    """What the debug server of the torch in a folder needs and is not installed; none where it has no such server."""
    if torch is None or not (torch / "distributed" / "debug" / "__init__.py").exists():
        return ()
    return tuple(name for name in needs if importlib.util.find_spec(name) is None)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that rules may read; nothing else is kept."""
    return {name: value for name, value in variables.items() if name.startswith(_PREFIXES) or name in _NAMES}


def gloo(limit: timedelta = GLOO_LIMIT) -> Gloo:
    """Try Gloo in a process of its own, which is ended at the limit."""
    path = (os.environ.get("PYTHONPATH"), str(Path(nemo_patches.__file__).parent.parent))
    try:
        done = subprocess.run(
            [sys.executable, "-m", gloo_probe.__name__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit.total_seconds(),
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Gloo(f"no answer within {limit.total_seconds():g} s")
    except OSError as error:
        return Gloo(str(error))
    for line in done.stdout.splitlines():
        if line.startswith(gloo_probe.MARK):
            return Gloo(**json.loads(line.removeprefix(gloo_probe.MARK)))
    errors = done.stderr.strip().splitlines()
    return Gloo(errors[-1] if errors else f"the process that tried it ended with code {done.returncode}")


def _status() -> status.EnvironmentStatus | None:
    try:
        return status.examine()
    except status.StatusError:  # NeMo or torch is not there
        return None


def _needs() -> dict[str, str]:
    """What NeMo's own metadata asks for, by package, for its speech collection."""
    from packaging.requirements import InvalidRequirement, Requirement

    needs: dict[str, str] = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for text in importlib.metadata.requires("nemo_toolkit") or ():
            with contextlib.suppress(InvalidRequirement):
                need = Requirement(text)
                if need.name in PACKAGES and (need.marker is None or need.marker.evaluate({"extra": "asr"})):
                    needs[need.name] = str(need.specifier)
    return needs


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def _open_files() -> tuple[int | None, int | None]:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None, None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Memory | None:
    """The tightest limit of the cgroups that this process is in, version 1 or 2; None where there is none."""
    tightest = None  # where there are cgroups, there is os.sysconf
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in lines:
        second = controllers == ""
        if not second and "memory" not in controllers.split(","):
            continue
        top = root if second else root / "memory"
        folder = top / path.lstrip("/")
        # In a container, the path is that of the host, and what is mounted is the container's own.
        for place in (folder, *(each for each in folder.parents if each == top or top in each.parents)):
            limit = _number(place / ("memory.max" if second else "memory.limit_in_bytes"))
            if limit is None or limit >= _physical_memory() or (tightest is not None and limit >= tightest.limit):
                continue
            used = _number(place / ("memory.current" if second else "memory.usage_in_bytes")) or 0
            cache = _entry(place / "memory.stat", "inactive_file" if second else "total_inactive_file")
            killed = _entry(place / ("memory.events" if second else "memory.oom_control"), "oom_kill")
            tightest = Memory(limit, max(used - cache, 0), killed)
    return tightest


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _entry(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
