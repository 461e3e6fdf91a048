"""One rank's records give the same trace whether they are taken one by one or in runs of regular calls."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nemo_patches.tools.diagnose import rank_trace
from nemo_patches.tools.diagnose.decoder import decode
from nemo_patches.tools.diagnose.rank_trace import RankTrace
from nemo_patches.tracing import records

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

HEADER = records.Header(records.FORMAT, 0, 2, "node0", 4711, 1.5e9, 0, 0, 1 << 20, {}, {}, [])
OUTCOMES = (records.CAME, records.CAME, records.CAME, records.SERVED, records.TIMEOUT, records.UNWAITED)


def encoder(e: int) -> records.Encoder:
    return records.Encoder(0.0, e, f"Encoder #{e}", True, "?", 60, "batch_norm", True, {}, {})


def regular(draw: random.Random, calls: int, e: int = 1) -> list[records.Record]:
    """What a recorder writes of so many calls of one encoder."""
    written: list[records.Record] = []
    t, rounds, backwards = 1.0, 0, 0
    has_backward = draw.random() < 0.5
    device, path = draw.choice(["cpu", "cuda:1"]), draw.choice(["", records.PRE_ENCODE])
    for n in range(1, calls + 1):
        t += draw.random()
        has_backward ^= draw.random() < 0.02
        training, size, waited = draw.random() < 0.8, draw.choice([8, 8, 7]), draw.random() / 8
        in_ddp = draw.choice([None, 0.25])
        rounds += draw.random() < 0.9
        written.append(
            records.Enter(
                t, e, n, training, True, [size, 80, 1600], "float32", device, in_ddp, [size], path, True, backwards
            )
        )
        written.append(records.Sync(t + waited, e, n, draw.choice(OUTCOMES), rounds, waited, 1500, 1500 + n))
        if draw.random() < 0.2:
            written.append(records.Lengths(t, e, n, 100, 1500))
        written.append(records.PreEncoded(t + 0.3, e, n))
        written.append(records.FirstLayer(t + 0.4, e, n))
        written.append(records.Leave(t + 0.5, e, n, [size, 512, 200], 0.5, has_backward or n % 3 == 0))
        if has_backward:
            written += [records.Backward(t + 0.6, e, n), records.BackwardEnded(t + 0.7, e, n)]
            backwards += 1
        if draw.random() < 0.01:
            written.append(records.Memory(t, 1 << 30, None, None))
        t += 1
    return written


def disturbed(draw: random.Random, written: list[records.Record]) -> list[bytes]:
    """The same as lines, with a few lost, doubled, moved or changed."""
    written = list(written)
    for _ in range(draw.choice([0, 1, 3, 6])):
        changes: dict[str, Any] = {
            "t": draw.choice([0.5, 30.0, 300.0]),
            "e": draw.choice([2, 9]),
            "n": draw.choice([1, 3, 10**6]),
            "round": draw.choice([0, 1, 500, 501]),
            "outcome": draw.choice([records.LOCAL, records.ENDED, "?"]),
            "waited": -1.0,
            "backwards": draw.choice([0, 12, 400]),
            "dtype": "bfloat16",
            "shape": [],
        }
        name = draw.choice(list(changes))
        at = draw.choice([at for at, record in enumerate(written) if name in vars(record)])
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
    tracks = {e: {**vars(track), "calls": vars(track.calls)} for e, track in trace.tracks.items()}
    return repr({**vars(trace), "tracks": tracks})


def read(lines: list[bytes], batch: int) -> RankTrace:
    trace = RankTrace(HEADER)
    for at in range(0, len(lines), batch):
        trace.take(decode(b"".join(lines[at : at + batch])))
    return trace


@pytest.mark.parametrize("seed", range(200))
def test_runs_of_calls_are_taken_as_their_records_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    if seed % 5 == 0:
        monkeypatch.setattr(rank_trace, "MOST_CALLS", 64)  # older ones go
    written: list[records.Record] = regular(draw, draw.choice([9, 40, 150]))
    if seed % 3 == 0:  # a second encoder, whose calls come after, or between, those of the first
        written += regular(draw, 20, e=2)
    if seed % 6 == 0:
        written.sort(key=lambda record: record.t)  # type: ignore[union-attr]
    lines = [*map(records.encode, (encoder(1), encoder(2))), *disturbed(draw, written)]
    one_by_one = content(read(lines, 1))
    assert content(read(lines, len(lines))) == one_by_one
    assert content(read(lines, draw.randrange(30, 300))) == one_by_one


def test_a_regular_trace_is_taken_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    singly: list[int] = []
    take_each = RankTrace._take_each
    monkeypatch.setattr(
        RankTrace, "_take_each", lambda trace, batch: (singly.append(len(batch)), take_each(trace, batch))
    )
    written = [record for record in regular(random.Random(0), 200) if not isinstance(record, records.Memory)]
    trace = read([records.encode(encoder(1)), *map(records.encode, written)], 10**6)
    assert (trace.tracks[1].last, trace.damage) == (200, "")
    assert sum(singly) < len(written) / 10
