"""Answers of NCCL's RAS, in its words (2.24 to 2.28): who is behind, dead or silent, and who is only ahead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import interpreters
import pytest
from typer.testing import CliRunner

from nemo_patches.cli import app
from nemo_patches.text import safe
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.facts import Evidence
from nemo_patches.tools.diagnose.findings import Diagnosis
from nemo_patches.tools.diagnose.folder import UnreadableError
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.sources import nccl_ras

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

HEAD = """NCCL version 2.26.2 compiled with CUDA 12.6

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {state}
{more}
"""
# As the user guide of 2.24 shows it, and issue 1911 of NVIDIA/nccl.
FINE = HEAD.format(state="OK", more="    1         8         4         1         4        32   RUNNING      OK")
SIX_BEHIND = (
    HEAD.format(state="MISMATCH", more="")
    + """Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  30 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 7 -- GPU 7 managed by process 483079 on node 172.16.64.210
"""
)
ONE_BEHIND = (
    SIX_BEHIND.partition("  30 ranks")[0]
    + """  31 ranks have launched up to operation 64
  Rank 7 has launched up to operation 60 -- GPU 3 managed by process 1650386 on node node1
"""
)
TWO_AHEAD = (
    SIX_BEHIND.partition("  30 ranks")[0].replace("collective", "AllGather")
    + """  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124
  Rank 13 -- GPU 5 managed by process 323033 on node 10.137.190.124
"""
)
OUT_OF_STEP = (
    ONE_BEHIND.replace("collective", "AllGather")
    + """  Communicator ranks have different AllReduce operation counts
  31 ranks have launched up to operation 100
  Rank 7 has launched up to operation 101 -- GPU 3 managed by process 1650386 on node node1
"""
)
SILENT = (
    HEAD.format(state="INCOMPLETE", more="")
    + """Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""
)
IS_DEAD = SILENT.replace(
    "INCOMPLETE\n  Missing communicator data from 1 job process",
    """DEAD
  1 job process is considered dead (unreachable via the RAS network)""",
)


def saved(file: Path) -> Diagnosis:
    evidence = Evidence()
    nccl_ras.read([file], evidence)
    return judge(evidence)


def ask(given: str) -> Diagnosis:
    evidence = Evidence()
    nccl_ras.ask(given, evidence, lambda _: None)
    return judge(evidence)


@contextmanager
def answering(*answers: str) -> Iterator[int]:
    """A server as RAS is one: a line in, an answer, and the connection's end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                client, _ = server.accept()
                with client:
                    assert client.recv(100) == b"verbose status\n"
                    client.sendall(answer.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


@pytest.mark.parametrize(
    ("answers", "finding", "ranks", "said"),
    [
        ([FINE], "", (), "RUNNING OK"),
        ([SIX_BEHIND, FINE], "", (), "RUNNING OK"),
        (
            [SIX_BEHIND, SIX_BEHIND],
            ids.MISSING_RANK,
            (0, 7),
            "on 172.16.64.210, with C frames: `py-spy dump --native --pid 483072`",
        ),
        ([ONE_BEHIND, ONE_BEHIND], ids.MISSING_RANK, (7,), "number 64 of group communicator #0-0"),
        ([SIX_BEHIND, ONE_BEHIND], ids.NOT_ENOUGH, (), "In a job that runs such a difference passes"),
        ([TWO_AHEAD, TWO_AHEAD], ids.OUT_OF_STEP, (), "Those with the larger number wait"),
        ([OUT_OF_STEP, OUT_OF_STEP], ids.OUT_OF_STEP, (), "they are in different collectives"),
        ([SILENT], ids.SILENT, (21,), "rank 21 of communicator #0"),
        ([IS_DEAD], ids.KILLED, (21,), "Process 3487984 on node 172.16.64.213 managing GPU 5"),
    ],
)
def test_each_answer_has_its_verdict(
    answers: list[str], finding: str, ranks: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "ras.txt").write_text("".join(answers))
    with answering(*answers) as port:
        asked = ask(f"127.0.0.1:{port}")
    for report in (asked, saved(tmp_path / "ras.txt")):
        assert [(one.id, one.ranks) for one in report.findings][:1] == ([(finding, ranks)] if finding else [])
        assert said in f"{report.verdict} {report.next_step} {report.summary} {report.findings}"


def test_one_look_at_different_counts_accuses_nobody(tmp_path: Path) -> None:
    for answer in (SIX_BEHIND, ONE_BEHIND, TWO_AHEAD):
        (tmp_path / "ras.txt").write_text(answer)
        assert [one.ranks for one in saved(tmp_path / "ras.txt").findings] == [()]


def test_a_smaller_communicators_ranks_are_not_the_jobs(tmp_path: Path) -> None:
    of_eight = "    1         4         1         8         8        32   RUNNING  INCOMPLETE"
    (tmp_path / "ras.txt").write_text(
        SILENT.replace("    0         1 ", of_eight + "\n    0         1 ").replace("#0-0", "#1-2")
    )
    (first,) = saved(tmp_path / "ras.txt").findings
    assert (first.id, first.ranks) == (ids.SILENT, ())


# Of issue 1762 of NVIDIA/nccl (2.27.3): 10 GPUs, communicators of 2, and data of communicators that are gone.
OF_TWO = """
Job summary
===========

  Nodes  Processes         GPUs
          per node  per process
      1          8            1
      1          2            1

  Nodes  Processes         GPUs
(total)    (total)      (total)
      2         10           10

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         1         2         1   RUNNING  INCOMPLETE
    1         4         1         1         2         1   RUNNING  MISMATCH
    2         4         0         0         0         0    NOCOMM  INCOMPLETE,MISMATCH

Errors
======

#0-0 (b3398875b8b2a063) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 1 -- GPU 0 managed by process 60004 on node 10.4.109.13

#2-0 (93d7000200000001) INCOMPLETE
  Missing communicator data from 255 ranks
  Rank 1057455228 -- GPU 0 managed by process 60004 on node 10.4.109.13
"""


def test_the_largest_communicator_need_not_be_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_bytes(OF_TWO.replace("\n", "\r\n").encode())
    report = saved(tmp_path / "ras.txt")
    assert [(one.id, one.ranks) for one in report.findings] == [(ids.SILENT, ())]
    assert "rank 1 of communicator #0-0" in report.verdict and report.world_size == 10


@pytest.mark.parametrize(
    "text", ["", "HTTP/1.1 400 Bad Request\n", HEAD[:90], FINE.replace("RUNNING", "?"), "\x00" * 50]
)
def test_what_is_not_its_text_is_said_with_what_was_looked_for(text: str) -> None:
    with answering(text) as port, pytest.raises(UnreadableError, match="looked for RAS's lines 'Job summary'"):
        ask(f"127.0.0.1:{port}")


def test_what_it_reports_in_unknown_words_is_no_good_run(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(HEAD.format(state="STRANGE", more=""))
    with pytest.raises(UnreadableError, match="RUNNING STRANGE, in words that are not known here"):
        ask(str(tmp_path / "ras.txt"))


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(SIX_BEHIND * 2)
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path / "ras.txt")])
    assert done.exit_code == 1 and "ranks 0, 7 have not entered" in done.stdout.lower()
    assert "waited, s" not in done.stdout  # a table of ranks, of which it has none
    with answering(FINE) as port:
        assert CliRunner().invoke(app, ["diagnose", "--ras", f"127.0.0.1:{port}"]).exit_code == 0
    for arguments in (["--ras", "h:x"], ["--ras", "127.0.0.1:1"], ["--ras", "a", "--job", "b:1"]):
        assert CliRunner().invoke(app, ["diagnose", *arguments]).exit_code == 2


WRONG = {  # how --ras is given: what its file holds (None: there is none), and what is said
    "missing": (None, "No such file or directory"),
    "empty": (b"", "no table of communicators in it"),
    "binary": (bytes(range(256)) * 9, "no table of communicators in it"),
    "json": (b'{"entries": [1]}', "no table of communicators in it"),
    "half": (HEAD[:90].encode(), "no table of communicators in it"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_for_ras_that_is_none_of_its_is_said_with_what_is_allowed(name: str, tmp_path: Path) -> None:
    content, said = WRONG[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    _refuses("--ras", str(tmp_path / name), said, "HOST or HOST:PORT", "file with what ncclras has printed")


def test_a_folder_a_pipe_and_a_closed_file_for_ras_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuses("--ras", str(tmp_path), "Is a directory", "HOST or HOST:PORT")
    monkeypatch.setattr(nccl_ras, "_LIMIT", timedelta(seconds=0.2))  # nobody ever writes into it
    os.mkfifo(tmp_path / "pipe")
    _refuses("--ras", str(tmp_path / "pipe"), "no table of communicators in it")
    (tmp_path / "closed").write_text(SIX_BEHIND)
    (tmp_path / "closed").chmod(0)
    command = [sys.executable, "-m", "nemo_patches", "diagnose", "--ras", tmp_path / "closed"]
    done = interpreters.run(interpreters.as_ordinary_user(command), interpreters.environment())
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "Permission denied" in done.stderr


NO_HOSTS = ["./a", "a..b", "a" * 64, "\udcff", "h:0", "h:65536", "h:" + "9" * 5000, "h:-1"]


@pytest.mark.parametrize("host", NO_HOSTS)
def test_what_cannot_be_a_host_is_refused(host: str) -> None:
    _refuses("--ras", host, "")


def _refuses(option: str, value: str, *said: str) -> None:
    done = CliRunner().invoke(app, ["diagnose", option, value])
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2, done.output
    assert f"{option}={safe(value, 100)}" in done.stderr and done.stderr.count("\n") == 1
    for text in said:
        assert text in done.stderr


def test_ras_reads_a_file_and_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(SIX_BEHIND * 2)
    for given in (str(tmp_path / "ras.txt"), "/dev/stdin"):
        command = [sys.executable, "-m", "nemo_patches", "diagnose", "--ras", given]
        done = subprocess.run(command, input=SIX_BEHIND * 2, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1 and "ranks 0, 7 have not entered" in done.stdout.lower(), done.stderr


def test_numbers_that_no_answer_has_end_nothing(tmp_path: Path) -> None:
    number = "9" * 5000
    for text, old in ((SIX_BEHIND * 2, "Rank 0"), (SIX_BEHIND * 2, "operation 6650"), (FINE, "       32\n\nComm")):
        odd = text.replace(old, old.replace(old.split()[-1] if "Comm" not in old else "32", number))
        assert odd != text
        (tmp_path / "ras.txt").write_text(odd)
        saved(tmp_path / "ras.txt")
