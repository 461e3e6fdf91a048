"""Real ranks with real encoders go wrong, each in its way, while they are traced: `diagnose` must
tell from the files.

A hang is judged three times: while it lasts, by the files as they are then, which is what SIGKILL
of all ranks leaves, and after the job has died of its own time limit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import encoders
import pytest
import torch
import torch.distributed as dist
from diagnosing import report_of
from ranks import CONNECTING_S, come_in, forget_incidents, run_ranks, wait_until
from test_stall_reports import (
    be_stopped,
    endless_loop,
    first_batch,
    hold_the_gil,
    stopper,
)

import nemo_patches
from nemo_patches.channel import meeting
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose import live
from nemo_patches.tools.diagnose.findings import CRITICAL
from nemo_patches.tracing import records
from nemo_patches.watch.job_folder import private_folder

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
TIMEOUT, ODD, SIZE = 1.5, 1, 3
STALL = 2.0
# Hangs in which no rank waits in the length sync.
STALLED = ("pre_encode", "layers", "all", "outside")
ASKED = ("loader", "outside")  # hangs in which the ranks are asked, too, as by --job
# Runs in which nobody gives up, on a busy machine either.
PATIENT = ("straggler", "healthy")
LAG, STRAGGLES = 0.15, 50  # the lag: well above what a busy machine makes of a step


@dataclass(frozen=True)
class Place:
    """Where a rank is in a scenario. go_on: exists once the files of the hang are copied."""

    rank: int
    folder: Path
    encoder: torch.nn.Module

    @property
    def go_on(self) -> Path:
        return self.folder.with_suffix(".go")

    @property
    def is_odd(self) -> bool:
        return self.rank == ODD

    def run(self, training: bool = True, frames: int = 100) -> None:
        self.encoder.train(training)
        with torch.set_grad_enabled(training):
            encoders.run(self.encoder, frames)

    def wait(self) -> None:
        wait_until(self.go_on.exists)


def missing_for(
    way: Callable[[Path], None], *, says: bool = False
) -> Callable[[Place], None]:
    """says: when it is where it waits, for which the other ranks wait."""

    def scenario(place: Place) -> None:
        if place.is_odd:
            way(place.go_on)
        elif says:
            wait_until(place.go_on.with_suffix(".waits").exists)
        place.run()

    return scenario


def stopped(place: Place) -> None:
    if place.is_odd:
        be_stopped(place.go_on)
    elif place.rank == 0:
        send = stopper(place.go_on)
        send(signal.SIGSTOP)
        place.run()
        copy_of_hang(place)
        send(signal.SIGCONT)
        return
    place.run()


def inside(module: str, who: Callable[[Place], bool]) -> Callable[[Place], None]:
    """These ranks wait within the encoder, before this module of it runs."""

    def scenario(place: Place) -> None:
        if who(place):
            target = place.encoder.get_submodule(module)
            hook = target.register_forward_pre_hook(lambda *_: place.wait())
            place.run()
            hook.remove()
        else:
            place.run()

    return scenario


def raises(place: Place) -> None:
    if place.is_odd:

        def fail(*_: object) -> None:
            raise ValueError("no such audio")

        hook = place.encoder.pre_encode.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="no such audio"):
            place.run()
        hook.remove()
        place.wait()
    else:
        place.run()
    place.run()


def all_out(place: Place) -> None:
    """Rank 1 is not in the others' gradients."""
    place.run()
    if place.is_odd:
        place.wait()
    dist.barrier()


def uneven_evaluation(place: Place) -> None:
    for _ in range(3):
        for _ in range(2):
            place.run()
            dist.barrier()
        for _ in range(2 + place.is_odd):
            place.run(training=False)
    if place.is_odd:  # its report tells where the others are; so they are still there
        (trace,) = place.folder.glob("rank-00001.*")
        wait_until(lambda: b'{"k":"stalled"' in trace.read_bytes())


def straggles(place: Place) -> None:
    """Without DDP's broadcast of buffers, in which all ranks wait for rank 0 on Gloo."""
    model = torch.nn.parallel.DistributedDataParallel(
        place.encoder, broadcast_buffers=False
    )
    for _ in range(STRAGGLES):
        if place.rank == 0:
            time.sleep(LAG)  # the straggler itself
        encoders.run(model, 100).sum().backward()


def skips(place: Place) -> None:
    """Rank 1 has one training batch less; nothing but the length sync holds the others back here."""
    for step in range(4):
        if not (place.is_odd and step == 0):
            place.run()


def healthy(place: Place) -> None:
    for _ in range(10):
        place.run()
    for _ in range(2):
        place.run(training=False)


HANGS: dict[str, Callable[[Place], None]] = {
    "loader": missing_for(lambda go_on: first_batch(go_on, 0), says=True),
    "workers": missing_for(lambda go_on: first_batch(go_on, 2), says=True),
    "loop": missing_for(endless_loop),
    "gil": missing_for(hold_the_gil),
    "stopped": stopped,
    "pre_encode": inside("pre_encode", lambda place: place.is_odd),
    "layers": inside("layers.0", lambda place: place.is_odd),
    "all": inside("layers.0", lambda _: True),
    "raises": raises,
    "outside": all_out,
}
RUNS: dict[str, Callable[[Place], None]] = {
    "uneven": uneven_evaluation,
    "straggler": straggles,
    "skip": skips,
    "healthy": healthy,
}


def hang_is_recorded(place: Place) -> bool:
    """Whether the waiting ranks have recorded who is missing; or, where nobody is, all that they
    will.
    """
    count = 3 if place.folder.name in STALLED else 2
    lines = [
        line
        for file in place.folder.glob("*.jsonl")
        for line in file.read_bytes().splitlines()
    ]
    reports = [line for line in lines if line.startswith(b'{"k":"stalled"')]
    of_the_job = [line for line in reports if b'"e":""' in line]
    return len(of_the_job if place.folder.name in STALLED else reports) >= count


def copy_of_hang(place: Place) -> None:
    try:
        judge_the_hang(place)
    except BaseException:  # of a thread: the test shows it
        place.folder.with_suffix(".failed").write_text(traceback.format_exc())
    finally:  # else all wait for the one that is missing
        place.go_on.touch()


def judge_the_hang(place: Place) -> None:
    wait_until(lambda: hang_is_recorded(place))
    shutil.copytree(place.folder, place.folder.with_suffix(".hang"))
    if place.folder.name in ASKED:
        port = meeting.port_of(dist.distributed_c10d._get_default_store())
        told = live.ask_job(private_folder(port))[0]
        assert told.findings, told
        asked = told.findings[0]
        place.folder.with_suffix(".asked").write_text(
            json.dumps([asked.id, asked.ranks])
        )
    first = report_of(place.folder).findings[0]
    place.folder.with_suffix(".live").write_text(json.dumps([first.id, first.ranks]))


def go_wrong(rank: int, size: int, folder: str) -> None:
    kept = []  # as models do, they live until the end
    for name, scenario in {**HANGS, **RUNS}.items():
        forget_incidents()
        place = Place(rank, Path(folder, name), encoders.conformer())
        kept.append(place)
        settings = {
            "stall_timeout": STALL if name in STALLED else 0.0,
            "trace": place.folder,
        }
        nemo_patches.apply(timeout=CONNECTING_S, **settings)
        for _ in range(2):
            place.run()
            come_in(place.encoder)
        nemo_patches.apply(
            timeout=CONNECTING_S if name in PATIENT else TIMEOUT, **settings
        )
        dist.barrier()
        if name in HANGS and rank == 2:
            scenario_then_copy(place, scenario)
        else:
            scenario(place)
        dist.barrier()
    nemo_patches.apply(timeout=TIMEOUT, trace="")
    # After this the process ends: a busy disk may take the last record later than apply() waits.
    (last,) = place.folder.glob(f"rank-{rank:05}.*")
    wait_until(lambda: b'{"k":"end"' in last.read_bytes())


def scenario_then_copy(place: Place, scenario: Callable[[Place], None]) -> None:
    """Rank 2 copies the files in a thread: in some scenarios it is itself in the hang."""
    copying = threading.Thread(target=copy_of_hang, args=(place,))
    if place.folder.name != "stopped":
        copying.start()
    scenario(place)
    if place.folder.name in STALLED:
        return  # to the barrier, in which it waits for rank 1, as rank 0 does
    if copying.ident is not None:
        copying.join(30)
    wait_until(place.go_on.exists)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("traces")
    run_ranks(go_wrong, SIZE, str(where), limit=400)
    return where


@pytest.mark.parametrize(
    ("name", "finding", "said"),
    [
        ("loader", ids.MISSING_RANK, "read_audio (tests/test_stall_reports.py:"),
        ("workers", ids.MISSING_RANK, "_try_get_data (torch/utils/data/dataloader.py:"),
        ("loop", ids.MISSING_RANK, "endless_loop (tests/test_stall_reports.py:"),
        # The writer's thread may not have had the lock since call 1.
        ("gil", ids.SILENT, ""),
        ("stopped", ids.SILENT, ""),
        ("pre_encode", ids.MISSING_RANK, ""),
        ("layers", ids.MISSING_RANK, ""),
        ("raises", ids.EXCEPTION, "no such audio"),
        ("outside", ids.MISSING_RANK, ""),
    ],
)
def test_the_verdict_while_it_hangs(
    folder: Path, name: str, finding: str, said: str
) -> None:
    failed = folder / f"{name}.failed"
    assert not failed.exists(), failed.read_text()
    report = report_of(folder / f"{name}.hang")
    first = report.findings[0]
    assert (first.id, first.ranks) == (finding, (1,)), report
    assert said in "\n".join((first.text, *first.evidence))
    assert report.exit_code == 1
    assert report.problems == ()
    assert json.loads((folder / f"{name}.live").read_text()) == [finding, [1]]
    if name in ASKED:
        asked, missing = json.loads((folder / f"{name}.asked").read_text())
        # In "loader" rank 2, which copies the files, is away as well.
        assert asked == ids.MISSING_RANK and {1} <= set(missing) <= {1, 2}


@pytest.mark.parametrize("name", ["loader", "workers", "loop", "gil", "stopped"])
def test_afterwards_it_is_a_rank_that_was_late(folder: Path, name: str) -> None:
    report = report_of(folder / name)
    assert [(one.id, one.ranks) for one in report.findings] == [(ids.LATE, (1,))]


def test_of_a_rank_whose_trace_was_stopped_the_others_reports_tell(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "loader.hang", tmp_path / "stopped")
    (file,) = (tmp_path / "stopped").glob("rank-00001.*")
    last = json.loads(file.read_bytes().splitlines()[-1])["t"]
    with file.open("ab") as trace:
        trace.write(records.encode(records.End(last + 1, "revert()")))
    report = report_of(tmp_path / "stopped")
    assert [(one.id, one.ranks) for one in report.findings][:1] == [
        (ids.MISSING_RANK, (1,))
    ]
    assert (
        "it is in " in report.verdict
        and "read_audio (tests/test_stall_reports.py:" in report.verdict
    )


def test_uneven_evaluation(folder: Path, tmp_path: Path) -> None:
    first = report_of(folder / "uneven").findings[0]
    odd = "Rank 1 is the odd one out: rank 1 in length sync; ranks 0, 2 in barrier:"
    assert first.id == ids.OUT_OF_STEP and odd in first.text, first
    shutil.copytree(folder / "uneven", tmp_path / "uneven")
    leave_out(tmp_path / "uneven", b'{"k":"stalled"')
    first = report_of(tmp_path / "uneven").findings[0]
    assert first.id == ids.UNEVEN_CALLS
    assert "rank 1 " in first.text


def leave_out(folder: Path, *records: bytes) -> None:
    """Lines that begin like these, of all traces there."""
    for file in folder.iterdir():
        lines = file.read_bytes().splitlines(True)
        file.write_bytes(b"".join(one for one in lines if not one.startswith(records)))


def test_a_chronic_straggler(folder: Path) -> None:
    report = report_of(folder / "straggler")
    assert [(one.id, one.ranks) for one in report.findings] == [(ids.STRAGGLER, (0,))]
    assert LAG / 2 < (report.ranks[0].lag or 0.0) < LAG * 2


def test_a_skipped_training_call(folder: Path) -> None:
    report = report_of(folder / "skip")
    first = report.findings[0]
    if first.id == ids.OUT_OF_STEP:  # by a stall report, if one came before the end
        odd = r"1 is the odd one out: rank 1 in (barrier|all_reduce); ranks 0, 2 in length sync:"
        assert re.search(odd, first.text), first.text
    else:
        assert first.id == ids.UNEVEN_CALLS
        assert "rank 1 5; ranks 0, 2 6" in first.text


def test_where_all_are_in_the_encoder_nobody_is_accused(folder: Path) -> None:
    report = report_of(folder / "all.hang")
    assert not report.findings[0].ranks, report


def test_nothing_is_found_in_a_healthy_run(folder: Path) -> None:
    report = report_of(folder / "healthy")
    files = sorted((folder / "healthy").iterdir())
    assert report.findings == (), [one.read_text()[-600:] for one in files]
    assert report.exit_code == 0


def dies(rank: int, size: int, folder: str, way: str, broadcast_buffers: bool) -> None:
    """Default DDP, but for a short time limit. Nobody catches what ends a rank."""
    where = Path(folder)
    nemo_patches.apply(timeout=CONNECTING_S, stall_timeout=STALL, trace=where)
    model = torch.nn.parallel.DistributedDataParallel(
        encoders.conformer(), broadcast_buffers=broadcast_buffers
    )

    def step() -> None:
        model(
            audio_signal=torch.randn(2, encoders.FEATURES, 100),
            length=torch.tensor([100, 90]),
        )[0].sum().backward()

    for _ in range(3):
        step()
        come_in(model.module)
    nemo_patches.apply(timeout=TIMEOUT, stall_timeout=STALL, trace=where)
    where.with_suffix(f".{rank}").write_text(str(os.getpid()))
    if rank == ODD:
        wait_until(
            lambda: (
                next(where.glob("rank-00001.*")).read_bytes().count(b'"k":"leave"') == 3
            )
        )
        others = [
            where.with_suffix(f".{other}") for other in range(size) if other != rank
        ]
        if way == "late":
            threading.Thread(
                target=end_when_these_have, args=(others,), daemon=True
            ).start()
            first_batch(where.with_suffix(".never"), 0)
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such audio")
    step()


def end_when_these_have(others: list[Path]) -> None:
    """As a launcher does: SIGTERM to who is left."""
    wait_until(lambda: all(other.exists() and other.read_text() for other in others))
    for process in (int(other.read_text()) for other in others):
        while Path(f"/proc/{process}").exists():
            time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("way", "broadcast_buffers", "finding", "said"),
    [
        (
            "late",
            True,
            ids.MISSING_RANK,
            "Rank 1: ",
        ),  # who waits in DDP's broadcast, and who is past it, may differ
        ("late", False, ids.MISSING_RANK, "Rank 1: "),
        ("killed", True, ids.KILLED, "it was killed or crashed"),
        ("killed", False, ids.KILLED, "it was killed or crashed"),
        ("raised", True, ids.EXCEPTION, "ValueError: no such audio"),
        ("raised", False, ids.EXCEPTION, "ValueError: no such audio"),
    ],
)
def test_after_the_job_has_died_the_first_to_go_is_to_blame(
    way: str, broadcast_buffers: bool, finding: str, said: str, tmp_path: Path
) -> None:
    where = tmp_path / "traces"
    run_ranks(
        dies,
        SIZE,
        str(where),
        way,
        broadcast_buffers,
        dies=(0, 1, 2),
        group_timeout=12.0,
    )
    report = report_of(where)
    first = report.findings[0]
    assert (first.id, first.ranks) == (finding, (ODD,)), report
    assert said in report.verdict
    assert not [
        one
        for one in report.findings[1:]
        if one.severity == CRITICAL and not one.because
    ], report
    place = "read_audio (tests/test_stall_reports.py:" if way == "late" else ""
    assert place in report.verdict
    # How the ranks ended tells the same, without the stall reports.
    for file in where.iterdir():
        shutil.copy(file, tmp_path)
    leave_out(where, b'{"k":"stalled')
    report = report_of(where)
    assert (report.findings[0].id, report.findings[0].ranks) == (
        finding,
        (ODD,),
    ), report
    # And so do the stall reports, without how the ranks ended, or without that rank's file.
    if way == "late":
        for file in tmp_path.glob("rank-*"):
            shutil.copy(file, where)
        leave_out(where, b'{"k":"raised"', b'{"k":"end"')
        report = report_of(where)
        assert (report.findings[0].id, report.findings[0].ranks) == (
            finding,
            (ODD,),
        ), report
        next(where.glob("rank-00001.*")).unlink()
        report = report_of(where)
        assert (report.findings[0].id, report.findings[0].ranks) == (
            ids.MISSING_RANK,
            (ODD,),
        ), report


def killed(rank: int, size: int, folder: str) -> None:
    nemo_patches.apply(timeout=CONNECTING_S, trace=folder)
    encoder = encoders.conformer()
    for _ in range(2):
        encoders.run(encoder, 100)
        come_in(encoder)
    nemo_patches.apply(timeout=TIMEOUT, trace=folder)
    wait_until(lambda: len(list(Path(folder).glob("*.jsonl"))) == size)
    if rank == ODD:
        wait_until(
            lambda: (
                next(Path(folder).glob("rank-00001.*"))
                .read_bytes()
                .count(b'"k":"leave"')
                == 2
            )
        )
        os.kill(os.getpid(), signal.SIGKILL)
    encoders.run(encoder, 100)


def test_a_killed_rank(tmp_path: Path) -> None:
    run_ranks(killed, SIZE, str(tmp_path), dies=(ODD,))
    first = report_of(tmp_path).findings[0]
    assert (first.id, first.ranks) == (ids.KILLED, (ODD,))


def never_there(rank: int, size: int, folder: str) -> None:
    if rank == ODD:
        wait_until(Path(folder, "done").exists)
        return
    nemo_patches.apply(timeout=TIMEOUT, trace=Path(folder, "traces"))
    encoder = encoders.conformer()
    encoders.run(encoder, 100)
    encoders.run(encoder, 100)
    wait_until(lambda: nemo_patches.status().stalls)
    nemo_patches.revert()
    Path(folder, f"done-{rank}").touch()
    wait_until(lambda: all(Path(folder, f"done-{one}").exists() for one in (0, 2)))
    Path(folder, "done").touch()


def test_a_rank_that_was_never_there(tmp_path: Path) -> None:
    run_ranks(never_there, SIZE, str(tmp_path))
    first = report_of(tmp_path / "traces").findings[0]
    assert (first.id, first.ranks) == (ids.MISSING_RANK, (ODD,))
