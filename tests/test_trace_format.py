"""The number of the trace's format guards what another `diagnose` reads."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path

import pytest
from diagnosing import report_of
from simulated_job import Exit, Killed, steps
from simulated_traces import write

from nemo_patches.tools.diagnose.findings import CRITICAL
from nemo_patches.tracing import records

pytestmark = pytest.mark.one_nemo

# What a trace of format 2 must have. A field that is added has a default.
FORMAT_2 = {
    "header": (
        "format: int; rank: int; world_size: int; host: str; pid: int; started: float;"
        " restart: int; versions: dict[str, str]; settings: dict[str, str]; checks:"
        " list[str]"
    ),
    "enter": (
        "t: float; e: str; n: int; training: bool; shape: list[int]; dtype: str;"
        " device: str"
    ),
    "sync": (
        "t: float; e: str; n: int; outcome: str; round: int; waited: float; local: int;"
        " result: int"
    ),
    "grow": "t: float; e: str; n: int; old: int; new: int",
    "leave": "t: float; e: str; n: int; shape: list[int]",
    "raised": "t: float; e: str; n: int; type: str; message: str; traceback: str",
    "stalled": (
        "t: float; e: str; n: int; ranks: list[int]; kinds: list[str]; where: list[str]"
    ),
    "end": "t: float",
}


def test_what_another_one_could_not_read_has_another_number() -> None:
    """A field that goes or changes, one that a record cannot be without, a new kind of record:
    raise FORMAT.
    """
    missing = dataclasses.MISSING
    found = {
        kind.k: "; ".join(
            f"{field.name}: {field.type}"
            for field in dataclasses.fields(kind)
            if field.default is missing and field.default_factory is missing
        )
        for kind in typing.get_args(records.Record)
    }
    assert (records.FORMAT, found) == (2, FORMAT_2)


def of_format(number: int, file: Path) -> None:
    """Its header is another one but for its kind and its format's number; so are its records."""
    header = {"k": "header", "format": number, "who": {"rank": [2]}}
    lines = [header, {"k": "began", "at": "1 s"}]
    file.write_text(
        "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    )


@pytest.mark.parametrize("number", [records.FORMAT - 1, records.FORMAT + 1])
def test_another_format_is_refused_in_a_line_and_its_rank_is_accused_of_nothing(
    number: int, tmp_path: Path
) -> None:
    write(
        tmp_path, [[*steps(20), Killed() if rank == 2 else Exit()] for rank in range(4)]
    )
    (of_rank_2,) = tmp_path.glob("rank-00002.*")
    said = f": format {number}; this nemo_patches reads {records.FORMAT}"
    of_format(number, of_rank_2)
    report = report_of(tmp_path)
    assert of_rank_2.name + said in report.problems
    assert not [
        one for one in report.findings if one.severity == CRITICAL and 2 in one.ranks
    ]

    for file in tmp_path.iterdir():
        of_format(number, file)
    report = report_of(tmp_path)
    assert report.exit_code == 2
    assert [line.endswith(said) for line in report.problems] == [True] * 4
