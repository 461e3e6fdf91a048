"""`doctor` and `diagnose` where Python lacks what is Unix's: in real interpreters, with that taken
away.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreters import CHECKOUT, python

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

# As sitecustomize. The standard library's own modules were made for this system, and may keep what
# they need to be imported; numpy, too, asks a Linux kernel for its version.
AS_ON_WINDOWS = """
import contextlib, os, select, selectors, shutil, signal, socket, subprocess, sys, tempfile
with contextlib.suppress(ImportError):
    import numpy
MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty")
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Refuse())
os.environ.setdefault("USERNAME", "somebody")
os.environ.pop("XDG_RUNTIME_DIR", None)
LACKS = {
    os: "getuid geteuid getgid fork register_at_fork sysconf killpg getpgid setsid eventfd eventfd_write EFD_NONBLOCK"
    " EFD_CLOEXEC uname O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_PATH sched_getaffinity getloadavg",
    signal: "SIGALRM SIGUSR1 SIGUSR2 SIGHUP SIGQUIT SIGCHLD SIGCONT SIGSTOP",
    socket: "AF_UNIX SO_PEERCRED",
    select: "poll epoll",
    selectors: "PollSelector EpollSelector",
}
for module, names in LACKS.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
HANG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7,"
    " OpType=ALLREDUCE, NumelIn=1, "
)
HANG += (
    "NumelOut=1, Timeout(ms)=1800000) ran for 1800190 milliseconds before timing out.\n"
)
CONFIG = """\
trainer: {devices: 4, strategy: ddpp}
model:
  train_ds: {use_lhotse: true, input_cfg: inputs.yaml, batch_size: 8}
"""


@pytest.fixture
def lacking(tmp_path: Path) -> Path:
    folder = tmp_path / "lacking"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(AS_ON_WINDOWS)
    return folder


def test_the_doctor_reads_configs_and_code(tmp_path: Path, lacking: Path) -> None:
    config, code = tmp_path / "config.yaml", tmp_path / "model.py"
    config.write_text(CONFIG)
    code.write_text("class Model: ...\n")
    done = python(
        "-m",
        "nemo_patches",
        "doctor",
        str(config),
        "+trainer.num_nodes=2",
        path=(lacking, CHECKOUT),
    )
    assert done.returncode == 1, done
    assert "NP123 warning: trainer.strategy is 'ddpp'" in done.stdout
    # All rules, those on machines too.
    for options in ((str(code),), ("--list-rules",), ("--explain", "NP210")):
        done = python(
            "-m", "nemo_patches", "doctor", *options, path=(lacking, CHECKOUT)
        )
        assert (done.returncode, done.stderr) == (0, ""), done


def test_diagnose_reads_a_folder_and_finds_no_job_here(
    tmp_path: Path, lacking: Path
) -> None:
    job = tmp_path / "job"
    job.mkdir()
    (job / "rank0.log").write_text(HANG)
    done = python("-m", "nemo_patches", "diagnose", str(job), path=(lacking, CHECKOUT))
    assert done.returncode == 1, done
    assert "ALLREDUCE" in done.stdout
    done = python(
        "-m", "nemo_patches", "diagnose", "--job", str(job), path=(lacking, CHECKOUT)
    )
    assert done.returncode == 2, done
    assert (
        done.stderr.startswith("nemo-patches diagnose: ")
        and "Traceback" not in done.stderr
    )
