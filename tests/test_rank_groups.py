"""Whom a verdict names, by what the ranks' heartbeats say; and that what a peer sends does no harm."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import Said, wait_until

from nemo_patches.channel import keys
from nemo_patches.channel.store import JobStore
from nemo_patches.stall import stacks
from nemo_patches.stall.census import CensusQuestion, StoreCensus
from nemo_patches.stall.heartbeat import Heartbeat
from nemo_patches.stall.job_stall import JobStallWatch
from nemo_patches.stall.missing_query import Introduction, Surroundings
from nemo_patches.stall.occupation import CHECKPOINT, COMPILATION, EXPORT, Occupation
from nemo_patches.stall.progress import Progress
from nemo_patches.stall.rank_groups import Verdict, grouped, judged
from nemo_patches.stall.rank_text import LEFT, ranges
from nemo_patches.stall.settings import StallSettings
from nemo_patches.stall.store_client import StoreClient, send
from nemo_patches.stall.training_notes import LastCall, TrainingNotes
from nemo_patches.stall.wire import decode_groups, encode_groups

pytestmark = pytest.mark.one_nemo
LIMIT_S = 30.0
GRADIENTS = "backward, which reduces the gradients"


def heartbeat(rank: int, where: str = "", collective: str = "", idle: float = 60.0, **changes: Any) -> Heartbeat:
    facts = {"phase": "between encoder calls", "activity": "", **changes}
    about = (rank, 7, f"node{rank}", 100 + rank, "", "", facts.pop("phase"), "Encoder", 40, (40, 0), idle, {})
    return Heartbeat(*about, where=where, collective=collective, **facts)


def verdict(*heartbeats: Heartbeat, size: int = 0, silent: tuple[int, ...] = ()) -> Verdict:
    by_rank = {one.rank: one for one in heartbeats}
    return judged(grouped(size or len(heartbeats), by_rank, silent, LIMIT_S))


def waiting(*ranks: int) -> list[Heartbeat]:
    return [heartbeat(rank, f"step (train.py:{rank})", GRADIENTS) for rank in ranks]


def named(found: Verdict) -> list[int]:
    return [rank.rank for rank in found.missing]


def test_who_is_not_in_the_collective_of_the_others_is_waited_for() -> None:
    others = waiting(0, 1, 2, 4, 6, 7)
    found = verdict(*others, heartbeat(5, "read_audio (dataset.py:41)"), heartbeat(3, "lock (a.py:1)"))
    assert (found.level, named(found)) == (logging.WARNING, [3, 5])
    assert found.text() == (
        "rank 3 (node3, pid 103): lock (a.py:1) | rank 5 (node5, pid 105): read_audio (dataset.py:41) | "
        f"ranks 0-2, 4, 6-7: {GRADIENTS}"
    )


@pytest.mark.parametrize(
    ("rounds", "text"), [(1, "rank 1 has not announced itself: "), (2, "rank 1: where is not known")]
)
def test_who_syncs_and_has_not_announced_itself_is_not_called_unpatched(rounds: int, text: str) -> None:
    """A second round has been issued: the first has come, from every rank."""
    waits = replace(waiting(0)[0], rounds={"encoder": rounds})
    assert verdict(waits, size=2).text().startswith(text)


def test_the_smallest_group_comes_first() -> None:
    slow = [heartbeat(rank, "decode (metric.py:9)") for rank in (0, 1, 2)]
    found = verdict(*slow, heartbeat(3, "read (data.py:1)"), *waiting(4))
    assert [group.ranks for group in found.groups] == [[3], [0, 1, 2], [4]]


@pytest.mark.parametrize(("silent", "changes"), [((1,), {}), ((), {"phase": LEFT})])
def test_a_rank_that_is_silent_or_has_left_is_waited_for(silent: tuple[int, ...], changes: dict[str, Any]) -> None:
    found = verdict(*waiting(0, 2), heartbeat(1, **changes), silent=silent)
    assert (found.level, named(found)) == (logging.WARNING, [1])


def test_a_rank_without_a_sign_is_waited_for() -> None:
    found = verdict(*waiting(0, 2), size=3)
    assert (found.level, named(found)) == (logging.WARNING, [1])


def test_who_waits_in_another_collective_is_not_accused() -> None:
    found = verdict(*waiting(0, 2), heartbeat(1, "score (metric.py:9) < main (t.py:3)", "all_gather"))
    assert (found.level, named(found)) == (logging.WARNING, [])
    assert "rank 1 (node1, pid 101): all_gather, from score (metric.py:9), after encoder call 40 | " in found.text()
    assert found.text().endswith("which of them is wrong cannot be told")


def test_who_goes_on_with_encoder_calls_is_not_accused() -> None:
    found = verdict(*waiting(0), heartbeat(1, idle=1.0))
    assert (found.level, named(found)) == (logging.INFO, [])
    assert "rank 1 (node1, pid 101): goes on with encoder calls" in found.text()


def test_a_checkpoint_is_named_but_no_warning() -> None:
    found = verdict(*waiting(1, 2), heartbeat(0, "save (train.py:5)", activity=CHECKPOINT))
    assert (found.level, named(found)) == (logging.INFO, [0])
    assert found.text().startswith("rank 0 (node0, pid 100) writes a checkpoint: save (train.py:5)")


@pytest.mark.parametrize("activity", [COMPILATION, EXPORT])
def test_what_ends_by_itself_is_no_warning_also_after_others_have_left(activity: str) -> None:
    found = verdict(*waiting(2), heartbeat(0, "train (t.py:5)", activity=activity), heartbeat(1, phase=LEFT))
    assert (found.level, found.is_certain) == (logging.INFO, False)
    found = verdict(*waiting(2), heartbeat(0, "train (t.py:5)", activity=activity), heartbeat(1, "read (d.py:1)"))
    assert (found.level, found.is_certain) == (logging.WARNING, False)


def test_who_moves_is_not_accused_and_nobody_else_is_meanwhile() -> None:
    moves = heartbeat(1, "decode (a.py:1)", still=LIMIT_S / 2 - 1)
    found = verdict(*waiting(0), moves, heartbeat(2, "read (data.py:1)"), heartbeat(3), silent=(3,))
    assert (found.level, named(found), found.is_certain) == (logging.INFO, [], False)
    assert "rank 1 (node1, pid 101): goes on without encoder calls, now in decode (a.py:1)" in found.text()
    found = verdict(*waiting(0), replace(moves, still=LIMIT_S))
    assert (found.level, named(found), found.is_certain) == (logging.WARNING, [1], True)


def test_a_rank_that_begins_collectives_moves_also_where_it_is_seen_to_wait() -> None:
    found = verdict(*waiting(0), heartbeat(1, "score (m.py:9)", "all_gather_object", still=1.0))
    assert (found.level, found.is_certain) == (logging.INFO, False)


GPU = "perhaps the GPU, in item()"


def test_that_a_rank_waits_for_its_gpu_is_a_guess_and_ends_no_process() -> None:
    found = verdict(heartbeat(0, "log (t.py:3)", GPU), heartbeat(1, "read (data.py:1)"))
    assert (found.level, named(found), found.is_certain) == (logging.WARNING, [1], False)
    both = (heartbeat(0, "log (t.py:3)", GPU), heartbeat(1, "log (t.py:4)", "perhaps a collective's wait()"))
    assert (verdict(*both).level, verdict(*both).is_certain) == (logging.INFO, False)


def test_a_group_has_stood_still_as_short_as_any_of_it() -> None:
    (group,) = verdict(*(replace(one, still=60.0 + one.rank) for one in waiting(2, 0, 1))).groups
    assert group.still == 60.0


@pytest.mark.parametrize("places", [["decode (a.py:1)"] * 3, ["decode (a.py:1)", "decode (a.py:2)", "idle (b.py:1)"]])
def test_where_nobody_waits_nobody_is_accused(places: list[str]) -> None:
    found = verdict(*(heartbeat(rank, place) for rank, place in enumerate(places)))
    assert (found.level, named(found)) == (logging.INFO, [])


def test_many_groups_make_a_line_of_bounded_length() -> None:
    found = verdict(*(heartbeat(rank, f"f (a.py:{rank})") for rank in range(1000)), *waiting(1000))
    assert len(found.text()) < 2000
    assert "996 more groups: ranks 4-999 | rank 1000 (" in found.text()


KINDS = st.sampled_from(["waiting", "elsewhere", "calling", "moving", "silent", "left", "gone"])


@given(st.lists(KINDS, min_size=2, max_size=20))
def test_whoever_waits_or_calls_is_never_accused_and_every_rank_is_in_one_group(kinds: list[str]) -> None:
    def made(rank: int, kind: str) -> Heartbeat:
        collective = GRADIENTS if kind == "waiting" else ""
        phase = LEFT if kind == "left" else "x"
        idle, still = 1.0 if kind == "calling" else 60.0, 1.0 if kind in ("calling", "moving") else 60.0
        return heartbeat(rank, f"at (a.py:{rank})", collective, idle=idle, phase=phase, still=still)

    beats = [made(rank, kind) for rank, kind in enumerate(kinds) if kind != "gone"]
    silent = tuple(rank for rank, kind in enumerate(kinds) if kind == "silent")
    found = verdict(*beats, size=len(kinds), silent=silent)
    assert all(kinds[rank] not in ("waiting", "calling", "moving") for rank in named(found))
    assert not (found.is_certain and "moving" in kinds)
    assert sorted(rank for group in found.groups for rank in group.ranks) == list(range(len(kinds)))
    assert decode_groups(encode_groups(found.groups), len(kinds)) == found.groups


@given(st.recursive(st.none() | st.integers() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=4)))
def test_groups_that_are_none_are_not_taken(content: Any) -> None:
    assert decode_groups(json.dumps(content).encode(), 4) == ()


def test_ranks_that_do_not_exist_are_not_taken() -> None:
    groups = grouped(9, {}, (), LIMIT_S)
    assert decode_groups(encode_groups(groups), 9) == groups
    assert decode_groups(encode_groups(groups), 8) == ()


def test_the_ranks_of_too_many_groups_are_all_kept() -> None:
    beats = {rank: heartbeat(rank, f"f (a.py:{rank})") for rank in range(100)}
    taken = decode_groups(encode_groups(grouped(100, beats, (), LIMIT_S)), 100)
    assert ranges(sorted(rank for group in taken for rank in group.ranks)) == [(0, 99)]


def occupied(work: Callable[[threading.Event, threading.Event], None]) -> Occupation:
    """What a thread is occupied with that runs `work`, which says when it has begun and ends when it may."""
    began, may_end = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(began, may_end))
    thread.start()
    assert began.wait(60) and thread.ident
    found = stacks.occupation(thread.ident)
    may_end.set()
    thread.join(60)
    return found


def in_backward(began: threading.Event, may_end: threading.Event) -> None:
    """Autograd calls user code back: that is where this thread is, not in backward."""

    def hook(gradient: torch.Tensor) -> None:
        began.set()
        may_end.wait(60)

    value = torch.ones(1, requires_grad=True)
    value.register_hook(hook)  # type: ignore[no-untyped-call]
    value.sum().backward()


def in_a_save(began: threading.Event, may_end: threading.Event) -> None:
    class Disk:
        def write(self, data: bytes) -> int:
            began.set()
            may_end.wait(60)
            return len(data)

        def flush(self) -> None:
            pass

    torch.save([1], Disk(), _use_new_zipfile_serialization=False)  # type: ignore[arg-type]


def in_a_compilation(began: threading.Event, may_end: threading.Event) -> None:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        began.set()
        may_end.wait(60)
        return graph.forward  # type: ignore[no-any-return]

    torch.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(2))


def in_what_was_compiled(began: threading.Event, may_end: threading.Event) -> None:
    """A break in the graph: here the function runs as the user has written it."""

    @torch._dynamo.disable  # type: ignore[misc]
    def read() -> None:
        began.set()
        may_end.wait(60)

    def step(value: torch.Tensor) -> torch.Tensor:
        value = value + 1
        read()
        return value * 2

    torch.compile(step, backend="eager")(torch.ones(2))


def in_an_export(began: threading.Event, may_end: threading.Event) -> None:
    class Slow(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            began.set()
            may_end.wait(60)
            return value + 1

    torch.jit.trace(Slow(), torch.ones(1), check_trace=False)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("work", "found"),
    [
        (in_backward, Occupation()),
        (in_a_save, Occupation("", CHECKPOINT)),
        (in_a_compilation, Occupation("", COMPILATION)),
        (in_what_was_compiled, Occupation()),
        (in_an_export, Occupation("", EXPORT)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_a_thread_is_occupied_with(work: Callable[..., None], found: Occupation) -> None:
    assert occupied(work) == found


def test_a_thread_that_is_gone_is_occupied_with_nothing() -> None:
    assert stacks.occupation(1) == Occupation()


def test_a_process_that_was_stopped_takes_a_census_before_it_says_that_there_is_none() -> None:
    """As a whole job is, by `scontrol suspend`: the report was due long ago when it is first thought of."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        surroundings = Surroundings(0, 2, 0.01, StoreClient(JobStore(server, 0)), Introduction)
        notes, said = TrainingNotes(), Said()
        notes.last = LastCall(calls=2, since=time.monotonic() - 3600)
        watch = JobStallWatch(notes, surroundings, Progress(notes), lambda: waiting(0)[0], lambda: None)
        wait_until(lambda: watch.look(time.monotonic(), StallSettings(), is_last=False) or said.lines)
        watch.look(time.monotonic(), StallSettings(), is_last=True)
    finally:
        dist.destroy_process_group()
    assert "no encoder call for 3600 s. " in said.lines[0]
    assert "rank 1 has not announced itself" in said.lines[0]


def test_a_census_that_others_have_overtaken_does_not_count_back() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = StoreClient(JobStore(server, 0))
    with client.asking() as store:
        send(store, heartbeat(0))

    def own() -> Heartbeat:
        """Made at the end of a census: by then the others have given it up, and taken two."""
        with client.asking() as store:
            store.add(keys.CENSUS_NUMBER, 2)
        return heartbeat(0)

    surroundings = Surroundings(0, 1, 0.01, client, Introduction)
    census = StoreCensus(CensusQuestion(surroundings, own, time.monotonic(), LIMIT_S), threading.Event())
    wait_until(lambda: census.counted)
    with client.asking() as store:
        assert store.add(keys.CENSUS_NUMBER, 0) == 2
