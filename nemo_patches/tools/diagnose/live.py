"""A running job, asked through the Unix socket of one of its ranks on this host:
where all ranks are. Needs no torch.

Nothing is written. Whichever rank answers first has asked all others, as it does for a stall
report.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose import running
from nemo_patches.tools.diagnose.collect.host_ranks import HostRank
from nemo_patches.tools.diagnose.collect.proc_files import (
    CLOCK_SLACK_S,
    process_ids,
    seen_by,
    started_at,
    stat_fields,
)
from nemo_patches.tools.diagnose.findings import CRITICAL, Diagnosis
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.rank_facts import Evidence, UnreadableError
from nemo_patches.tools.diagnose.sources import report_files
from nemo_patches.watch.job_folder import private_folders
from nemo_patches.watch.job_socket import ENDING, near, process_of

_ANSWER_S = 15.0  # a rank waits some seconds itself, for others that do not answer
_MOST_RANKS = 1 << 20
_HERE = "run it on a host of the job, as the same user; nemo_patches must be on there"


class NoSocketError(UnreadableError):
    """No job with nemo_patches is found there; there may be one without it."""


def ask_job(folder: Path) -> tuple[Diagnosis, Evidence]:
    """The report, and what it is from. folder: the job's own, or one that its processes work in.
    Raises UnreadableError.

    Where the job knows of a hang and of no rank that it is for, the ranks on this host are looked
    at from outside, too.
    """
    sockets = _sockets(folder)
    problems: list[str] = []
    for file in sockets:
        try:
            answer = report_files.decode(_ask(file))
            report = report_files.diagnose_answer(answer, str(folder), tuple(problems))
            if _is_enough(report, answer):
                return report, report_files.evidence_of(answer)
            return _seen_from_outside(report, answer, sockets)
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror or error}")
        except (ValueError, RecursionError):
            problems.append(f"{file.name}: what it says cannot be read")
    raise UnreadableError(
        f"--job={folder}: no rank of the job answers here: {'; '.join(problems)}"
    )


def _is_enough(report: Diagnosis, answer: report_files.RankReport) -> bool:
    """Whether the job's own words tell which rank the others wait for, or that there is no hang, or
    none yet.

    Which rank is out of step they tell by how many there are; stacks show who is further on.
    """
    if answer.goes_on or not report.findings:
        return True
    return any(one.ranks and one.id != ids.OUT_OF_STEP for one in report.findings)


def _seen_from_outside(
    report: Diagnosis, answer: report_files.RankReport, sockets: Sequence[Path]
) -> tuple[Diagnosis, Evidence]:
    """With the stacks of the ranks on this host, unless these show no hang."""
    ranks = [
        HostRank(
            _rank_of(file),
            process_of(file),
            answer.world_size,
            0,
            found_by="their sockets",
        )
        for file in sockets
        if stat_fields(f"/proc/{process_of(file)}/stat")
    ]
    answered = report_files.evidence_of(answer)
    also = [("the job's answer", answered)]
    name, evidence = running.evidence_of(ranks, stuck_after_s=0.0, also=also)
    seen = judge(evidence, name, stuck_after_s=0.0)
    if any(one.severity == CRITICAL for one in seen.findings):
        return seen, evidence
    return report, answered


def _sockets(folder: Path) -> list[Path]:
    """The sockets of the one job that the folder stands for, in rank order. Raises
    UnreadableError.
    """
    if not os.path.isdir(folder):  # Path's own raises for a name that is too long
        named = list(_called(str(folder)))
        if not named:
            raise NoSocketError(
                f"--job={folder} is no folder, and no job here has that name: {_HERE}"
            )
        if len(named) > 1:
            raise UnreadableError(_several(folder, named))
        (folder,) = named
    found: dict[Path, list[Path]] = {}
    for mine in _of_jobs():
        with contextlib.suppress(OSError):
            for file in mine.glob(f"*/*{ENDING}"):
                if _means(folder, file):
                    found.setdefault(file.parent, []).append(file)
    for file in folder.glob(f"*{ENDING}"):
        found.setdefault(folder.resolve(), []).append(file)
    jobs = {
        each.resolve(): sorted(set(files), key=_rank_of)
        for each, files in found.items()
    }
    if not jobs:
        raise NoSocketError(
            f"--job={folder}: no rank of a running job works there; {_HERE}"
        )
    if len(jobs) > 1:
        raise UnreadableError(_several(folder, jobs))
    return jobs.popitem()[1]


def _several(folder: Path, jobs: Iterable[Path]) -> str:
    return (
        f"--job={folder}: several jobs; give one of {', '.join(map(str, sorted(jobs)))}"
    )


def _called(name: str) -> list[Path]:
    """The folders of the jobs that have this name: of those that run, if any does."""
    found = []
    for mine in _of_jobs():
        with contextlib.suppress(OSError):
            found += [job for job in mine.iterdir() if is_called(job, name)]
    running = [job for job in found if any(map(_lives, job.glob(f"*{ENDING}")))]
    return running or found


def is_called(folder: Path, name: str) -> bool:
    """Whether a job's folder is called so, with or without those digits."""
    return (
        folder.name == name
        or re.fullmatch(re.escape(name) + "-[0-9a-f]{8}", folder.name) is not None
    )


def _lives(file: Path) -> bool:
    return bool(stat_fields(f"/proc/{process_of(file)}/stat"))


def _of_jobs() -> list[Path]:
    """The folders in which this user's jobs have theirs: this shell's, and those of processes that
    have a /tmp of their own.
    """
    own = private_folders()
    found = dict[tuple[int, int], Path]()
    for path in (own, *(Path(seen_by(pid, str(own))) for pid in process_ids())):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.setdefault((status.st_dev, status.st_ino), path)
    return list(found.values())


def _means(folder: Path, file: Path) -> bool:
    """Whether the socket's process has the folder as its working directory."""
    process = Path(f"/proc/{process_of(file)}")
    with contextlib.suppress(OSError):
        if started_at(process_of(file)) > file.lstat().st_mtime + CLOCK_SLACK_S:
            return False  # a killed process left its socket, and another process has its pid now
        return (process / "cwd").samefile(folder)
    return False


def _rank_of(file: Path) -> int:
    number = file.name.removeprefix("rank_").partition(".")[0]
    return int(number) if number.isdecimal() else _MOST_RANKS


def _ask(file: Path) -> bytes:
    if stat_fields(f"/proc/{process_of(file)}/stat")[:1] in (["T"], ["t"]):
        raise TimeoutError(0, "its process is stopped")
    with socket.socket(socket.AF_UNIX) as own, near(file.parent, file.name) as path:
        own.settimeout(_ANSWER_S)
        own.connect(path)
        with own.makefile("rb") as answer:
            return answer.read(report_files.LONGEST)
