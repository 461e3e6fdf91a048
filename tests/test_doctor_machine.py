"""The facts about a machine, gathered on this one: in processes with other variables and limits, and from files."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from interpreters import CHECKOUT, environment, python, run

from nemo_patches.tools.doctor import gloo_probe, machine

pytestmark = pytest.mark.one_nemo


def test_the_command_alone_examines_this_machine() -> None:
    done = python("-m", "nemo_patches", "doctor", "--json", path=(CHECKOUT,), NCCL_ASYNC_ERROR_HANDLING="1")
    assert done.stderr == ""
    (report,) = json.loads(done.stdout)
    assert report["config"] == socket.gethostname()
    found = {finding["rule"]: finding for finding in report["findings"]}
    assert all(name.startswith("NP2") for name in found)
    assert found["NP208"]["severity"] == "note"
    worse = any(finding["severity"] != "note" for finding in report["findings"])
    assert done.returncode == int(worse)
    assert machine.versions()["torch"] == torch.__version__
    assert f"torch {torch.__version__}" in machine.Machine(versions=machine.versions()).headline


def test_limits_and_variables_of_the_process_count() -> None:
    variables = environment(
        CHECKOUT, GLOO_SOCKET_IFNAME="nowhere", NCCL_SECRETS="kept", HOME="/root", SECRET="not kept"
    )
    program = (
        "from nemo_patches.tools.doctor import machine\n"
        "found = machine.gather()\n"
        "import json, sys\n"
        "print(json.dumps([found.open_files, found.gloo.problem, dict(found.environment), "
        "'torch' in sys.modules or 'nemo.collections' in sys.modules]))\n"
    )
    done = run(["sh", "-c", 'ulimit -n 333; exec "$0" -c "$1"', sys.executable, program], variables)
    open_files, problem, kept, imported = json.loads(done.stdout)
    assert open_files == [333, 333]
    assert "nowhere" in problem
    assert kept == {"GLOO_SOCKET_IFNAME": "nowhere", "NCCL_SECRETS": "kept"}
    assert not imported


def test_it_is_the_address_that_gloo_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert machine.gloo() == gloo_probe.Gloo("", "127.0.0.1")


def test_listening_sockets_are_those_of_this_process() -> None:
    before = set(gloo_probe.listening())
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as second,
    ):
        both = {("127.0.0.1", first.getsockname()[1]), ("::1", second.getsockname()[1])}
        assert set(gloo_probe.listening()) - before == both
    assert set(gloo_probe.listening()) == before


def torch_that(folder: Path, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(does)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_torch_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_that(tmp_path, "import time; time.sleep(60)", monkeypatch)
    began = time.monotonic()
    assert machine.gloo(timedelta(seconds=1)).problem == "no answer within 1 s"
    assert time.monotonic() - began < 20


def test_a_torch_that_cannot_be_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_that(tmp_path, "raise OSError('libcudart.so.13: cannot open')", monkeypatch)
    assert machine.gloo().problem == "OSError: libcudart.so.13: cannot open"
    (tmp_path / "torch" / "__init__.py").write_text("import os; os._exit(9)")
    assert machine.gloo().problem == "the process that tried it ended with code 9"


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_tightest_limit_of_a_cgroup_of_version_2(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    root = tmp_path / "cgroup"
    assert machine.memory(root, own) is None
    stat = "anon 1\ninactive_file 1000\n"
    group(root / "job", memory__max=1 << 20, memory__current=5000, memory__stat=stat, memory__events="oom_kill 2")
    group(root / "job" / "step", memory__max="max")
    assert machine.memory(root, own) == machine.Memory(1 << 20, 4000, 2)
    group(root / "job" / "step", memory__max=1 << 19)
    assert machine.memory(root, own) == machine.Memory(1 << 19)
    group(root / "job" / "step", memory__max=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    assert machine.memory(root, own) == machine.Memory(1 << 20, 4000, 2)


def test_the_limit_of_a_cgroup_of_version_1_also_where_a_container_shows_only_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:cpu,memory:/docker/1234\n1:name=systemd:/\n")
    root = tmp_path / "cgroup"
    group(
        root / "memory",
        memory__limit_in_bytes=1 << 20,
        memory__usage_in_bytes=9000,
        memory__stat="total_inactive_file 8000\n",
        memory__oom_control="oom_kill_disable 0\noom_kill 1",
    )
    assert machine.memory(root, own) == machine.Memory(1 << 20, 1000, 1)
    assert machine.memory(root, tmp_path / "none") is None
