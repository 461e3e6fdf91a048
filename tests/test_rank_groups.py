"""Whom a verdict names, by what the ranks say of themselves."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_states import found, state
from ranks import wait_until

from nemo_patches.channel.answers import (
    ENDED,
    HELD_UP,
    NO_ANSWER,
    NO_WATCH,
    NOT_HEARD,
    NOT_THROUGH,
)
from nemo_patches.channel.answers import LEFT as HAS_LEFT
from nemo_patches.facts import CALLING, COMPUTING, MOVING, RankFacts
from nemo_patches.judging.kinds import (
    ANSWERS_NOTHING,
    CHECKPOINT,
    COMPILATION,
    ELSEWHERE,
    EXPORT,
    SILENT,
    is_guess,
)
from nemo_patches.judging.missing_rank import MissingRank
from nemo_patches.judging.rank_groups import grouped
from nemo_patches.judging.verdict import Verdict, judged
from nemo_patches.watch import stacks
from nemo_patches.watch.occupation import Occupation

pytestmark = pytest.mark.one_nemo
GRADIENTS = "backward, which reduces the gradients"


def verdict(
    *states: RankFacts, size: int = 0, silent: dict[int, str] | None = None
) -> Verdict:
    return judged(grouped(found(*states, size=size, silent=silent)))


def waiting(*ranks: int) -> list[RankFacts]:
    return [state(rank, "step (train.py:7)", GRADIENTS) for rank in ranks]


def named(judged_: Verdict) -> list[int]:
    return [rank.rank for rank in judged_.missing]


def test_who_is_not_in_the_collective_of_the_others_is_waited_for() -> None:
    others = waiting(0, 1, 2, 4, 6, 7)
    seen = verdict(
        *others, state(5, "read_audio (dataset.py:41)"), state(3, "lock (a.py:1)")
    )
    assert (seen.level, named(seen)) == (logging.WARNING, [3, 5])
    assert (
        seen.text()
        == "rank 3 (node3, pid 103): lock (a.py:1) | rank 5 (node5, pid 105):"
        f" read_audio (dataset.py:41) | ranks 0-2, 4, 6-7: {GRADIENTS}, in step"
        " (train.py:7)"
    )


def test_the_smallest_group_comes_first() -> None:
    slow = [state(rank, "decode (metric.py:9)") for rank in (0, 1, 2)]
    seen = verdict(*slow, state(3, "read (data.py:1)"), *waiting(4))
    assert [group.ranks for group in seen.groups] == [[3], [0, 1, 2], [4]]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            NO_ANSWER,
            (
                "rank 1 answers nothing, its connection stands: stopped, or Python's"
                " lock (GIL) is held, or it has no core | "
            ),
        ),
        (ENDED, "rank 1: its process has gone | "),
        (HAS_LEFT, "rank 1 has left: "),
    ],
)
def test_a_rank_that_is_silent_or_has_left_is_waited_for(how: str, text: str) -> None:
    seen = verdict(*waiting(0, 2), silent={1: how})
    assert (seen.level, named(seen)) == (logging.WARNING, [1])
    assert seen.text().startswith(text)


@pytest.mark.parametrize("how", [HELD_UP, NO_WATCH, NOT_HEARD, NOT_THROUGH])
def test_a_rank_of_which_nothing_is_known_is_not_accused(how: str) -> None:
    seen = verdict(*waiting(0, 2), silent={1: how})
    assert (seen.level, named(seen)) == (logging.WARNING, [])
    assert seen.text().startswith("rank 1: not heard: ")
    assert seen.text().endswith("where rank 1 is, nobody knows")


def test_a_rank_without_a_sign_is_waited_for() -> None:
    seen = verdict(*waiting(0, 2), size=3)
    assert (seen.level, named(seen)) == (logging.WARNING, [1])


def test_who_waits_in_another_collective_is_not_accused() -> None:
    seen = verdict(
        *waiting(0, 2), state(1, "score (metric.py:9) < main (t.py:3)", "all_gather")
    )
    assert (seen.level, named(seen)) == (logging.WARNING, [])
    assert (
        "rank 1 (node1, pid 101): all_gather, in score (metric.py:9) < main (t.py:3),"
        " after encoder call 40 | " in (seen.text())
    )
    assert seen.text().endswith("which of them is wrong cannot be told")


def test_who_goes_on_with_encoder_calls_is_not_accused() -> None:
    seen = verdict(*waiting(0), state(1, goes_on=CALLING))
    assert (seen.level, named(seen)) == (logging.INFO, [])
    assert "rank 1 (node1, pid 101): goes on with encoder calls" in seen.text()


def test_a_checkpoint_is_named_but_no_warning() -> None:
    seen = verdict(*waiting(1, 2), state(0, "save (train.py:5)", activity=CHECKPOINT))
    assert (seen.level, named(seen)) == (logging.INFO, [0])
    assert seen.text().startswith(
        "rank 0 (node0, pid 100) writes a checkpoint: save (train.py:5)"
    )


@pytest.mark.parametrize("activity", [COMPILATION, EXPORT])
def test_what_ends_by_itself_is_no_warning_also_after_others_have_left(
    activity: str,
) -> None:
    seen = verdict(
        *waiting(2), state(0, "train (t.py:5)", activity=activity), silent={1: HAS_LEFT}
    )
    assert (seen.level, seen.is_certain) == (logging.INFO, False)
    seen = verdict(
        *waiting(2),
        state(0, "train (t.py:5)", activity=activity),
        state(1, "read (d.py:1)"),
    )
    assert (seen.level, seen.is_certain) == (logging.WARNING, False)


def test_who_moves_is_not_accused_and_nobody_else_is_meanwhile() -> None:
    moves = state(1, "decode (a.py:1)", goes_on=MOVING)
    seen = verdict(
        *waiting(0), moves, state(2, "read (data.py:1)"), silent={3: NO_ANSWER}
    )
    assert (seen.level, named(seen), seen.is_certain) == (logging.INFO, [], False)
    assert (
        "rank 1 (node1, pid 101): goes on without encoder calls, now in decode (a.py:1)"
        in seen.text()
    )
    seen = verdict(*waiting(0), replace(moves, goes_on=""))
    assert (seen.level, named(seen), seen.is_certain) == (logging.WARNING, [1], True)


def test_a_rank_that_begins_collectives_moves_also_where_it_is_seen_to_wait() -> None:
    seen = verdict(
        *waiting(0), state(1, "score (m.py:9)", "all_gather_object", goes_on=MOVING)
    )
    assert (seen.level, seen.is_certain) == (logging.INFO, False)


GPU = "perhaps the GPU, in item()"


def test_that_a_rank_waits_for_its_gpu_is_a_guess_and_ends_no_process() -> None:
    seen = verdict(state(0, "log (t.py:3)", GPU), state(1, "read (data.py:1)"))
    assert (seen.level, named(seen), seen.is_certain) == (logging.WARNING, [1], False)
    both = (
        state(0, "log (t.py:3)", GPU),
        state(1, "log (t.py:4)", "perhaps a collective's wait()"),
    )
    assert (verdict(*both).level, verdict(*both).is_certain) == (logging.INFO, False)


def test_a_rank_that_perhaps_waits_for_its_gpu_is_in_no_other_collective() -> None:
    """As on an H100: one rank's GPU computes for minutes, the other waits in the length sync."""
    seen = verdict(*waiting(0), state(1, "spin (job.py:24)", GPU))
    assert (seen.level, named(seen), seen.is_certain) == (logging.WARNING, [], True)
    assert "that rank 1 waits is a guess, by a method's name; which" in seen.text()
    assert "different collectives" not in seen.text()
    missing = MissingRank(1, ELSEWHERE, where="spin (job.py:24)", collective=GPU)
    assert str(missing) == (
        "rank 1 waits itself, perhaps for the GPU, in item(): spin (job.py:24)"
    )


def test_a_group_has_stood_still_as_short_as_any_of_it() -> None:
    (group,) = verdict(
        *(replace(one, still=60.0 + one.rank) for one in waiting(2, 0, 1))
    ).groups
    assert group.still == 60.0


@pytest.mark.parametrize(
    "places",
    [["decode (a.py:1)"] * 3, ["decode (a.py:1)", "decode (a.py:2)", "idle (b.py:1)"]],
)
def test_where_nobody_waits_nobody_is_accused(places: list[str]) -> None:
    seen = verdict(*(state(rank, place) for rank, place in enumerate(places)))
    assert (seen.level, named(seen)) == (logging.INFO, [])


def test_many_groups_make_a_line_of_bounded_length() -> None:
    seen = verdict(
        *(state(rank, f"f (a.py:{rank})") for rank in range(1000)), *waiting(1000)
    )
    assert len(seen.text()) < 2000
    assert " more groups: ranks 4-999 | rank 1000 (" in seen.text()


def test_all_in_one_dead_wait_or_the_other_are_said_to_be_so() -> None:
    dead = [state(rank, "read_audio (data.py:3)", sleeps=True) for rank in range(8)]
    seen = verdict(*dead)
    assert (seen.level, named(seen), seen.is_certain) == (logging.WARNING, [], True)
    assert seen.text() == "no rank moves: ranks 0-7: read_audio (data.py:3)"
    assert verdict(*dead[:7], replace(dead[7], sleeps=False)).level == logging.INFO
    assert (
        verdict(*dead[:7], replace(dead[7], activity=CHECKPOINT)).level == logging.INFO
    )


def test_ranks_in_one_collective_from_different_places_are_told_apart() -> None:
    saving = state(
        0,
        "x",
        "barrier",
        caller="file_exists (nemo_model_checkpoint.py:540)",
        hook="saving a checkpoint",
    )
    other = state(
        1,
        "x",
        "barrier",
        caller="train (pretrain.py:29)",
        hook="on_validation_epoch_end",
    )
    seen = verdict(saving, other)
    assert (seen.level, named(seen)) == (logging.WARNING, [])
    assert (
        "rank 0 (node0, pid 100): barrier, in file_exists"
        " (nemo_model_checkpoint.py:540), while saving a che" in (seen.text())
    )
    assert (
        "barrier, in train (pretrain.py:29), during on_validation_epoch_end"
        in seen.text()
    )
    assert seen.text().endswith(
        "the ranks wait at different places; which of them is wrong cannot be told"
    )


def test_who_computes_is_not_accused_but_after_a_while_that_is_a_warning() -> None:
    seen = verdict(
        *waiting(0),
        state(1, "decode (a.py:1)", goes_on=COMPUTING),
        state(2, "read (data.py:1)"),
    )
    assert (seen.level, named(seen), seen.is_certain, seen.stays_info) == (
        logging.INFO,
        [],
        False,
        False,
    )
    assert (
        "rank 1 (node1, pid 101): computes but takes no step, now in decode (a.py:1)"
        in seen.text()
    )
    late = seen.overdue(60.0)
    assert (late.level, named(late), late.is_certain, late.goes_on) == (
        logging.WARNING,
        [],
        False,
        True,
    )
    assert late.text().endswith(
        "who waits may wait for a rank that goes on; no rank takes a step"
    )
    alone = verdict(
        state(0, "read (data.py:1)"), state(1, "decode (a.py:1)", goes_on=COMPUTING)
    )
    assert (alone.level, alone.stays_info) == (logging.INFO, True)


FROM_ONE = "broadcast_object_list"


@pytest.mark.parametrize(
    ("collective", "request_", "is_idle"),
    [
        (FROM_ONE, "input()", True),
        (GRADIENTS, "input()", True),
        (FROM_ONE, "perhaps queue.get()", True),
        (GRADIENTS, "perhaps queue.get()", False),  # then it waits for its data
        ("", "accept()", True),  # nobody waits
        ("", "perhaps queue.get()", False),
    ],
)
def test_a_rank_that_waits_for_a_request_is_idle_where_the_others_may_wait_for_it(
    collective: str, request_: str, is_idle: bool
) -> None:
    others = [state(1, "serve (s.py:3)", collective)] if collective else []
    asks = state(
        0, "get (q.py:1)", request=request_, caller="serve (s.py:9)", sleeps=True
    )
    seen = verdict(*others, asks)
    assert (seen.is_idle, seen.stays_info) == (is_idle, is_idle)
    if is_idle:
        assert (seen.level, named(seen), seen.is_certain) == (logging.INFO, [], False)
        what = request_.removeprefix("perhaps ")
        assert seen.text().startswith(
            f"rank 0 (node0, pid 100) waits for a request: {what} in serve (s.py:9)"
        )
    else:
        assert seen.level == logging.WARNING
    for hung in (
        verdict(*others, asks, silent={2: NO_ANSWER}),
        verdict(*others, asks, state(2, "read (d.py:1)")),
    ):
        assert not hung.is_idle


KINDS = st.sampled_from(
    ["waiting", "elsewhere", "calling", "moving", "computing", "silent", "left", "gone"]
)


@given(st.lists(KINDS, min_size=2, max_size=20))
def test_whoever_waits_or_calls_is_never_accused_and_every_rank_is_in_one_group(
    kinds: list[str],
) -> None:
    silent = {"silent": NO_ANSWER, "left": HAS_LEFT}
    states = [
        state(
            rank,
            f"at (a.py:{rank})",
            GRADIENTS if kind == "waiting" else "",
            goes_on={"calling": CALLING, "moving": MOVING, "computing": COMPUTING}.get(
                kind, ""
            ),
        )
        for rank, kind in enumerate(kinds)
        if kind not in (*silent, "gone")
    ]
    reasons = {rank: silent[kind] for rank, kind in enumerate(kinds) if kind in silent}
    seen = verdict(*states, size=len(kinds), silent=reasons)
    assert all(
        kinds[rank] not in ("waiting", "calling", "moving", "computing")
        for rank in named(seen)
    )
    assert not (seen.is_certain and {"moving", "computing"} & set(kinds))
    assert sorted(rank for group in seen.groups for rank in group.ranks) == list(
        range(len(kinds))
    )


def occupied(work: Callable[[threading.Event, threading.Event], None]) -> Occupation:
    """What a thread is occupied with that runs `work`, which says when it has begun and ends when
    it may.
    """
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


def in_a_requeue(began: threading.Event, may_end: threading.Event) -> None:
    """By Lightning's name for its handler, which saves a checkpoint."""

    def _slurm_sigusr_handler_fn() -> None:
        in_a_save(began, may_end)

    _slurm_sigusr_handler_fn()


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
def test_what_a_thread_is_occupied_with(
    work: Callable[..., None], found: Occupation
) -> None:
    assert occupied(work)[:2] == found[:2]


def test_a_thread_that_is_gone_is_occupied_with_nothing() -> None:
    assert stacks.occupation(1) == Occupation()


# As Lightning calls a hook, from a file of its.
LIGHTNING = compile(
    "def _call_lightning_module_hook(hook): hook()",
    "/x/site-packages/lightning/pytorch/trainer/call.py",
    "exec",
)


def test_the_hook_and_the_caller_are_told_of_whatever_waits_there() -> None:
    names: dict[str, Any] = {}
    exec(LIGHTNING, names)

    def in_a_hook(began: threading.Event, may_end: threading.Event) -> None:
        def on_validation_epoch_end() -> None:
            began.set()
            may_end.wait(60)

        names["_call_lightning_module_hook"](on_validation_epoch_end)

    found = occupied(in_a_hook)
    assert (found.collective, found.hook) == ("", "on_validation_epoch_end")
    assert found.caller.startswith("on_validation_epoch_end (test_rank_groups.py:")
    assert occupied(in_a_save).hook == "saving a checkpoint"
    assert (
        occupied(in_a_requeue).hook == "in a handler of SIGUSR1 (Lightning's requeue)"
    )

    def saves_at_the_end(began: threading.Event, may_end: threading.Event) -> None:
        def on_train_end() -> None:
            in_a_save(began, may_end)

        names["_call_lightning_module_hook"](on_train_end)

    told = occupied(saves_at_the_end).hook
    assert told == "saving a checkpoint during on_train_end"


@pytest.mark.parametrize(
    "method",
    ["item", "to", "cuda", "nonzero", "copy_", "masked_select", "unique", "equal"],
)
def test_a_method_that_may_wait_for_the_gpu_is_a_guess_by_its_name(method: str) -> None:
    """C functions have no frame: here a lock's stands in for the tensor's, since there is no GPU."""
    lock = threading.Lock()
    lock.acquire()
    names: dict[str, Any] = {}
    exec(compile(f"def step(tensor): tensor.{method}()", "/my/train.py", "exec"), names)
    thread = threading.Thread(
        target=names["step"], args=(SimpleNamespace(**{method: lock.acquire}),)
    )
    thread.start()
    wait_until(lambda: thread.ident and stacks.occupation(thread.ident).collective)
    found = stacks.occupation(thread.ident or 0)
    lock.release()
    thread.join(60)
    assert (found.collective, is_guess(found.collective)) == (
        f"perhaps the GPU, in {method}()",
        True,
    )
    assert found.caller == "step (train.py:1)"


def test_the_line_names_what_helps_where_batches_are_uneven() -> None:
    trains = replace(
        state(0, "x", "backward, which reduces the gradients"), caller="step (a.py:9)"
    )
    evaluates = replace(state(1, "x", "barrier"), caller="validation_step (a.py:20)")
    told = verdict(trains, evaluates).text()
    ran_out = (
        "rank 1 ran out of training batches: `NEMO_PATCHES_STOP_TOGETHER=training`"
    )
    assert f"if {ran_out}; if it is uneven evaluation" in told
    later = replace(trains, batch="7 of epoch 3 (train): cuts valid-1")
    assert f"most likely {ran_out}" in verdict(later, evaluates).text()
    other = replace(state(1, "x", "barrier"), caller="save (a.py:20)")
    assert "`NEMO_PATCHES_METRICS=deferred`" in verdict(trains, other).text()
    anew = replace(trains, batch="0 of epoch 3 (train): cuts valid-1")
    told = verdict(anew, evaluates).text()
    assert "most likely uneven evaluation: `NEMO_PATCHES_METRICS=deferred`" in told


def test_a_long_line_names_every_group_with_four_functions_of_its_place() -> None:
    reads = "read (a.py:1) < main (b.py:2) < go (c.py:3) < on (d.py:4) < end (e.py:5) < 3 more, in: get (python/queue.py:1)"
    reads = replace(
        state(0, f"{reads} < poll (torch/x.py:5)"),
        worker_states=("worker 3 (pid 4790) is in open() of /data/shard_17.tar",),
        batch="0 of epoch 3 (train): cuts a, b",
    )
    others = [
        replace(state(rank, "x", GRADIENTS), caller="step (c.py:7)") for rank in (1, 2)
    ]
    verdict_ = verdict(reads, *others)
    assert verdict_.text() == (
        "rank 0 (node0, pid 100): read (a.py:1) < main (b.py:2) < go (c.py:3) < on (d.py:4), in: get"
        " (python/queue.py:1) < poll (torch/x.py:5); its data loader's worker 3 (pid 4790) is in open() of /data/shard_17.tar; last batch 0 of"
        f" epoch 3 (train): cuts a, b | ranks 1-2: {GRADIENTS}, in step (c.py:7)"
    )
    assert verdict_.groups[0].where == reads.where  # as the report has it
    short = verdict(state(0, "read (a.py:1) < main (b.py:2)"), *waiting(1))
    assert "read (a.py:1) < main (b.py:2) | " in short.text()


def test_process_1_is_a_containers() -> None:
    reads = replace(state(0, "read (a.py:1)"), pid=1)
    where = "rank 0 (node0, pid 1 in its container)"
    assert f"{where}: read (a.py:1)" in verdict(reads, *waiting(1)).text()
    lone = MissingRank(0, SILENT, "node0", 1, where=ANSWERS_NOTHING)
    assert str(lone).startswith(f"{where} answers nothing")
    assert str(MissingRank(0, SILENT, where=ANSWERS_NOTHING)).startswith("rank 0 ans")


def test_a_place_has_one_function_of_each_library_and_no_count() -> None:
    done = threading.Event()
    names: dict[str, Any] = {}
    exec(compile("def step(wait): wait()", "/my/train.py", "exec"), names)
    thread = threading.Thread(target=names["step"], args=(done.wait,))
    thread.start()
    wait_until(lambda: "in: wait" in stacks.where(thread.ident or 0))
    where = stacks.where(thread.ident or 0)
    done.set()
    thread.join(60)
    assert re.fullmatch(
        r"step \(.*train\.py:1\), in: wait \(python/threading\.py:\d+\)", where
    ), where


def short(seen: Verdict, per_host: int, size: int) -> list[str]:
    """By rank; empty: it says all."""
    hosts = [f"node{rank // per_host}" for rank in range(size)]
    return [seen.short(rank, hosts) for rank in range(size)]


def test_of_many_ranks_the_first_of_each_host_says_all_and_the_others_where_they_are() -> (
    None
):
    waits = waiting(*range(5), *range(6, 16))
    seen = verdict(*waits, state(5, "read_audio (dataset.py:41)"))
    lines = short(seen, 8, 16)
    assert [rank for rank, line in enumerate(lines) if not line] == [0, 8]
    step = f"{GRADIENTS}, in step (train.py:7)"
    told = "who is waited for: rank 5, in rank"
    assert lines[3] == f"rank 3: {step} | {told} 0's line"
    assert lines[15] == f"rank 15: {step} | {told} 8's line"
    assert lines[5] == f"rank 5: read_audio (dataset.py:41) | {told} 0's line"


def test_a_rank_that_logs_nothing_is_not_the_one_that_says_all() -> None:
    """Rank 0 computes, and rank 8 is stopped: what they log comes later, or never."""
    computes = replace(state(0, "train (train.py:9)"), goes_on=COMPUTING)
    waits = waiting(*range(1, 8), *range(9, 16))
    seen = verdict(computes, *waits, size=16, silent={8: NO_ANSWER})
    lines = short(seen, 8, 16)
    assert [rank for rank, line in enumerate(lines) if not line] == [1, 9]
    assert lines[2].endswith(" | where all are, in rank 1's line")


def test_of_few_ranks_each_says_all() -> None:
    seen = verdict(*waiting(*range(7)), state(7, "read_audio (dataset.py:41)"))
    assert short(seen, 8, 8) == [""] * 8
