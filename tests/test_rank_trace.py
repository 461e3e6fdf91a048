"""One rank's records give the same trace however they are cut into batches, and damage is noticed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nemo_patches.tools.diagnose import rank_trace
from nemo_patches.tools.diagnose.decoder import decode
from nemo_patches.tools.diagnose.rank_trace import RankTrace
from nemo_patches.tracing import records

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

HEADER = records.Header(records.FORMAT, 0, 2, "node0", 4711, 1.5e9, 0, {}, {}, [])
OUTCOMES = (
    records.CAME,
    records.CAME,
    records.CAME,
    records.SERVED,
    records.TIMEOUT,
    records.UNWAITED,
)


def regular(
    draw: random.Random, calls: int, e: str = "Encoder", first_round: int = 0
) -> list[records.Record]:
    """What a recorder writes of so many calls of one encoder."""
    written: list[records.Record] = []
    t, rounds = 1.0, first_round
    for n in range(1, calls + 1):
        t += draw.random()
        size, waited = draw.choice([8, 8, 7]), draw.random() / 8
        rounds += draw.random() < 0.9
        outcome = draw.choice(OUTCOMES)
        written.append(
            records.Enter(
                t, e, n, draw.random() < 0.8, [size, 80, 1600], "float32", "cpu"
            )
        )
        written.append(
            records.Sync(t + waited, e, n, outcome, rounds, waited, 1500, 1500 + n)
        )
        if draw.random() < 0.2:
            written.append(records.Grow(t + waited, e, n, 1500, 1500 + n))
        written.append(records.Leave(t + 0.5, e, n, [size, 512, 200]))
        t += 1
    return written


def disturbed(draw: random.Random, written: list[records.Record]) -> list[bytes]:
    """The same as lines, with a few lost, doubled, moved or changed."""
    written = list(written)
    for _ in range(draw.choice([0, 1, 3, 6])):
        changes: dict[str, Any] = {
            "t": draw.choice([0.5, 30.0, 300.0]),
            "e": draw.choice(["Other", ""]),
            "n": draw.choice([1, 3, 10**6]),
            "round": draw.choice([0, 1, 500, 501]),
            "outcome": draw.choice([records.LOCAL, records.ENDED, "?"]),
            "waited": -1.0,
            "shape": [],
        }
        name = draw.choice(list(changes))
        at = draw.choice(
            [at for at, record in enumerate(written) if name in vars(record)]
        )
        record: Any = written[at]
        match draw.randrange(6):
            case 0:
                del written[at]
            case 1:
                written.insert(draw.randrange(len(written)), record)
            case 2:
                written[at : at + 2] = reversed(written[at : at + 2])
            case _:
                written[at] = type(record)(**{**vars(record), name: changes[name]})
    lines = [records.encode(record) for record in written]
    if draw.random() < 0.2:
        lines.insert(draw.randrange(len(lines)), b"no record\n")
    return lines


def content(trace: RankTrace) -> str:
    tracks = {
        e: {**vars(track), "calls": vars(track.calls)}
        for e, track in trace.tracks.items()
    }
    return repr({**vars(trace), "tracks": tracks})


def read(lines: list[bytes], batch: int) -> RankTrace:
    trace = RankTrace(HEADER)
    for at in range(0, len(lines), batch):
        trace.take(decode(b"".join(lines[at : at + batch])))
    return trace


@pytest.mark.parametrize("seed", range(60))
def test_batches_of_any_size_give_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    if seed % 5 == 0:
        monkeypatch.setattr(rank_trace, "MOST_CALLS", 64)  # older ones go
    written = regular(draw, draw.choice([9, 40, 150]))
    if (
        seed % 3 == 0
    ):  # a second encoder, whose calls come after, or between, those of the first
        written += regular(draw, 20, e="Encoder #2")
    if seed % 6 == 0:
        written.sort(key=lambda record: record.t)  # type: ignore[union-attr]
    lines = disturbed(draw, written)
    one_by_one = content(read(lines, 1))
    assert content(read(lines, len(lines))) == one_by_one
    assert content(read(lines, draw.randrange(30, 300))) == one_by_one


@pytest.mark.parametrize("first_round", [0, 4711])
def test_what_a_recorder_writes_is_not_damaged(first_round: int) -> None:
    """Also where the trace begins while the job trains."""
    written = regular(random.Random(0), 200, first_round=first_round)
    trace = read([*map(records.encode, written)], 10**6)
    assert (trace.tracks["Encoder"].last, trace.damage) == (200, "")
