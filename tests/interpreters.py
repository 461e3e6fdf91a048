"""Real Python interpreters for tests, started with a given PYTHONPATH, each with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import nemo_patches

CHECKOUT = Path(__file__).parent.parent
# What `nemo-patches run` puts on PYTHONPATH.
LAUNCHER = Path(nemo_patches.__file__).parent / "patching" / "boot"


def environment(*path: Path, **variables: str) -> dict[str, str]:
    """This process's environment without what steers Python or nemo_patches, and with these folders
    on PYTHONPATH.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "NEMO_PATCHES_"))
    }
    # `make test-matrix` has the NeMo to test on PYTHONPATH.
    released = (
        [os.environ["PYTHONPATH"]]
        if "TEST_NEMO" in os.environ and "PYTHONPATH" in os.environ
        else []
    )
    if path or released:
        kept["PYTHONPATH"] = os.pathsep.join([*map(str, path), *released])
    return {**kept, **variables}


def run(
    command: list[str | Path],
    variables: dict[str, str],
    limit: float = 240.0,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; at the limit it is killed with all that it has started, and the
    test fails.
    """
    process = subprocess.Popen(
        command,
        env=variables,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(
            f"{command} took more than {limit} s\n{stdout[-2000:]}\n{stderr[-4000:]}"
        ) from None
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def as_ordinary_user(command: list[str | Path]) -> list[str | Path]:
    """The command without root's leave to pass over modes, where it is root who runs the tests."""
    drop: list[str | Path] = [
        "setpriv",
        "--bounding-set=-dac_override,-dac_read_search",
    ]
    return [*drop, *command] if os.geteuid() == 0 else command


def python(
    *arguments: str,
    path: tuple[Path, ...] = (),
    executable: str | Path = sys.executable,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Start Python with these folders on PYTHONPATH."""
    return run([executable, *arguments], environment(*path, **variables))
