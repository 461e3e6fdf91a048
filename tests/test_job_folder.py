"""The job's folder on a host, and the stall report that each rank leaves there."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time as clock
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diagnosing import diagnosed
from ranks import wait_until

from nemo_patches.judging.kinds import ELSEWHERE, SILENT
from nemo_patches.judging.rank_groups import WAITING
from nemo_patches.tools.diagnose.live import is_called
from nemo_patches.watch import job_socket, log_line, report_file, torch_knows
from nemo_patches.watch.job_folder import (
    goes_with_the_job,
    job_name,
    private_folder,
)
from nemo_patches.watch.process_id import machine, own_process
from nemo_patches.watch.report_file import ReportFile
from nemo_patches.watch.torch_knows import (
    LONGEST,
    FlightRecording,
    out_of_memory_errors,
)

pytestmark = pytest.mark.one_nemo
NOW = 1.7e9
LIMIT_S = 20.0  # for what must come
BARRIER = {
    "where": "train (train.py:80)",
    "collective": "barrier",
    "caller": "save (train.py:77)",
}
READS = {"where": "read (data.py:41)", "collective": ""}


@pytest.fixture(autouse=True)
def _each_line_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread logs it, which a busy machine may begin late."""
    monkeypatch.setattr(log_line, "_WRITE_LIMIT_S", LIMIT_S)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "../my job")
    return tmp_path


def test_the_jobs_folder_is_its_owners_alone(temporary: Path) -> None:
    folder = private_folder(0)
    assert folder == temporary / f"nemo_patches-{os.getuid()}" / "___my_job"
    assert private_folder(0) == folder
    for each in (folder, folder.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700


def test_a_folder_that_somebody_else_has_put_there_is_refused(temporary: Path) -> None:
    mine = temporary / f"nemo_patches-{os.getuid()}"
    (temporary / "elsewhere").mkdir(mode=0o700)
    mine.symlink_to(temporary / "elsewhere")
    with pytest.raises(
        PermissionError, match="not a folder that this user alone may read; set TMPDIR"
    ):
        private_folder(0)
    mine.unlink()
    mine.mkdir()
    mine.chmod(0o777)
    with pytest.raises(PermissionError):
        private_folder(0)
    assert list((temporary / "elsewhere").iterdir()) == list(mine.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "a7", "SLURM_JOB_ID": "8"}, "a7"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "8"},
            "torchrun-77",
        ),  # torchrun's default
        ({"SLURM_JOB_ID": "8"}, "8"),
        ({}, "port-2950"),
    ],
)
def test_a_job_has_a_name_that_all_its_ranks_know(
    environment: dict[str, str], name: str
) -> None:
    assert job_name(environment, 2950, 77) == name


def test_two_jobs_of_one_run_id_have_folders_of_their_own() -> None:
    run = {"TORCHELASTIC_RUN_ID": "RUN", "MASTER_ADDR": "node-a", "RANK": "0"}
    name = job_name(run, 29400, 77)
    assert job_name({**run, "RANK": "1"}, 29400, 78) == name  # of another agent
    others = {
        job_name(run, 29401, 77),
        job_name({**run, "MASTER_ADDR": "node-b"}, 29400, 77),
        job_name({**run, "SLURM_STEP_ID": "1"}, 29400, 77),
    }
    assert len({name, *others}) == 4
    for one in (name, *others):
        assert re.fullmatch("RUN-[0-9a-f]{8}", one)
        assert is_called(Path("/tmp/nemo_patches-0", one), "RUN")
        assert not is_called(Path("/tmp/nemo_patches-0", one), "RU")


@pytest.mark.parametrize(("job", "goes"), [("4711", True), ("", False), ("471", False)])
def test_a_folder_with_slurms_job_in_its_path_goes_with_the_job(
    job: str, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    folder = Path("/scratch/job.4711/nemo_patches-0/4711")
    assert goes_with_the_job(folder) == goes


# The file.


def test_a_report_takes_the_place_of_the_one_before_and_the_folder_is_named_once(
    temporary: Path, said: list[str]
) -> None:
    reports = ReportFile(3, 0)
    for text in ("first", "second"):
        reports.write({"text": text}, is_first=True)  # of two stalls
        assert reports._writer is not None
        reports._writer.join(20)
    (file,) = private_folder(0).iterdir()
    assert (file.name, json.loads(file.read_text())["text"]) == (
        "stall_rank_3.json",
        "second",
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (line,) = said
    folder = file.parent
    assert line.endswith(
        f"this report is in {file}; `nemo-patches diagnose {folder}` reads those of all"
        " ranks on this host"
    )


def test_a_folder_that_cannot_be_written_is_said_once(
    temporary: Path, said: list[str]
) -> None:
    (temporary / f"nemo_patches-{os.getuid()}").touch()
    reports = ReportFile(3, 0)
    for _ in range(2):
        reports.write({}, is_first=True)
        assert reports._writer is not None
        reports._writer.join(20)
    (line,) = said
    assert (
        "the stall report is not written to a file:"
        f" {temporary}/nemo_patches-{os.getuid()}: it is not" in line
    )


def test_a_folder_that_does_not_answer_holds_nobody_up_and_is_said_once(
    temporary: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def folder(store_port: int) -> Path:
        assert answers.wait(20)
        return private_folder(store_port)

    monkeypatch.setattr(report_file, "private_folder", folder)
    reports = ReportFile(3, 0)
    for text in ("first", "second", "third"):
        reports.write({"text": text}, is_first=False)
    (line,) = said
    assert "not written to a file: the job's folder does not answer" in line
    answers.set()
    assert reports._writer is not None
    reports._writer.join(20)
    reports.write({"text": "fourth"}, is_first=False)
    wait_until(
        lambda: "fourth" in (private_folder(0) / "stall_rank_3.json").read_text()
    )


def test_what_torch_does_not_tell_in_time_is_said_in_the_report(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def dump(**_: bool) -> bytes:
        assert answers.wait(20)
        return b"{}"

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", dump)
    reports = ReportFile(3, 0)
    reports.write({"text": "first"}, is_first=False)
    wait_until(lambda: (private_folder(0) / "stall_rank_3.json").exists())
    answers.set()
    report = json.loads((private_folder(0) / "stall_rank_3.json").read_text())
    assert report == {
        "text": "first",
        "flight_recorder": {"error": "no answer within 1 s"},
    }


def test_of_many_collectives_the_report_has_the_latest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dump(**_: bool) -> bytes:
        return json.dumps(
            {
                "entries": [
                    {"record_id": number, "more": "x" * 400} for number in range(2000)
                ]
            }
        ).encode()

    monkeypatch.setattr(torch_knows, "_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", dump)
    content = FlightRecording().wait()
    assert content is not None
    assert content["entries"][-1]["record_id"] == 1999
    assert LONGEST / 3 < len(json.dumps(content)) <= LONGEST


def test_an_error_of_torchs_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def dump() -> bytes:  # with none of the parameters
        return b""

    monkeypatch.setattr(torch_knows, "_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", dump)
    content = FlightRecording().wait()
    assert content is not None
    assert "unexpected keyword argument" in content["error"]


class Cuda(ModuleType):
    """In place of torch.cuda, which has no GPU here: two of them, of which one has run out of
    memory.
    """

    def __init__(self, is_initialized: bool) -> None:
        super().__init__("torch.cuda")
        self._is_initialized = is_initialized

    def is_initialized(self) -> bool:
        return self._is_initialized

    def device_count(self) -> int:
        return 2

    def memory_stats(self, device: int) -> dict[str, int]:
        assert self._is_initialized
        return {"num_ooms": 3 * device, "num_alloc_retries": 7}


def test_out_of_memory_errors_are_read_once_a_stall_and_only_where_cuda_is_in_use(
    temporary: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert out_of_memory_errors() == {}  # torch's own, without a GPU
    monkeypatch.setitem(sys.modules, "torch.cuda", Cuda(False))
    assert out_of_memory_errors() == {}
    monkeypatch.setitem(sys.modules, "torch.cuda", Cuda(True))
    reports = ReportFile(3, 0)
    for is_first in (False, True, False, True):
        reports.write({"text": "hangs"}, is_first=is_first)
        assert reports._writer is not None
        reports._writer.join(20)
    (line,) = [line for line in said if "out-of-memory" in line]
    assert line.endswith(
        "caught out-of-memory errors, and may have left out a step: 3 on cuda:1"
    )
    report = json.loads((private_folder(0) / "stall_rank_3.json").read_text())
    assert (report["text"], report["out_of_memory"]) == ("hangs", {"cuda:1": 3})


class BlockedCuda(Cuda):
    """Its allocator's lock is held by a thread that waits for its GPU."""

    def __init__(self) -> None:
        super().__init__(True)
        self.go_on = threading.Event()

    def memory_stats(self, device: int) -> dict[str, int]:
        self.go_on.wait(60)
        return {}


def test_a_read_of_the_gpus_memory_that_blocks_holds_up_no_later_report(
    temporary: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = BlockedCuda()
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    monkeypatch.setattr(report_file, "_READ_LIMIT_S", 0.1)
    reports = ReportFile(3, 0)
    try:
        for number in range(3):
            reports.write({"text": f"report {number}"}, is_first=True)
            assert reports._writer is not None
            reports._writer.join(20)
        report = json.loads((private_folder(0) / "stall_rank_3.json").read_text())
        assert report["text"] == "report 2"
        assert not [line for line in said if "does not answer" in line]
    finally:
        cuda.go_on.set()


def test_memory_is_not_read_where_that_is_not_wanted(
    temporary: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", Cuda(True))
    reports = ReportFile(3, 0, lambda: False)
    reports.write({"text": "hangs"}, is_first=True)
    assert reports._writer is not None
    reports._writer.join(20)
    assert not [line for line in said if "out-of-memory" in line]


# What `diagnose FOLDER` makes of them.


def group(
    ranks: list[int], kind: str, place: dict[str, str], **more: Any
) -> dict[str, Any]:
    process = {"host": "node1", "pid": 4000 + ranks[0], "calls": 7}
    return {
        "ranks": ranks,
        "kind": kind,
        "idle": 60.0,
        "still": 55.0,
        **process,
        **place,
        **more,
    }


def write(
    folder: Path,
    rank: int,
    *groups: dict[str, Any],
    time: float = NOW,
    size: int = 3,
    **more: Any,
) -> Path:
    content = {
        "rank": rank,
        "world_size": size,
        "level": "WARNING",
        "time": time,
        "idle_s": 60.0,
        "remark": "",
        **more,
    }
    file = folder / f"stall_rank_{rank}.json"
    file.write_text(
        json.dumps(
            {**content, "text": f"rank {rank}'s line", "missing": [], "groups": groups}
        )
    )
    return file


def test_the_reports_of_all_ranks_name_the_missing_one_and_its_place(
    tmp_path: Path,
) -> None:
    for rank in range(3):
        write(
            tmp_path,
            rank,
            group([1], ELSEWHERE, READS),
            group([0, 2], WAITING, BARRIER),
            time=NOW + rank,
        )
    report = diagnosed(tmp_path)
    assert [(one.id, one.ranks) for one in report.findings] == [("missing-rank", (1,))]
    assert (
        report.verdict
        == "Rank 1: it is in read (data.py:41). It has not entered barrier of save"
        " (train.py:77), which ranks 0, 2 have waited in for 55 s."
    )
    assert any("rank 1's stall report" in line for line in report.findings[0].evidence)
    assert [one.rank for one in report.ranks] == [0, 1, 2]
    assert (report.world_size, report.exit_code, report.problems) == (3, 1, ())
    assert report.summary == ("rank 2's line",)


def test_a_rank_that_cannot_speak_is_known_by_the_others(tmp_path: Path) -> None:
    write(tmp_path, 0, group([1], SILENT, READS), group([0, 2], WAITING, BARRIER))
    report = diagnosed(tmp_path)
    assert [(one.id, one.ranks) for one in report.findings] == [("no-heartbeat", (1,))]


def test_what_a_rank_says_of_itself_outweighs_what_another_one_says_of_it(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1, group([1], ELSEWHERE, READS), group([0, 2], WAITING, BARRIER))
    elsewhere = {**READS, "where": "unpack (tar.py:7)"}
    write(
        tmp_path,
        0,
        group([1], ELSEWHERE, elsewhere),
        group([0, 2], WAITING, BARRIER),
        time=NOW + 1,
    )
    assert "it is in read (data.py:41)" in diagnosed(tmp_path).verdict


def test_where_a_rank_was_before_it_moved_is_not_put_beside_where_the_others_are(
    tmp_path: Path,
) -> None:
    """Rank 0 has made no report since it came to where all wait now."""
    write(
        tmp_path,
        0,
        group([2], ELSEWHERE, READS),
        group([0, 1], WAITING, BARRIER),
        time=NOW - 50,
    )
    later = {"where": "", "collective": "all_reduce", "caller": "validate (t.py:90)"}
    write(tmp_path, 1, group([0, 1, 2], WAITING, later))
    [found] = diagnosed(tmp_path).findings
    assert (found.id, found.ranks) == ("all-in", ())


def test_a_report_of_an_earlier_stall_tells_nothing_of_the_latest(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        1,
        group([0], ELSEWHERE, READS),
        group([1, 2], WAITING, BARRIER),
        time=NOW - 61,
    )
    for rank in (0, 2):
        write(
            tmp_path, rank, group([1], SILENT, READS), group([0, 2], WAITING, BARRIER)
        )
    report = diagnosed(tmp_path)
    assert [(one.id, one.ranks) for one in report.findings] == [("no-heartbeat", (1,))]
    assert report.earlier == (
        "stall_rank_1.json: the report of an earlier stall, not taken into account",
    )


@pytest.mark.parametrize("off_s", [-3 * 3600.0, 40.0, 3 * 3600.0])
def test_of_another_host_the_clock_decides_nothing(
    off_s: float, tmp_path: Path
) -> None:
    """The calls do: rank 2's own host has a report of this stall, and one of an earlier one."""
    groups = group([1], ELSEWHERE, READS), group([0, 2], WAITING, BARRIER)
    there = {"machine": "another", "pid": 4002, "started": 1}
    here = {"machine": "this one", "pid": 4000, "started": 1}
    write(tmp_path, 0, *groups, process=here)
    write(tmp_path, 2, *groups, time=NOW + off_s, process=there)
    report = diagnosed(tmp_path)
    assert (report.earlier, report.findings[0].ranks) == ((), (1,))
    earlier = [{**one, "calls": 5} for one in groups]
    write(tmp_path, 2, *earlier, time=NOW + off_s, process=there)
    report = diagnosed(tmp_path)
    assert "stall_rank_2.json: the report of an earlier stall" in report.earlier[0]
    assert report.findings[0].ranks == (1,)


@pytest.mark.parametrize(
    "content", [b"", b"[", b"{}", b"[" * 100_000, b'{"world_size": "many"}', b"\xff"]
)
def test_what_is_no_report_is_said(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, 0, group([1], SILENT, READS), group([0, 2], WAITING, BARRIER))
    (tmp_path / "stall_rank_1.json").write_bytes(content)
    report = diagnosed(tmp_path)
    assert report.findings[0].ranks == (1,)
    assert report.problems == (f"{tmp_path}/stall_rank_1.json: no stall report",)


def test_of_a_rank_in_a_container_the_pid_and_the_folder_are_said_to_be_there(
    temporary: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = machine().partition(" ")[0]
    monkeypatch.setattr(report_file, "machine", lambda: f"{boot} 4026539999")
    ReportFile(0, 0)._write({"process": own_process()}, is_first=True, says_where=True)
    told = ". That is in this rank's container, and so are the pids"
    assert told in capfd.readouterr().err
    monkeypatch.setattr(report_file, "machine", lambda: f"{boot} 4026531836")
    ReportFile(0, 0)._write({"process": own_process()}, is_first=True, says_where=True)
    assert told not in capfd.readouterr().err


def test_the_next_step_for_a_containers_pid_says_so(tmp_path: Path) -> None:
    """A report of a container that is not seen here, and one of another host."""
    groups = group([1], ELSEWHERE, READS), group([0, 2], WAITING, BARRIER)
    for namespace, told in (("4026539999", True), ("4026531836", False)):
        there = {"machine": f"b00t {namespace}", "pid": 4000, "started": 1}
        write(tmp_path, 0, *groups, process=there)
        step = diagnosed(tmp_path).findings[0].next_step
        assert (", in its container, with C frames" in step) == told, step
        assert "--pid 4001`" in step


# Whether it is so now.


def ended() -> dict[str, Any]:
    """A process of this machine that has gone, as its report tells of it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    own = own_process()
    return {**own, "pid": process.pid, "started": own["started"] + 1, "attempt": "0"}


def told(folder: Path, process: dict[str, Any], time: float) -> None:
    for rank in (0, 1):
        groups = (group([1], ELSEWHERE, READS), group([0], WAITING, BARRIER))
        write(folder, rank, *groups, time=time, size=2, process=process)


def test_a_report_is_no_present_hang_where_its_process_has_gone(tmp_path: Path) -> None:
    told(tmp_path, {**ended(), "attempt": "2"}, clock.time() - 720)
    report = diagnosed(tmp_path)
    assert report.verdict.startswith(
        "No present hang: the stall reports are of attempt 2, 12 min old, and their"
        " processes have ended. It was then: Rank 1: it is in read"
    )
    assert not report.next_step


def test_a_report_whose_pid_another_process_has_now_is_no_present_hang(
    tmp_path: Path,
) -> None:
    own = own_process()
    told(tmp_path, {**own, "started": own["started"] - 5}, clock.time() - 720)
    assert diagnosed(tmp_path).verdict.startswith("No present hang")


def test_reports_of_an_earlier_attempt_are_listed_while_a_later_one_runs(
    tmp_path: Path,
) -> None:
    """The later one has left its sockets, and no report."""
    began = clock.time()
    told(tmp_path, ended(), began - 3600)
    later = subprocess.Popen(["sleep", "600"])
    try:
        name = f"rank_0.{job_socket._here()}.{later.pid}.ask"
        (tmp_path / name).touch()
        report = diagnosed(tmp_path, over=False)
    finally:
        later.kill()
        later.wait()
    assert not any(one.ranks for one in report.findings), report.verdict
    assert "Rank 1" not in report.verdict
    assert len(report.earlier) == 2
    assert (
        "stall_rank_0.json: of attempt 0, 60 min old: its process has ended"
        in report.earlier[0]
    )


def test_on_another_machine_a_pid_means_nothing_and_the_age_is_said(
    tmp_path: Path,
) -> None:
    told(tmp_path, {**ended(), "machine": "another"}, clock.time() - 60)
    report = diagnosed(tmp_path)
    assert report.verdict.startswith("Rank 1: it is in read")
    assert "cannot be seen here" in report.summary[-1]


def test_a_report_of_a_process_that_runs_is_as_before(tmp_path: Path) -> None:
    assert machine()
    told(tmp_path, own_process(), clock.time() - 10)
    report = diagnosed(tmp_path)
    assert report.verdict.startswith("Rank 1: it is in read")
    assert report.summary[-1] == "The newest report is 10 s old."
