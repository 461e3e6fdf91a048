"""Made hosts leave nothing behind, whatever ends the process that has made them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hosts.cluster import LIMIT_S, made_hosts, skip_unless_allowed, wait_until

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]

PROGRAM = """
import subprocess, time
from hosts.cluster import made_hosts
with made_hosts("ab") as hosts:
    job = subprocess.Popen(hosts[1].command("sleep", "1000", environment={"OF": "hosts"}))
    print(*[host.pid for host in hosts], flush=True)
    time.sleep(1000)
"""


def is_there(pid: int) -> bool:
    """Not as a zombie, which its new parent reaps when it likes."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT", "SIGTERM"])
def test_no_host_outlives_the_process_that_made_it(name: str) -> None:
    skip_unless_allowed("ip", "nsenter", "setpriv", "unshare")
    maker = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert maker.stdout is not None
        pids = [int(word) for word in maker.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_there(pid) for pid in pids)
        maker.send_signal(getattr(signal, name))
        maker.wait(LIMIT_S)
        assert wait_until(lambda: not any(is_there(pid) for pid in pids), LIMIT_S)
    finally:
        maker.kill()
        maker.communicate()


def test_a_hosts_processes_and_names_are_its_own(tmp_path: Path) -> None:
    with made_hosts("ab", tmp_path) as hosts:
        for host in hosts:
            # Beside it in its /tmp is the checkout, where that is below /tmp here.
            commands = "hostname; echo $$; touch /tmp/of-$(hostname); ls /tmp/of-*"
            shown = host.run("sh", "-c", f"{commands}; getent hosts nemo-a")
            name, _, files, address = shown.stdout.splitlines()
            assert (name, files) == (host.name, f"/tmp/of-{host.name}")
            assert address.split() == ["10.88.0.1", "nemo-a"]
        (tmp_path / "common").write_text("read by both")
        assert {host.run("cat", "common").stdout for host in hosts} == {"read by both"}
