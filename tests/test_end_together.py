"""The rounds of StopTogether over random schedules: all ranks' passes end together, or every rank
raises; none hangs.

The ranks are threads, and the transport is a MAX in memory: what is tested is who says what, and
what is made of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Said
from torch.utils.data import DataLoader, IterableDataset

from nemo_patches.channel.extremes import packed, unpacked
from nemo_patches.channel.rounds import Latest, RoundFailed
from nemo_patches.options import even_loader
from nemo_patches.options.agreement import Agreement, Position, StopTogetherError
from nemo_patches.options.even_loader import EvenLoader
from nemo_patches.sync.rank_log import logger

pytestmark = pytest.mark.one_nemo
LIMIT_S = 60.0


class Job:
    """All ranks' rounds. A rank that ends ends the rounds, as the exchange's does."""

    def __init__(self, size: int) -> None:
        self.size, self.ended = size, ""
        self.changed = threading.Condition()
        self.values: dict[tuple[str, int], dict[int, int]] = {}
        self.stopped: dict[str, int] = {}  # by key: from which round on there is none


class MemoryRounds:
    def __init__(self, job: Job, rank: int, key: str) -> None:
        self.job, self.rank, self.key = job, rank, key
        self.latest = Latest()
        self.issued = 0
        self.over = ""

    def close(self, why: str = "closed") -> None:
        self.over = self.over or why

    def leave(self) -> None:
        self.close()
        with self.job.changed:
            stop = min(self.issued + 1, self.job.stopped.get(self.key, self.issued + 1))
            self.job.stopped[self.key] = stop
            self.job.changed.notify_all()

    def is_stopped(self) -> bool:
        return self.issued >= self.job.stopped.get(self.key, self.issued + 1)

    def issue(self, value: int) -> None:
        with self.job.changed:
            self.issued = self.latest.number + 1
            self.job.values.setdefault((self.key, self.issued), {})[self.rank] = value
            self.job.changed.notify_all()

    def wait(self, limit: timedelta) -> int | None:
        arrived = self.job.values[self.key, self.issued]
        with self.job.changed:
            assert self.job.changed.wait_for(
                lambda: (
                    len(arrived) == self.job.size or self.job.ended or self.is_stopped()
                ),
                LIMIT_S,
            )
        if len(arrived) < self.job.size:
            raise RoundFailed(self.job.ended or "a rank has stopped that")
        self.latest = Latest(self.issued, max(arrived.values()))
        return self.latest.result


def rank_of(job: Job, rank: int) -> Any:
    exchange = SimpleNamespace(
        rank=rank, rounds=lambda key: MemoryRounds(job, rank, key)
    )
    return SimpleNamespace(exchange=exchange, group=None, begin=lambda: None)


class Source:
    """A loader whose passes have these numbers of batches; pass_number: the present one's, also if
    it begins again.
    """

    def __init__(self, passes: list[int]) -> None:
        self._passes, self.pass_number = passes, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._passes[self.pass_number]))


def ran(schedule: list[list[tuple[int, int]]]) -> tuple[list[list[int]], list[str]]:
    """Of each rank: how many batches each pass gave, and what was raised (empty: nothing).

    schedule: of each rank, of each pass: how many batches its loader has, and after how many it
    leaves the pass.
    """
    job = Job(len(schedule))
    given_out: list[list[int]] = [[] for _ in schedule]
    raised = [""] * len(schedule)

    def run(rank: int) -> None:
        try:
            agreement = Agreement(rank_of(job, rank), "test", 1, "numbers")
            source = Source([batches for batches, _ in schedule[rank]])
            loader = EvenLoader(source, agreement)
            for source.pass_number, (_, leaves_after) in enumerate(schedule[rank]):
                given_out[rank].append(0)
                for _ in loader:
                    given_out[rank][-1] += 1
                    if given_out[rank][-1] == leaves_after:
                        break
        except StopTogetherError as error:
            raised[rank] = str(error)
        with job.changed:
            job.ended = job.ended or f"rank {rank} has left"
            job.changed.notify_all()

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True)
        for rank in range(len(schedule))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a rank hangs"
    return given_out, raised


BATCHES = st.integers(1, 5)
NEVER = 99


@settings(max_examples=60)
@given(
    st.integers(2, 4).flatmap(
        lambda size: st.lists(
            st.lists(BATCHES, min_size=size, max_size=size), min_size=1
        )
    )
)
def test_all_ranks_passes_end_where_the_first_ranks_does(
    passes: list[list[int]],
) -> None:
    given_out, raised = ran(
        [
            [(batches, NEVER) for batches in of_rank]
            for of_rank in zip(*passes, strict=True)
        ]
    )
    assert raised == [""] * len(raised)
    assert given_out == [[min(batches) for batches in passes]] * len(raised)


@settings(max_examples=60)
@given(st.lists(st.tuples(BATCHES, BATCHES, BATCHES), min_size=1, max_size=4))
def test_ranks_that_leave_a_pass_at_the_same_batch_go_on(
    passes: list[tuple[int, int, int]],
) -> None:
    given_out, raised = ran(
        [
            [(one, leave) for one, _, leave in passes],
            [(two, leave) for _, two, leave in passes],
        ]
    )
    assert raised == ["", ""]
    assert given_out == [[min(of_pass) for of_pass in passes]] * 2


@settings(max_examples=80)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), BATCHES), min_size=3, max_size=3),
        min_size=2,
        max_size=3,
    )
)
def test_whatever_they_do_no_rank_gets_a_batch_that_another_has_not_said_it_has(
    schedule: list[list[tuple[int, int]]],
) -> None:
    given_out, raised = ran(schedule)
    for number in range(3):
        most = min(of_rank[number][0] for of_rank in schedule)
        assert all(
            passes[number] <= most for passes in given_out if len(passes) > number
        )
    lengths = {
        len(passes) for passes in given_out if not raised[given_out.index(passes)]
    }
    assert lengths <= {3}  # who has not raised has gone through all
    if any("out of step" in text for text in raised):
        assert all(raised)  # nobody goes on alone


def test_a_rank_without_a_batch_raises_on_all() -> None:
    given_out, raised = ran([[(3, NEVER)], [(0, NEVER)], [(2, NEVER)]])
    assert given_out == [[0], [0], [0]]
    assert all(
        "test loader 1 (numbers): rank 1 has no batch at all" in text for text in raised
    )


def test_before_torch_distributed_it_does_nothing_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Said()
    monkeypatch.setattr(even_loader, "even_loaders", even_loader.EvenLoaders())
    assert even_loader.stop_together([1]) == [1]  # alone
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert even_loader.stop_together([1]) == even_loader.stop_together([1]) == [1]
    logger.removeHandler(said)
    (line,) = said.lines
    assert (
        "ranks do not end their passes together: torch.distributed is not initialized"
        in line
    )


class ItsOwnIterator(IterableDataset[int]):
    """Its next pass goes on with one that was left."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return 0


class OwnSampler:
    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return 0


class Wrapped(IterableDataset[int]):
    """Around one that is its own iterator."""

    def __init__(self) -> None:
        self.dataset = ItsOwnIterator()

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(ItsOwnIterator()), "test_end_together.ItsOwnIterator"),
        (DataLoader(Wrapped()), "test_end_together.ItsOwnIterator"),
        (DataLoader([1, 2, 3], sampler=OwnSampler()), "test_end_together.OwnSampler"),
        ((number for number in range(3)), "builtins.generator"),
    ],
    ids=["data set", "inner data set", "sampler", "generator"],
)
def test_a_loader_that_may_go_on_with_a_cut_pass_is_refused_by_name(
    loader: Any, name: str
) -> None:
    with pytest.raises(StopTogetherError) as error:
        EvenLoader(loader, Agreement(rank_of(Job(1), 0), "training", 1, "numbers"))
    text = str(error.value)
    assert text.startswith(
        f"training loader 1 (numbers): stop_together does not allow {name}: it is its"
        " own iterator"
    )
    assert (
        "allowed: NeMo's and Lhotse's own, and loaders, data sets and samplers whose"
        " __iter__ begins" in text
    )


@pytest.mark.parametrize(
    "loader",
    [DataLoader([1, 2]), DataLoader([1, 2], shuffle=True, batch_size=2), [1, 2]],
    ids=["torch's", "torch's shuffled", "list"],
)
def test_what_begins_a_pass_anew_is_taken(loader: Any) -> None:
    EvenLoader(loader, Agreement(rank_of(Job(1), 0), "training", 1, "numbers"))


def test_out_of_step_names_a_rank_at_each_end_on_all() -> None:
    _, raised = ran([[(9, 2), (9, NEVER)], [(9, 4), (9, NEVER)]])
    assert len(set(raised)) == 1
    assert "rank 1 is at batch 4 of pass 1, rank 0 is at batch 1 of pass 2" in raised[0]


@given(st.lists(st.integers(0, (1 << 43) - 1), min_size=1, max_size=5))
def test_extremes_have_a_rank_that_has_them_and_fit_an_int64(values: list[int]) -> None:
    sent = [packed(value, rank) for rank, value in enumerate(values)]
    assert all(0 <= number < 1 << 63 for pair in sent for number in pair)
    extremes = unpacked(max(high for high, _ in sent), max(low for _, low in sent))
    assert extremes.highest.value == max(values) == values[extremes.highest.rank]
    assert extremes.lowest.value == min(values) == values[extremes.lowest.rank]


@given(st.integers(1, (1 << 16) - 1), st.integers(1, (1 << 26) - 1), st.booleans())
def test_a_place_is_read_as_it_was_said(number: int, batch: int, ended: bool) -> None:
    assert Position.of(Position(number, batch, ended).value()) == Position(
        number, batch, ended
    )
