"""What real jobs under torchrun leave in their logs, judged: who was first, and no innocents."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from interpreters import environment, run

from nemo_patches.tools.diagnose import reading
from nemo_patches.tools.diagnose.findings import (
    EXCEPTION,
    FIRST_FAILURE,
    KILLED,
    Diagnosis,
)
from nemo_patches.tools.diagnose.judge import judge

pytestmark = [pytest.mark.one_nemo]


def logged(folder: Path, how: str, *options: str, **variables: str) -> Path:
    """The output of a job of two ranks; rank 1 fails."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *options,
    ]
    script = Path(__file__).with_name("logged_job.py")
    done = run(
        [*torchrun, script],
        environment(OMP_NUM_THREADS="1", HOW=how, **variables),
        cwd=folder,
    )
    assert done.returncode
    log = folder / "train.log"
    log.write_text(done.stdout + done.stderr)
    return log


def report_on(*paths: Path) -> Diagnosis:
    found = reading.find(paths)
    return judge(reading.joined(reading.read(found), found.problems, found.earlier))


@pytest.mark.parametrize(
    ("how", "id_", "words"),
    [
        ("kill", KILLED, "SIGKILL"),
        (
            "reset",
            EXCEPTION,
            (
                "ConnectionResetError: [Errno 104] Connection reset by peer in"
                " __getitem__ (logged_job.py:"
            ),
        ),
    ],
)
def test_the_rank_that_failed_is_named_and_no_other(
    how: str, id_: str, words: str, tmp_path: Path
) -> None:
    report = report_on(logged(tmp_path, how))
    first = report.findings[0]
    assert (first.id, first.ranks) == (id_, (1,)), report
    assert words in first.text and not any(
        set(one.ranks) - {1} for one in report.findings
    )


def test_an_exception_before_there_is_a_process_group_is_the_ranks_by_torchruns_tee(
    tmp_path: Path,
) -> None:
    log = logged(tmp_path, "early", "--log-dir", str(tmp_path / "logs"), "--tee", "3")
    first = report_on(log).findings[0]
    assert (first.id, first.ranks) == (
        EXCEPTION,
        (1,),
    ) and "训练.json" in first.text, first
    # The rank's own file alone does not tell whether that was caught; whoever reads it sees it all
    # the same.
    alone = report_on(tmp_path / "logs")
    assert (
        alone.exit_code == 2
        and "a traceback, which may have been caught (FileNotFoundError"
        in alone.verdict
        and alone.verdict.startswith("Rank 1 ")
    ), alone


@pytest.mark.parametrize(
    ("how", "ranks", "words"),
    [
        ("leave", (1,), "Rank 1 failed first, exit code 3"),
        ("term", (), "Rank 1 ended first, by a SIGTERM that torchrun had not sent"),
    ],
)
def test_who_went_first_without_a_word_is_told_by_the_launcher(
    how: str, ranks: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    report = report_on(logged(tmp_path, how))
    assert [(one.id, one.ranks) for one in report.findings] == [
        (FIRST_FAILURE, ranks)
    ], report
    assert words in report.verdict


def test_an_exception_that_hydra_prints_is_the_ranks_by_its_folder(
    tmp_path: Path,
) -> None:
    """Hydra prints it without torch's prefix: in one log of all ranks nobody can tell whose it is."""
    folder = tmp_path / "logs"
    log = logged(
        tmp_path,
        "sizes",
        "--log-dir",
        str(folder),
        "--redirects",
        "3",
        HYDRA=str(tmp_path / "hydra"),
    )
    together = tmp_path / "together.log"
    together.write_text(
        "".join(file.read_text() for file in sorted(folder.rglob("stderr.log")))
        + log.read_text()
    )
    first = report_on(folder).findings[0]
    assert (first.id, first.ranks) == (
        EXCEPTION,
        (1,),
    ) and "stack expects each tensor" in first.text, first
    report = report_on(together)
    assert (
        report.findings[0].id == EXCEPTION
        and "stack expects each tensor" in report.verdict
    ), report
    assert not any(one.ranks for one in report.findings), report
