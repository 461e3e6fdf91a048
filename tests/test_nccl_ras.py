"""Answers of NCCL's RAS, in its words (2.24 to 2.28): who is behind, dead or silent, and who is only ahead."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_patches.cli import app
from nemo_patches.tools.diagnose import nccl_ras
from nemo_patches.tools.diagnose.folder import UnreadableError

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
        ([SIX_BEHIND, SIX_BEHIND], nccl_ras.BEHIND, (0, 7), "process 483072 on node 172.16.64.210"),
        ([ONE_BEHIND, ONE_BEHIND], nccl_ras.BEHIND, (7,), "launched up to collective operation 60, 31 ranks, which"),
        ([SIX_BEHIND, ONE_BEHIND], nccl_ras.DIFFERENT_COUNTS, (), "In a job that runs such a difference passes"),
        ([TWO_AHEAD, TWO_AHEAD], nccl_ras.DIFFERENT_COUNTS, (), "Those with the larger number wait"),
        ([OUT_OF_STEP, OUT_OF_STEP], nccl_ras.DIFFERENT_COUNTS, (), "they are in different collectives"),
        ([SILENT], nccl_ras.NO_DATA, (21,), "rank 21 of communicator #0"),
        ([IS_DEAD], nccl_ras.DEAD, (), "Process 3487984 on node 172.16.64.213 managing GPU 5"),
    ],
)
def test_each_answer_has_its_verdict(
    answers: list[str], finding: str, ranks: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "ras.txt").write_text("".join(answers))
    with answering(*answers) as port:
        asked = nccl_ras.ask(f"127.0.0.1:{port}", lambda _: None)
    for report in (asked, nccl_ras.diagnose_saved(tmp_path / "ras.txt")):
        assert [(one.id, one.ranks) for one in report.findings][:1] == ([(finding, ranks)] if finding else [])
        assert said in report.verdict


def test_one_look_at_different_counts_accuses_nobody(tmp_path: Path) -> None:
    for answer in (SIX_BEHIND, ONE_BEHIND, TWO_AHEAD):
        (tmp_path / "ras.txt").write_text(answer)
        assert [one.ranks for one in nccl_ras.diagnose_saved(tmp_path / "ras.txt").findings] == [()]


def test_a_smaller_communicators_ranks_are_not_the_jobs(tmp_path: Path) -> None:
    of_eight = "    1         4         1         8         8        32   RUNNING  INCOMPLETE"
    (tmp_path / "ras.txt").write_text(
        SILENT.replace("    0         1 ", of_eight + "\n    0         1 ").replace("#0-0", "#1-2")
    )
    (first,) = nccl_ras.diagnose_saved(tmp_path / "ras.txt").findings
    assert (first.id, first.ranks) == (nccl_ras.NO_DATA, ())


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
    report = nccl_ras.diagnose_saved(tmp_path / "ras.txt")
    assert [(one.id, one.ranks) for one in report.findings] == [(nccl_ras.NO_DATA, ())]
    assert "rank 1 of communicator #0-0" in report.verdict and report.world_size == 10


@pytest.mark.parametrize(
    "text", ["", "HTTP/1.1 400 Bad Request\n", HEAD[:90], FINE.replace("RUNNING", "?"), "\x00" * 50]
)
def test_what_is_not_its_text_is_said_with_what_was_looked_for(text: str) -> None:
    with answering(text) as port, pytest.raises(UnreadableError, match="looked for RAS's lines 'Job summary'"):
        nccl_ras.ask(f"127.0.0.1:{port}")


def test_what_it_reports_in_unknown_words_is_no_good_run(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(HEAD.format(state="STRANGE", more=""))
    with pytest.raises(UnreadableError, match="RUNNING STRANGE, in words that are not known here"):
        nccl_ras.diagnose_saved(tmp_path / "ras.txt")


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(SIX_BEHIND * 2)
    done = CliRunner().invoke(app, ["diagnose", str(tmp_path / "ras.txt")])
    assert done.exit_code == 1 and "ranks 0, 7 of communicator #0" in done.stdout.lower()
    assert "waited, s" not in done.stdout  # a table of ranks, of which it has none
    with answering(FINE) as port:
        assert CliRunner().invoke(app, ["diagnose", "--ras", f"127.0.0.1:{port}"]).exit_code == 0
    for arguments in (["--ras", "h:x"], ["--ras", "127.0.0.1:1"], ["--ras", "a", "--job", "b:1"]):
        assert CliRunner().invoke(app, ["diagnose", *arguments]).exit_code == 2
