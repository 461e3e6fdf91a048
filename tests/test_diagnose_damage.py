"""Damaged traces: the diagnosis never crashes, and never blames a rank that did nothing.

It rather knows less. What damage may change, and what not:

- A file that ends early at the end of a line is the file of a rank that was killed there: nothing
  tells them apart, but for a round that came on another rank, to which this one must have come. So
  such a rank, and no other, may be blamed.
- Whatever else happens to a file (lines lost from its middle, bytes changed, another file's lines
  in it, half a line at its end, or the file gone) may take a verdict away, and put "not enough
  records" or "no trace of rank N" in its place. It blames nobody else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_job import Call, Event, Exit, Gradients, Killed, evaluation, steps
from simulated_traces import Setup, file_name, header, write

from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.diagnosis import diagnose
from nemo_patches.tools.diagnose.findings import CRITICAL, Diagnosis
from nemo_patches.tools.diagnose.folder import Folder, UnreadableError
from nemo_patches.tracing import records

pytestmark = pytest.mark.one_nemo

OUT: list[Event] = [Exit()]
RANKS = 4
Files = dict[str, bytes]


def three(
    common: list[Event], odd: list[Event], usual: list[Event]
) -> list[list[Event]]:
    return [common + (odd if rank == 2 else usual) for rank in range(RANKS)]


@dataclass(frozen=True)
class Truth:
    """A job, and what is wrong with it; nothing where finding is empty."""

    schedules: list[list[Event]]
    finding: str
    ranks: tuple[int, ...]


ALL = tuple(range(RANKS))
TRUTHS = {
    "healthy": Truth([steps(12) + evaluation(4) + steps(6) + OUT] * RANKS, "", ()),
    "stuck before": Truth(three(steps(20), [], steps(1)), ids.MISSING_RANK, (2,)),
    "killed": Truth(three(steps(20), [Killed()], steps(2)), ids.KILLED, (2,)),
    "ended": Truth(three(steps(20), OUT, steps(2)), ids.ENDED, (2,)),
    "one inside": Truth(
        three(steps(20), [Call(stuck="layers")], steps(1)), ids.SOME_INSIDE, (2,)
    ),
    "all inside": Truth(
        [[*steps(20), Call(stuck="layers")]] * RANKS, ids.ALL_INSIDE, ALL
    ),
    "all out": Truth(
        [[*steps(20), Call(), Gradients()][:-1]] * RANKS, ids.OUTSIDE, ALL
    ),
    "exception": Truth(
        three(steps(20), [Call(raises="ValueError"), *OUT], steps(2)),
        ids.EXCEPTION,
        (2,),
    ),
    "uneven": Truth(
        [
            steps(9) + evaluation(5 + (rank == 2)) + steps(9) + OUT
            for rank in range(RANKS)
        ],
        ids.UNEVEN_CALLS,
        (2,),
    ),
}
KNOWS_LESS = {ids.NOT_ENOUGH, ids.UNTRACED, ids.MISSING_RANK}


@functools.cache
def files(name: str) -> Files:
    """A job's files, undamaged."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), TRUTHS[name].schedules)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def report_on(content: Files) -> Diagnosis | None:
    """None where there is nothing left to read."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in content.items():
            Path(folder, name).write_bytes(data)
        try:
            return diagnose(Folder(Path(folder)).read())
        except UnreadableError:
            return None


def check(truth: Truth, content: Files, early: frozenset[int] = frozenset()) -> None:
    """Whatever is said is the truth, or less. early: ranks that may have been stopped, as far as
    their files tell.
    """
    report = report_on(content)
    if report is None:
        return
    for one in report.findings:
        assert (one.text + one.next_step).isprintable()
        if one.severity != CRITICAL or one.because:
            continue
        is_true = one.id == truth.finding and set(one.ranks) <= set(truth.ranks)
        may_be_blamed = early and set(one.ranks) <= early | set(truth.ranks)
        assert is_true or one.id in KNOWS_LESS or may_be_blamed, (one, report.problems)


def test_undamaged_they_are_the_truth() -> None:
    for name, truth in TRUTHS.items():
        report = report_on(files(name))
        assert report is not None
        first = report.findings[0] if report.findings else None
        assert ((first.id, first.ranks) if first else ("", ())) == (
            truth.finding,
            truth.ranks,
        ), name


names, ranks, seeds = (
    st.sampled_from(sorted(TRUTHS)),
    st.sampled_from(ALL),
    st.integers(0, 1 << 30),
)
damage = settings(max_examples=250, deadline=None)


def changed(content: Files, rank: int, change: Callable[[bytes], bytes]) -> Files:
    name = sorted(content)[rank]
    return {**content, name: change(content[name])}


def stopped(content: Files, rank: int) -> frozenset[int]:
    """The rank, where its file may be that of a rank that was stopped there: it has the last round
    that came.
    """
    own, proven = 0, 0
    for number, file in enumerate(sorted(content)):
        for line in content[file].splitlines():
            with contextlib.suppress(ValueError):
                one = json.loads(line)
                if number == rank and one["k"] in ("enter", "sync"):
                    own = (
                        one["round"] if one["k"] == "sync" else own + 1
                    )  # it may have issued the next one
                if number != rank and one.get("outcome") == "came":
                    proven = max(proven, one["round"])
    return frozenset({rank}) if own >= proven else frozenset()


@damage
@given(name=names, rank=ranks, part=st.floats(0, 1))
def test_a_file_that_is_cut(name: str, rank: int, part: float) -> None:
    content = changed(files(name), rank, lambda data: data[: int(len(data) * part)])
    whole_lines = content[sorted(content)[rank]].endswith(b"\n")
    check(TRUTHS[name], content, stopped(content, rank) if whole_lines else frozenset())


@damage
@given(name=names, rank=ranks, lines=st.integers(1, 60))
def test_a_file_that_ends_lines_earlier(name: str, rank: int, lines: int) -> None:
    content = changed(
        files(name), rank, lambda data: b"".join(data.splitlines(True)[:-lines])
    )
    check(TRUTHS[name], content, stopped(content, rank))


@damage
@given(name=names, rank=ranks, seed=seeds, share=st.sampled_from([0.01, 0.05, 0.3]))
def test_lines_that_are_lost_from_the_middle(
    name: str, rank: int, seed: int, share: float
) -> None:
    """Where the last record of a call is lost, the file is again one that ends too early."""
    draw = random.Random(seed)

    def lose(data: bytes) -> bytes:
        first, *middle, last = data.splitlines(True)
        return b"".join(
            [first, *(line for line in middle if draw.random() > share), last]
        )

    content = changed(files(name), rank, lose)
    file = sorted(content)[rank]
    ends_early = last_of_a_call(content[file]) != last_of_a_call(files(name)[file])
    check(TRUTHS[name], content, stopped(content, rank) if ends_early else frozenset())


def last_of_a_call(data: bytes) -> bytes:
    return next(
        (
            line
            for line in reversed(data.splitlines())
            if b'"n":' in line and b'"stalled"' not in line
        ),
        b"",
    )


@damage
@given(name=names, gone=st.sets(ranks, min_size=1))
def test_files_that_are_gone(name: str, gone: set[int]) -> None:
    content = files(name)
    check(
        TRUTHS[name],
        {
            file: content[file]
            for rank, file in enumerate(sorted(content))
            if rank not in gone
        },
    )


@damage
@given(name=names, rank=ranks, seed=seeds, count=st.integers(1, 20))
def test_bytes_that_are_changed(name: str, rank: int, seed: int, count: int) -> None:
    draw = random.Random(seed)

    def corrupt(data: bytes) -> bytes:
        changed_ = bytearray(data)
        for _ in range(count):
            changed_[draw.randrange(len(changed_))] = draw.choice(
                [draw.randrange(256), draw.choice(b'0123456789"}{,')]
            )
        return bytes(changed_)

    check(TRUTHS[name], changed(files(name), rank, corrupt))


@damage
@example(name="exception", rank=0, other=2, seed=27237, all_lines=False)
@given(name=names, rank=ranks, other=ranks, seed=seeds, all_lines=st.booleans())
def test_another_files_lines_in_between(
    name: str, rank: int, other: int, seed: int, all_lines: bool
) -> None:
    draw = random.Random(seed)
    theirs = files(name)[sorted(files(name))[other]].splitlines(True)[
        0 if all_lines else 1 :
    ]

    def mix(data: bytes) -> bytes:
        first, *mine = data.splitlines(True)
        some = theirs if all_lines else draw.sample(theirs, draw.randrange(1, 9))
        places = sorted(draw.randrange(len(mine)) for _ in some)
        for place, line in zip(reversed(places), reversed(some), strict=True):
            mine.insert(place, line)
        return b"".join([first, *mine])

    check(TRUTHS[name], changed(files(name), rank, mix))


@damage
@given(name=names, rank=ranks, seed=seeds)
def test_lines_in_disorder(name: str, rank: int, seed: int) -> None:
    draw = random.Random(seed)

    def swap(data: bytes) -> bytes:
        lines = data.splitlines(True)
        for _ in range(draw.randrange(1, 5)):
            one, two = draw.randrange(1, len(lines)), draw.randrange(1, len(lines))
            lines[one], lines[two] = lines[two], lines[one]
        return b"".join(lines)

    check(TRUTHS[name], changed(files(name), rank, swap))


@damage
@given(data=st.lists(st.binary(max_size=200), max_size=5), name=names, seed=seeds)
def test_whatever_bytes_are_in_the_folder(
    data: list[bytes], name: str, seed: int
) -> None:
    draw = random.Random(seed)
    content = dict(files(name))
    for number, one in enumerate(data):
        content[
            draw.choice(
                [f"{number}.jsonl", f"rank-0000{number}.20200101T000000.1.jsonl"]
            )
        ] = one
    check(TRUTHS[name], content)


def skipped(rank: int) -> bytes:
    """The trace of a rank; all end in good order. Rank 1 makes five calls, and is in a barrier
    while the others wait for its sixth."""
    name = "ConformerEncoder"
    lines: list[records.Record] = [header(rank, 3, 1.7e9, Setup())]
    calls = 5 if rank == 1 else 6
    for n in range(1, calls + 1):
        came = n < 6
        at = n * 0.1 if came else 2.1
        lines += [
            records.Enter(
                n * 0.1 - 0.05, name, n, True, [2, 16, 100], "float32", "cpu"
            ),
            records.Sync(
                at,
                name,
                n,
                records.CAME if came else "timeout",
                n,
                0.001 if came else 1.5,
                100,
                100,
            ),
            records.Leave(at + 0.01, name, n, [2, 16, 13]),
        ]
    if rank != 1:
        lines.append(
            records.Stalled(
                2.2, name, 6, [1], ["late"], ["main (train.py:9)"], ["barrier"]
            )
        )
    lines.append(records.End(2.3, "revert(), or apply() with another trace"))
    return b"".join(map(records.encode, lines))


def test_where_a_rank_was_at_a_report_is_no_excuse_once_it_has_ended() -> None:
    report = report_on({file_name(rank, 1.7e9): skipped(rank) for rank in range(3)})
    assert report is not None
    assert [(one.id, one.ranks) for one in report.findings][:1] == [
        (ids.ENDED, (1,))
    ], report
