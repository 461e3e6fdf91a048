"""What judges a stall is there at the stall: without a file descriptor, and with our checkout
replaced.
"""

from __future__ import annotations

import compileall
import json
import re
import resource
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import encoders
import pytest
from interpreters import CHECKOUT, environment, run
from ranks import Said, in_step, run_ranks, wait_for_others, wait_until
from test_plain_jobs import LONG_S, running

import nemo_patches
from nemo_patches.watch.late_modules import NAMES, LateModules

pytestmark = pytest.mark.one_nemo
PACKAGE = Path(nemo_patches.__file__).parent
TIMEOUT = 2.0
STALL_TIMEOUT = 8  # its first quarter is longer than a step takes on a busy machine


def as_folder(folder: Path) -> Path:
    shutil.copytree(
        PACKAGE,
        folder / "nemo_patches",
        ignore=shutil.ignore_patterns("__pycache__", "patches"),
    )
    return folder


def as_bytecode(folder: Path) -> Path:
    """As a package without its sources."""
    compileall.compile_dir(as_folder(folder), quiet=2, legacy=True)
    for file in folder.rglob("*.py"):
        file.unlink()
    return folder


def as_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "ours.zip", "w") as archive:
        for file in PACKAGE.rglob("*.py"):
            archive.write(file, file.relative_to(PACKAGE.parent))
    return folder / "ours.zip"


AT_A_STALL = """
import json, os, resource, shutil, sys
import torch.distributed
import nemo_patches.watch.subscriber
from nemo_patches.watch.late_modules import NAMES, LateModules

late = LateModules()
if sys.argv[2] == "read":
    late.read()
early = [name for name in NAMES if name in sys.modules]
shutil.rmtree(sys.argv[1])
lowest = os.open(os.devnull, os.O_RDONLY)
os.close(lowest)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, most))  # none is left
before = set(sys.modules)
why = ""
try:
    late.run()
except Exception as error:
    why = repr(error)
others = [name for name in sorted(set(sys.modules) - before) if not name.startswith("nemo_patches.")]
print(json.dumps([nemo_patches.__file__, early, why, others, [name for name in NAMES if name not in sys.modules]]))
"""


@pytest.mark.parametrize("form", [as_folder, as_bytecode, as_zip])
def test_what_was_read_runs_without_a_file_and_imports_no_other_module(
    form: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "installed"
    folder.mkdir()
    told = run(
        [sys.executable, "-c", AT_A_STALL, folder, "read"],
        environment(form(folder)),
        cwd=tmp_path,
    )
    assert not told.returncode, told.stderr
    file, early, why, others, missing = json.loads(told.stdout)
    assert file.startswith(str(folder))
    assert (early, why, others, missing) == ([], "", [], [])


def test_what_was_not_read_is_not_there_and_it_is_said_why(tmp_path: Path) -> None:
    folder = as_folder(tmp_path / "installed")
    told = run(
        [sys.executable, "-c", AT_A_STALL, folder, "not read"],
        environment(folder),
        cwd=tmp_path,
    )
    assert not told.returncode, told.stderr
    file, _, why, _, missing = json.loads(told.stdout)
    assert file.startswith(str(folder))
    assert why
    assert missing == list(NAMES)


@pytest.mark.alone
def test_a_stall_is_judged_without_a_descriptor_and_with_a_replaced_checkout(
    tmp_path: Path,
) -> None:
    checkout = as_folder(tmp_path / "checkout")
    shutil.copy(CHECKOUT / "sitecustomize.py", checkout)
    with running(
        "ddp", "sleeps", tmp_path, stall_timeout=STALL_TIMEOUT, checkout=checkout
    ) as job:
        (checkout / "nemo_patches").rename(checkout / "another")
        for name in ("judging", "watch"):
            broken = checkout / "nemo_patches" / name
            broken.mkdir(parents=True)
            (broken / "__init__.py").write_text(
                "raise SystemExit('this is not the code that runs')"
            )
        for process in job.ranks:
            _, most = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            # None is left.
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, most))
        wait_until(lambda: all(job.stalls(rank) for rank in range(2)), LONG_S)
        for rank in range(2):
            line, *_ = job.stalls(rank)
            assert re.search(
                r" WARNING .* s\. rank 1 \(.*\): sleeps \(tests/plain_job\.py:.* \|"
                r" rank 0 \(",
                line,
            )


def cannot_judge(rank: int, size: int) -> list[str]:
    def run(_: LateModules) -> None:
        raise OSError("no file left")

    LateModules.run = run  # type: ignore[method-assign]
    encoder = in_step(timeout=TIMEOUT, stall_timeout=1.0)
    said = Said()
    wait_until(lambda: said.lines)
    if rank == 0:
        encoders.sync(encoder, 100)  # nobody else makes this call
    wait_for_others("said", size)
    return said.lines


@pytest.mark.alone
def test_where_it_cannot_be_judged_the_reason_is_logged_and_the_sync_says_who_waits() -> (
    None
):
    first, _ = run_ranks(cannot_judge, 2)
    ended, late = first.value
    assert "the stall monitor has ended by an error of its own" in ended
    assert "OSError('no file left')" in ended
    assert "not every rank's length came within" in late
