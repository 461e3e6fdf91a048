"""What ranks tell each other: of bounded size, read back as it was, and nothing that a peer sends does any harm."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from nemo_patches.channel.side_channel import SideChannel
from nemo_patches.channel.store import JobStore
from nemo_patches.stall import stacks
from nemo_patches.stall.heartbeat import Heartbeat
from nemo_patches.stall.loader_workers import described as described_workers
from nemo_patches.stall.loader_workers import loader_workers
from nemo_patches.stall.missing_rank import DETAILED, MissingRank, described
from nemo_patches.stall.own_heartbeat import OwnHeartbeat
from nemo_patches.stall.rank_text import ELSEWHERE, LEFT, SILENT, UNANNOUNCED, named, ranges
from nemo_patches.stall.settings import StallSettings
from nemo_patches.stall.training_notes import TrainingNotes
from nemo_patches.stall.wire import LONGEST_HEARTBEAT as LONGEST
from nemo_patches.stall.wire import decode_heartbeat as decode
from nemo_patches.stall.wire import decode_missing, decode_texts, encode_missing, encode_texts
from nemo_patches.stall.wire import encode_heartbeat as encode
from nemo_patches.sync.events import CallBegan, Group, SyncHandle

pytestmark = pytest.mark.one_nemo
BEAT = Heartbeat(
    rank=3,
    number=7,
    host="node7",
    pid=4711,
    versions="nemo_patches 0.1.0, nemo 3.0.0",
    settings="sync=bounded",
    phase="length sync",
    encoder="ConformerEncoder",
    calls=5,
    clock=(5, 0),
    idle=0.5,
    rounds={"a": 2},
)

texts = st.text(max_size=2000)
beats = st.builds(
    Heartbeat,
    rank=st.integers(0, 5000),
    number=st.integers(0, 1 << 40),
    host=texts,
    pid=st.integers(0, 1 << 22),
    versions=texts,
    settings=texts,
    phase=texts,
    encoder=texts,
    calls=st.integers(0, 1 << 40),
    clock=st.tuples(st.integers(0, 1 << 24), st.integers(0, 1 << 15)),
    idle=st.floats(-1, 1e9),
    rounds=st.dictionaries(st.text(max_size=80), st.integers(0, 1 << 40), max_size=100),
    where=texts,
    workers=st.lists(st.integers(1, 1 << 22), max_size=100).map(tuple),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def printable(beat: Heartbeat) -> bool:
    texts = (beat.host, beat.versions, beat.settings, beat.phase, beat.encoder, beat.where, *beat.rounds)
    return all(text.isprintable() for text in texts)


@given(beats)
def test_a_heartbeat_is_of_bounded_size_and_is_read_back_safe_to_print(beat: Heartbeat) -> None:
    data = encode(beat)
    assert len(data) <= LONGEST
    back = decode(data)
    assert back is not None
    assert printable(back)
    assert (back.rank, back.number, back.pid, back.calls, back.clock) == (
        beat.rank,
        beat.number,
        beat.pid,
        beat.calls,
        beat.clock,
    )


def test_what_was_called_last_is_kept_and_of_the_rest_it_says_nothing() -> None:
    rounds = {f"encoder-{number}": number for number in range(1, 101)}
    back = decode(encode(replace(BEAT, rounds=rounds)))
    assert back is not None
    assert list(back.rounds) == list(rounds)[-64:]
    assert [back.has_come("encoder-90", number) for number in (90, 91)] == [True, False]
    assert back.has_come("encoder-1", 1) is None


@given(beats)
def test_no_heartbeat_says_that_its_rank_has_not_come_where_it_has(beat: Heartbeat) -> None:
    rounds = {f"encoder-{number}": round_ + 1 for number, round_ in enumerate(beat.rounds.values())}
    back = decode(encode(replace(beat, rounds=rounds)))
    assert back is not None
    assert not [key for key, number in rounds.items() if back.has_come(key, number) is False]


def test_of_a_few_encoders_all_is_said() -> None:
    back = decode(encode(replace(BEAT, rounds={f"encoder-{number}": 5 for number in range(64)})))
    assert back is not None and back.whole
    assert back.has_come("another", 1) is False


@given(st.binary(max_size=300))
def test_bytes_that_are_no_heartbeat_are_none(data: bytes) -> None:
    assert decode(data) is None
    assert decode_missing(data, 8) is None or decode_missing(data, 8) == ()
    assert all(text.isprintable() for text in decode_texts(data).values())


@given(st.dictionaries(st.sampled_from(list(asdict(BEAT))), anything, max_size=4))
def test_a_field_of_another_type_makes_it_none_or_safe(changes: dict[str, object]) -> None:
    back = decode(json.dumps({**asdict(BEAT), **changes}).encode())
    assert back is None or printable(back)


def test_a_rank_with_another_version_is_heard() -> None:
    """Else it would have no heartbeat, and be called unpatched. That versions differ, the roll call says."""
    older = {name: value for name, value in asdict(BEAT).items() if name not in ("whole", "batch", "worker_states")}
    assert decode(json.dumps({**older, "of a newer one": 1}).encode()) == replace(BEAT, batch="", worker_states=())
    del older["rank"]
    assert decode(json.dumps(older).encode()) is None


def test_what_is_too_long_or_too_deep_is_none() -> None:
    assert decode(json.dumps({**asdict(BEAT), "host": "x" * LONGEST}).encode()) is None
    assert decode(b"[" * (LONGEST - 1)) is None
    assert decode(json.dumps({**asdict(BEAT), "rank": 1 << 70}).encode()) is None
    assert decode(json.dumps({**asdict(BEAT), "idle": float("nan")}).encode()) is None


def test_control_characters_of_a_peer_are_not_printed() -> None:
    evil = "a\x1b[31mred\n2026 nemo_patches WARNING forged\u202e\x00"
    back = decode(json.dumps({**asdict(BEAT), "host": evil, "where": evil}).encode())
    assert back is not None
    line = str(MissingRank(1, ELSEWHERE, back.host, 1, 1, 1.0, back.where))
    assert line.isprintable()


kinds = st.sampled_from([ELSEWHERE, SILENT, LEFT, UNANNOUNCED])


@given(st.dictionaries(st.integers(0, 1023), kinds, min_size=1, max_size=60))
def test_a_report_names_every_missing_rank_and_tells_of_the_first_few(found: dict[int, str]) -> None:
    missing = [MissingRank(rank, kind, "node", 5, 6, 7.0, "main (train.py:1)") for rank, kind in found.items()]
    back = decode_missing(encode_missing(missing), 1024)
    assert back is not None
    assert [(one.rank, one.kind) for one in back] == sorted(found.items())
    assert [bool(one.host) for one in back] == [number < DETAILED for number in range(len(back))]
    text = described(back, 1024)
    assert named(sorted(found)) in text
    assert text.isprintable()


@given(anything)
def test_a_report_that_is_none_is_not_taken(content: object) -> None:
    decode_missing(json.dumps(content).encode(), 8)
    decode_missing(json.dumps({"kinds": content, "details": content}).encode(), 8)


def test_a_report_of_infinitely_many_ranks_is_not_taken() -> None:
    kinds = {kind: [] for kind in (SILENT, LEFT, UNANNOUNCED, "late")} | {ELSEWHERE: [[0, float("inf")]]}
    assert decode_missing(json.dumps({"kinds": kinds, "details": []}).encode(), 4) is None


def test_a_report_cannot_name_ranks_that_there_are_not() -> None:
    kinds = {ELSEWHERE: [[-5, 10**12]], SILENT: [], LEFT: [], UNANNOUNCED: [], "late": []}
    back = decode_missing(json.dumps({"kinds": kinds, "details": []}).encode(), 4)
    assert back is not None
    assert [one.rank for one in back] == [0, 1, 2, 3]


@given(st.dictionaries(st.text("abc", min_size=1, max_size=8), texts, max_size=5))
def test_short_texts_are_read_back(content: dict[str, str]) -> None:
    assert decode_texts(encode_texts(content)).keys() == content.keys()


def own_function(entered: threading.Event, leave: threading.Event) -> None:
    entered.set()
    leave.wait()


def test_where_a_thread_is_own_code_first_and_libraries_folded() -> None:
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=own_function, args=(entered, leave), name="reader")
    thread.start()
    try:
        entered.wait()
        assert thread.ident is not None
        where = stacks.where(thread.ident)
        assert where.startswith("own_function (tests/test_heartbeats.py:")
        assert ", in: wait (python/threading.py:" in where
        assert stacks.runs(thread.ident, (__file__, "own_function"))
        assert not stacks.runs(thread.ident, (__file__, "another"))
        assert any(line.startswith("thread reader: own_function (") for line in stacks.all_threads())
    finally:
        leave.set()
        thread.join()
    assert stacks.where(thread.ident) == ""


def test_where_a_rank_is_whose_last_call_was_by_a_thread_that_has_ended() -> None:
    """As an encoder's is within torch.utils.checkpoint, on a GPU; the thread's identifier is soon another's."""
    group, notes = Group(0, 2, JobStore(dist.HashStore(), 0)), TrainingNotes()
    rounds = SideChannel(group.store, 0, 2, print).rounds("key")
    began = CallBegan(SyncHandle("encoder", "key", group, rounds, ""), 1, (0, 0))
    caller = threading.Thread(target=notes.handlers()[CallBegan], args=(began,))
    caller.start()
    caller.join()
    notes.last = notes.last._replace(since=time.monotonic() - 3600)
    entered, leave = threading.Event(), threading.Event()
    threading.Thread(target=own_function, args=(entered, leave)).start()
    try:
        entered.wait()
        where = OwnHeartbeat(group, notes, StallSettings).make(None).where
    finally:
        leave.set()
    assert "test_where_a_rank_is_whose_last_call_was_by_a_thread_that_has_ended (" in where
    assert "own_function" not in where


def test_a_deep_stack_and_a_long_name_stay_short() -> None:
    found: list[str] = []

    def deeper(depth: int) -> None:
        if depth:
            deeper(depth - 1)
        else:
            found.append(stacks.where(threading.get_ident()))

    deeper(200)
    assert len(found[0]) <= stacks.LONGEST
    assert " more" in found[0]


def test_loader_workers_are_found_and_not_reaped() -> None:
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,), daemon=True)
    process.start()
    os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)
    assert process.pid in loader_workers()
    process.join()
    assert process.exitcode == 3
    assert process.pid not in loader_workers()


def test_a_worker_may_have_a_name_that_is_no_text() -> None:
    """The kernel cuts it at 15 bytes, be that within a character."""
    import multiprocessing

    named = multiprocessing.Event()

    def be_named() -> None:
        ctypes.CDLL(None).prctl(15, "音频读取进程".encode()[:14], 0, 0, 0)  # PR_SET_NAME
        named.set()
        signal.pause()

    process = multiprocessing.get_context("fork").Process(target=be_named, daemon=True)
    process.start()
    try:
        assert named.wait(60)
        os.kill(process.pid or 0, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid or 0, os.WSTOPPED | os.WNOWAIT)
        assert described_workers((process.pid or 0,))[0].startswith(f"worker 0 (pid {process.pid}) is stopped")
    finally:
        process.kill()
        process.join()


@given(st.sets(st.integers(0, 63)))
def test_ranges_are_of_the_same_ranks(ranks: set[int]) -> None:
    assert [one for first, last in ranges(sorted(ranks)) for one in range(first, last + 1)] == sorted(ranks)


def test_ranks_are_named_as_a_person_would() -> None:
    assert named([1]) == "rank 1"
    assert named([2, 5, 6, 7]) == "ranks 2, 5-7"
    assert named([0, 1]) == "ranks 0-1"
