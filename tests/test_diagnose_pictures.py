"""The plot, of few ranks and of many."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interpreters import python
from simulated_job import Call, Event, Exit, Gradients, evaluation, steps
from simulated_traces import Setup, file_name, header, write

from nemo_patches.tools.diagnose.case import cases
from nemo_patches.tools.diagnose.diagnosis import diagnose
from nemo_patches.tools.diagnose.folder import Folder, TracedJob
from nemo_patches.tools.diagnose.plot import draw as draw_report
from nemo_patches.tools.diagnose.plot import labels
from nemo_patches.tracing import records

pytestmark = pytest.mark.one_nemo


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def draw(one: TracedJob, file: Path) -> None:
    draw_report(one, file, diagnose(one))


def job(folder: Path, schedules: list[list[Event]], **more: Any) -> TracedJob:
    return Folder(write(folder, schedules, **more)).read()


def in_step(folder: Path, ranks: int, calls: int) -> TracedJob:
    """Many ranks or calls: too many for the simulation, so all come to every round, and one is
    always last.
    """
    for rank in range(ranks):
        lines: list[records.Record] = [
            header(rank, ranks, 1e9 + 4000 * rank, Setup()),
        ]
        for n in range(1, calls + 1):
            waited = 0.0 if rank == 1 else 0.05 + 0.001 * (rank % 7)
            lines.append(
                records.Enter(
                    n * 0.2,
                    "ConformerEncoder",
                    n,
                    True,
                    [8, 80, 900],
                    "float32",
                    "cuda:0",
                )
            )
            lines.append(
                records.Sync(
                    n * 0.2 + waited,
                    "ConformerEncoder",
                    n,
                    records.CAME,
                    n,
                    waited,
                    900,
                    900,
                )
            )
            lines.append(records.Leave(n * 0.2 + 0.1, "ConformerEncoder", n, [8]))
        (folder / file_name(rank, 1e9 + 4000 * rank)).write_bytes(
            b"".join(map(records.encode, lines))
        )
    return Folder(folder).read()


def test_a_plot_of_two_ranks_and_one_of_256(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    two = job(
        tmp_path / "two",
        [[*steps(30), Call(pause=26), Gradients(), *steps(30)], steps(61)],
    )
    many = in_step(tmp_path / "many", 256, 40)
    for number, one in enumerate((two, many)):
        draw(one, tmp_path / f"{number}.png")
    (width, height), (width_of_many, height_of_many) = (
        size_of(tmp_path / "0.png"),
        size_of(tmp_path / "1.png"),
    )
    assert width == width_of_many > 1000
    assert 200 < height < 500 < height_of_many < 1500


def test_a_plot_of_so_many_calls_that_columns_hold_several(tmp_path: Path) -> None:
    draw(in_step(tmp_path, 2, 5_000), tmp_path / "long.png")
    assert size_of(tmp_path / "long.png")[0] > 1000


def colours(png: Path) -> Any:
    from matplotlib.image import imread

    return (imread(png)[:, :, :3] * 255).round().astype(int)


CULPRIT = (209, 17, 73)


def test_the_rank_to_blame_stands_out_and_each_encoder_has_a_panel(
    tmp_path: Path,
) -> None:
    def count(name: str, rgb: tuple[int, int, int]) -> int:
        return int(
            (np.abs(colours(tmp_path / f"{name}.png") - rgb).sum(axis=2) < 12).sum()
        )

    well: list[list[Event]] = [[*steps(30), Exit()] for _ in range(3)]
    hangs = [
        steps(20) + evaluation(9) + ([] if rank == 1 else steps(1)) for rank in range(3)
    ]
    draw(job(tmp_path / "1", well), tmp_path / "well.png")
    draw(job(tmp_path / "2", hangs), tmp_path / "hangs.png")
    assert count("hangs", CULPRIT) > 300 + count("well", CULPRIT)  # its label
    for file in (
        tmp_path / "1"
    ).iterdir():  # a second encoder, called as the first one is
        lines = file.read_bytes().splitlines(True)
        again = [
            line.replace(b'"e":0', b'"e":1').replace(b'Encoder"', b'Encoder #2"')
            for line in lines
        ]
        file.write_bytes(
            b"".join(
                one + (b"" if other == one else other)
                for one, other in zip(lines, again, strict=True)
            )
        )
    draw(Folder(tmp_path / "1").read(), tmp_path / "two.png")
    assert size_of(tmp_path / "two.png")[1] > 1.5 * size_of(tmp_path / "well.png")[1]


def test_a_rank_is_labelled_with_its_last_call(tmp_path: Path) -> None:
    hangs = [
        steps(20) if rank == 1 else [*steps(20), Call(stuck="layers" if rank else "")]
        for rank in range(3)
    ]
    (hanging,) = cases(
        job(tmp_path / "hangs", [*hangs, [*steps(20), Call(raises="ValueError")]])
    )
    (over,) = cases(job(tmp_path / "over", [[*steps(3), Exit()]] * 2))
    assert labels(hanging, [0, 1, 2, 3]) == [
        "node0  rank 0, last call 21",
        "rank 1, last call 20",
        "rank 2, last call 21, still in it",
        "rank 3, last call 21: exception",
    ]
    assert labels(over, [0, 1]) == [
        "node0  rank 0, last call 3, then ended",
        "rank 1, last call 3, then ended",
    ]


def test_a_verdict_with_dollar_signs_is_drawn(tmp_path: Path) -> None:
    raised = [
        [*steps(30), Exit("ValueError: $x_{ costs $5" if rank else "")]
        for rank in range(2)
    ]
    draw(job(tmp_path / "job", raised), tmp_path / "out.png")
    assert size_of(tmp_path / "out.png")[0] > 1000


def test_what_went_wrong_is_marked(tmp_path: Path) -> None:
    """Each mark has a colour of its own: beyond the legend, it is there only where there is
    something to mark.
    """
    marks = {"late": (209, 17, 73), "gave up": (51, 65, 92), "exception": (29, 17, 51)}
    usual: list[Event] = [*steps(11), Call(), Exit()]
    late: list[Event] = [
        *steps(5),
        Call(pause=26),
        Gradients(),
        *steps(5),
        Call(raises="ValueError"),
        Exit(),
    ]
    counted = []
    for name, schedules in (("well", [usual, usual]), ("badly", [late, usual])):
        draw(job(tmp_path / name, schedules), tmp_path / f"{name}.png")
        pixels = colours(tmp_path / f"{name}.png")
        counted.append(
            {
                mark: int((np.abs(pixels - rgb).sum(axis=2) < 12).sum())
                for mark, rgb in marks.items()
            }
        )
    assert all(counted[1][mark] > counted[0][mark] + 8 for mark in marks), counted


def test_the_command_draws(tmp_path: Path) -> None:
    write(tmp_path / "job", [[*steps(20), Exit()]] * 2)
    png = tmp_path / "a.png"
    done = python(
        "-m", "nemo_patches", "diagnose", str(tmp_path / "job"), "--plot", str(png)
    )
    assert (done.returncode, done.stderr) == (0, "")
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
