"""What somebody sees of `nemo-patches diagnose` in its first seconds, and what Ctrl-C and `head` do
to it.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from interpreters import environment, python, run
from rich.console import Console
from test_evidence import ELSEWHERE, SYNC, facts, report, still

from nemo_patches.tools import NEEDED
from nemo_patches.tools.diagnose import command, report_text
from nemo_patches.tools.diagnose import conditions as f
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.collect import gpus, samples
from nemo_patches.tools.diagnose.collect.host_jobs import (
    FORMAT,
    WHAT,
    HostFile,
    HostJob,
    SampledRank,
)
from nemo_patches.tools.diagnose.collect.host_ranks import HostRank
from nemo_patches.tools.diagnose.collect.samples import Frame, Sample, Thread
from nemo_patches.tools.diagnose.findings import Diagnosis, RankSummary
from nemo_patches.tools.diagnose.rank_facts import Condition, Motion, Place
from nemo_patches.tools.diagnose.verdicts import LOADER

pytestmark = [pytest.mark.one_nemo]

C10D = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
AUTOGRAD = "/v/lib/python3.11/site-packages/torch/autograd/graph.py"
LIMIT_S = 120.0
RANK = """
import sys, time
print("here", flush=True)
time.sleep(1000)
"""


def sampled(
    number: int,
    job: str,
    *frames: Frame,
    later: tuple[Frame, ...] = (),
    hook: bool = False,
) -> SampledRank:
    """A rank that was looked at twice, 40 s apart. hook: its frames are those of autograd's thread."""

    def look(at: float, stack: tuple[Frame, ...]) -> Sample:
        main = Thread("MainThread", 100 + number, frames=stack)
        threads = (main,)
        if hook:
            backward = (
                Frame("_engine_run_backward", AUTOGRAD, 768),
                Frame("main", "/job/train.py", 80),
            )
            threads = (replace(main, frames=backward), Thread("", 900, frames=stack))
        return Sample(100 + number, "S", uptime_s=at, slept_s=at, threads=threads)

    rank = HostRank(number, 100 + number, world_size=2, local_world_size=2, job=job)
    return SampledRank(rank, (look(100.0, frames), look(140.0, later or frames)))


WAITS = (Frame("all_reduce", C10D, 2501), Frame("main", "/job/train.py", 80))
GATHERS = (Frame("all_gather", C10D, 3000), Frame("main", "/job/train.py", 80))
READS = (Frame("read", "/job/data.py", 41), Frame("main", "/job/train.py", 80))
READS_ON = (Frame("parse", "/job/data.py", 50), Frame("main", "/job/train.py", 81))


def host_file(folder: Path, *ranks: SampledRank) -> Path:
    names = dict.fromkeys(one.rank.job for one in ranks)
    jobs = tuple(
        HostJob("node1", 1e9, tuple(one for one in ranks if one.rank.job == name))
        for name in names
    )
    file = folder / "node1.json"
    file.write_text(HostFile(WHAT, FORMAT, jobs).as_json())
    return file


def test_of_two_jobs_in_a_folder_each_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first goes on, the second hangs: exit code 0 would be the first's alone."""
    goes_on = [sampled(rank, "a:1", *READS, later=READS_ON) for rank in (0, 1)]
    hangs = [sampled(0, "b:1", *WAITS), sampled(1, "b:1", *READS)]
    host_file(tmp_path, *goes_on, *hangs)
    assert command.run([tmp_path], json=False) == 1
    told = capsys.readouterr().out
    assert (
        "No rank is stuck" in told
        and "Rank 1: it is in read (data.py:41)" in told.partition("--- job b:1")[2]
    )
    assert command.run([tmp_path], json=True) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_collectives_in_autograds_thread_are_the_ranks(tmp_path: Path) -> None:
    """Of a rank whose thread moves from one hook to the next, too: its main thread is in backward
    all the time.
    """
    apart = command_report(
        host_file(
            tmp_path,
            sampled(0, "", *WAITS, hook=True),
            sampled(1, "", *GATHERS, hook=True),
        )
    )
    assert (apart.findings[0].id, apart.findings[0].ranks) == (ids.OUT_OF_STEP, ())
    reads = command_report(
        host_file(
            tmp_path,
            sampled(0, "", *WAITS, hook=True),
            sampled(1, "", *READS, hook=True),
        )
    )
    assert (reads.findings[0].id, reads.findings[0].ranks) == (ids.MISSING_RANK, (1,))
    on = sampled(1, "", *WAITS, later=GATHERS, hook=True)
    moves = command_report(host_file(tmp_path, sampled(0, "", *WAITS, hook=True), on))
    assert moves.exit_code == 0, moves


def command_report(file: Path) -> Diagnosis:
    from diagnosing import diagnose_logs

    return diagnose_logs([file])


def test_on_the_culprits_host_alone_it_says_what_it_saw() -> None:
    found = report(still(1, ELSEWHERE))
    assert (
        "Rank 1 is in no collective" in found.verdict
        and "not moved for 60 s" in found.verdict
    )
    assert "ranks 0, 2 were not seen" in found.verdict


def test_nobody_in_a_collective_is_looked_at_until_it_is_a_hang() -> None:
    young = facts(0, Condition(f.RUNS), ELSEWHERE, Motion(False, still_s=3.0))
    found = report(
        young,
        facts(1, Condition(f.RUNS), ELSEWHERE, Motion(False, still_s=4.0)),
        facts(2, Condition(f.RUNS), ELSEWHERE, Motion(False, still_s=5.0)),
    )
    assert found.verdict.startswith("So far no hang: ranks 0-2 are in no collective"), (
        found
    )


def test_a_collective_in_forked_loader_workers_is_told_with_what_to_do() -> None:
    place = replace(
        ELSEWHERE,
        activity=LOADER,
        worker="its worker (pid 7) is in all_reduce (distributed_c10d.py:3252)",
    )
    found = report(*(still(rank, place) for rank in range(3)))
    assert (found.findings[0].id, found.findings[0].ranks) == (ids.NO_RANK_MOVES, ())
    assert (
        "each waits for its data loader: its worker (pid 7) is in all_reduce"
        in found.verdict
    )
    assert found.next_step.startswith("Take the collective out of")


def test_one_of_those_that_wait_alike_is_not_accused_for_having_waited_longer() -> None:
    """Ranks poll their loader's workers, each at another moment."""
    alike = [
        facts(rank, Condition(f.RUNS), ELSEWHERE, Motion(False, still_s=seconds))
        for rank, seconds in ((0, 33.0), (1, 4.0), (2, 33.0))
    ]
    found = report(*alike)
    assert (
        found.verdict.startswith("So far no hang: ranks 0-2 are in no collective")
        and not found.findings
    ), found


def test_a_start_up_that_hangs_is_no_skipped_backward() -> None:
    def starting(line: int) -> Place:
        way = ("main (train.py:9)", f"rendezvous (rendezvous.py:{line})")
        return Place("rendezvous", "init_process_group", way=way)

    lost = facts(
        1,
        Condition(f.UNRESOLVED, "node0: -3"),
        Condition(f.RUNS),
        starting(7),
        Motion(False, still_s=60.0),
    )
    found = report(still(0, starting(5)), lost, still(2, starting(5)))
    assert (found.findings[0].id, found.findings[0].ranks) == (ids.START_UP, ())
    assert "rank 1 cannot resolve the address" in found.verdict


def test_an_unreadable_rank_that_others_report_missing_is_named() -> None:
    """As in a container without py-spy: the stall line in its log has the answer."""
    from nemo_patches.tools.diagnose.rank_facts import Fact

    unreadable = [
        one
        for rank in range(3)
        for one in facts(rank, Condition(f.UNREADABLE, "py-spy is not installed"))
    ]
    waits = [Fact(rank, SYNC, "train.log:9", own=False) for rank in (0, 2)]
    found = report(unreadable, waits, [Fact(1, ELSEWHERE, "train.log:9", own=False)])
    assert (found.findings[0].id, found.findings[0].ranks) == (
        ids.MISSING_RANK,
        (1,),
    ), found


def test_the_first_line_says_who_and_why_and_the_second_what_follows() -> None:
    found = report(
        still(0, SYNC), still(1, replace(ELSEWHERE, where="read (a.b.py:4)")), world=2
    )
    out = StringIO()
    report_text.show(found, Console(file=out, width=80))
    first, second, *_ = out.getvalue().splitlines()
    assert first == "Rank 1: it is in read (a.b.py:4)."
    assert second.startswith("It has not entered all_reduce of the length sync (")


def test_the_table_fits_a_terminal() -> None:
    ranks = tuple(
        RankSummary(
            rank,
            f"gpu-node-{rank}.cluster",
            1_000_000,
            71_000,
            "in call 71000: length sync",
            3.0,
            99.5,
            0.12,
        )
        for rank in (0, 1)
    )
    out = StringIO()
    shown = Diagnosis("", 2, "Rank 1 is late.", "", (), ranks, (), ())
    report_text.show(shown, Console(file=out, width=80))
    table = [
        line
        for line in out.getvalue().splitlines()
        if "1000000" in line or line.startswith("rank")
    ]
    assert table and all(len(line) <= 80 for line in table)
    assert all(word in table[1] for word in ("71000", "99.5", "120.0", "3.0"))


def start(folder: Path, **variables: str) -> subprocess.Popen[str]:
    """A process that a launcher has started as a rank, by its variables."""
    program = folder / "rank.py"
    program.write_text(RANK)
    ranked = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "n",
        "MASTER_PORT": "1",
    }
    started = subprocess.Popen(
        [sys.executable, str(program)],
        env=environment(**{**ranked, **variables}),
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "here\n"
    return started


@pytest.mark.skipif(not samples.py_spy(), reason="py-spy is not installed")
def test_ctrl_c_judges_what_was_seen_and_a_terminal_shows_what_it_waits_for(
    tmp_path: Path,
) -> None:
    rank = start(tmp_path)
    master, slave = pty.openpty()
    looking = subprocess.Popen(
        [sys.executable, "-m", "nemo_patches", "diagnose", "--pids", str(rank.pid)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        start_new_session=True,
    )
    try:
        os.close(slave)
        told = ""
        deadline = time.monotonic() + LIMIT_S
        while "s old; looking until 30 s (Ctrl-C: judge now)" not in told:
            assert time.monotonic() < deadline and looking.poll() is None, told
            if select.select([master], [], [], 1.0)[0]:
                told += os.read(master, 4096).decode()
        assert "1 rank found" in told
        looking.send_signal(signal.SIGINT)
        out, _ = looking.communicate(timeout=LIMIT_S)
        assert "rank 0 is in no collective" in out and looking.returncode in (
            0,
            1,
            2,
        ), out
    finally:
        looking.kill()
        looking.wait()
        rank.kill()
        rank.communicate()
        os.close(master)


def test_long_reading_says_how_much_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal only."""
    (tmp_path / "train.log").write_text(
        "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: bad\n"
    )
    monkeypatch.setattr(command, "_LONG_BYTES", 50)

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    for stream, said in (
        (Terminal(), "reading 0 MB in 1 file ...\n"),
        (StringIO(), ""),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        assert command.run([tmp_path], json=True) == 1
        assert stream.getvalue() == said


def test_stacks_that_could_read_nothing_say_so_by_the_exit_code(tmp_path: Path) -> None:
    """No py-spy: nothing but the kernel's facts."""
    rank = start(tmp_path)
    code = (
        "from nemo_patches.tools.diagnose.collect import samples; samples.py_spy ="
        " lambda: ''; import sys;from nemo_patches.tools.diagnose import"
        " stacks_command as s; s.is_told = lambda *_: True;sys.exit(s.run(True,"
        f" '{rank.pid}', None))"
    )
    try:
        done = python("-c", code)
    finally:
        rank.kill()
        rank.communicate()
    assert done.returncode == 2 and "no stack could be read" in done.stderr, done


@pytest.mark.parametrize(
    "arguments", [["diagnose", "--json", "train.log"], ["doctor", "--help"]]
)
def test_a_reader_that_has_read_enough_is_no_error(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.log").write_text(
        "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: bad\n"
    )
    nemo_patches = f"{sys.executable} -m nemo_patches {' '.join(arguments)}"
    # The pipe's other end is closed before anything is written.
    done = run(
        [
            "bash",
            "-c",
            f"exec 3> >(exec true); sleep 0.3; {nemo_patches} >&3; echo code $? >&2",
        ],
        environment(),
        LIMIT_S,
        tmp_path,
    )
    assert done.stderr == "code 141\n", done


NVIDIA_SMI = """\
#!/bin/sh
case "$1" in
    *compute-apps*) echo "101, GPU-b"; echo "100, GPU-a"; echo "7, GPU-a";;
    *) echo "GPU-a, 100, 40960, 81559"; echo "GPU-b, 0, 81500, 81559"; echo "damaged";;
esac
"""


def test_each_ranks_gpu_is_told_where_nvidia_smi_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the program; of the real one, on an H100, the lines were the same."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    ranks = [HostRank(rank, 100 + rank, 3, 3) for rank in range(3)]
    assert gpus.of_ranks(ranks) == [
        "GPU of rank 0: 100 % busy, 40960 of 81559 MiB used.",
        "GPU of rank 1: 0 % busy, 81500 of 81559 MiB used.",
    ]
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    began = time.monotonic()
    assert gpus.of_ranks(ranks) == []
    assert time.monotonic() - began < 30


WITHOUT = """
import sys

class Without:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Without())
sys.argv = ["nemo-patches", *{arguments!r}]
from nemo_patches.__main__ import main
main()
"""


def without(missing: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-c", WITHOUT.format(missing=missing, arguments=arguments))


def test_without_its_packages_it_does_what_needs_none_and_names_what_is_missing(
    tmp_path: Path,
) -> None:
    packages = ["typer", "rich", "msgspec", "omegaconf"]
    assert without(packages, "--version").stdout.startswith("nemo-patches ")
    assert (
        without(packages, "run", "--", sys.executable, "-c", "print(4711)").stdout
        == "4711\n"
    )
    done = without(packages, "stacks", "--json", "--pids", "999999999")
    assert done.returncode == 2 and "999999999" in done.stderr
    done = without(packages, "diagnose")
    assert (
        done.returncode == 2
        and "typer is not installed" in done.stderr
        and NEEDED in done.stderr
    )
    job = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    code = WITHOUT.format(missing=["torch"], arguments=("doctor", "--ranks"))
    done = run([sys.executable, "-c", code], environment(**job), LIMIT_S)
    assert (
        done.returncode == 2
        and "`pip install torch`" in done.stderr
        and "typer" not in done.stderr
    ), done
