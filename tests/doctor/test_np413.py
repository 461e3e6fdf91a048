"""NP413: messages between two ranks; classes_hang.txt and classes_fine.txt have more of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import found

from nemo_patches.tools.doctor.finding import WARNING

pytestmark = pytest.mark.one_nemo

CODE = """\
def share(x):
    rank = dist.get_rank()
    if rank == 0:
        dist.send(x, {to})
    elif rank == 1:
        dist.recv(x, {source})
"""


def test_both_ends_are_named(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP413", CODE.format(to=2, source=0))
    assert finding.severity is WARNING
    assert (
        finding.what
        == "share: dist.send: rank 0 sends to rank 2, which receives nothing here"
    )
    assert finding.line == 11


@pytest.mark.parametrize("source", ["0", "None", "rank - 1", "sources[rank]"])
def test_a_recv_that_may_be_its_end(tmp_path: Path, source: str) -> None:
    assert found(tmp_path, "NP413", CODE.format(to=1, source=source)) == []


def test_a_number_of_messages(tmp_path: Path) -> None:
    twice = CODE.replace(
        "        dist.send", "        dist.send(x, 1)\n        dist.send"
    )
    (finding,) = found(tmp_path, "NP413", twice.format(to=1, source=0))
    assert "rank 0 sends to rank 1 2 times, which receives 1 here" in finding.what
    in_turns = twice.replace("    elif rank == 1:", "    while rank == 1:")
    assert found(tmp_path, "NP413", in_turns.format(to=1, source=0)) == []
