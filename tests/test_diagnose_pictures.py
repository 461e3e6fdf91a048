"""The plot of a job's traces, as the command draws it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from interpreters import python
from simulated_job import Call, Exit, steps
from simulated_traces import write

pytestmark = pytest.mark.one_nemo


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_the_command_draws(tmp_path: Path) -> None:
    last = [Call(raises="ValueError: $x$"), Exit()]
    write(tmp_path / "job", [[*steps(20), Call()], [*steps(20), *last]])
    png = tmp_path / "a.png"
    done = python(
        "-m", "nemo_patches", "diagnose", str(tmp_path / "job"), "--plot", str(png)
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert size_of(png)[0] > 1000
    done = python(
        "-m",
        "nemo_patches",
        "diagnose",
        str(tmp_path / "job"),
        "--plot",
        str(tmp_path / "no" / "a.png"),
    )
    assert done.returncode == 2 and "No such file or directory" in done.stderr


def test_without_matplotlib_the_plot_says_what_is_needed(tmp_path: Path) -> None:
    write(tmp_path / "job", [[*steps(20), Exit()]] * 2)
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"sys.argv[1:] = ['diagnose', {str(tmp_path / 'job')!r}, '--plot', 'x.png']\n"
        "from nemo_patches.cli import main; main()"
    )
    done = python("-c", program)
    assert done.returncode == 2
    assert (
        "--plot needs matplotlib: pip install matplotlib" in done.stderr
        and "Traceback" not in done.stderr
    )
