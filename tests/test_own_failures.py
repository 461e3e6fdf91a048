"""What a later version sends, and what fails in nemo_patches itself: no living rank is called gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from exchange_job import LIMIT_S, Job, Rank, heard, silences
from ranks import Said, wait_until

from nemo_patches.channel import link
from nemo_patches.channel.answers import LEFT, NO_WATCH, NOT_HEARD, Answers
from nemo_patches.sync import encoder_methods, rank_log

pytestmark = pytest.mark.one_nemo


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    yield handler
    rank_log.logger.removeHandler(handler)


def sends(rank: Rank, kind: int, number: int, value: int, body: bytes = b"") -> None:
    """To all that it is connected to, twice."""

    def send() -> None:
        for one in rank.exchange._links.values():
            for _ in range(2):
                one.send(kind, 0, number, value, body)

    rank.exchange.post(send)


def said_of(rank: Rank) -> list[str]:
    return rank.said


@pytest.mark.parametrize(
    ("kind", "number", "value", "body", "what"),
    [
        (200, 1, 1, b"", "a message of kind 200"),
        (link.STOP + 1, 0, 0, b"x" * 5000, f"of kind {link.STOP + 1}"),
        (link.OVER, 0, 9, b"", "an end of kind 9"),
        (link.OVER, 0, -1, b"", "an end of kind -1"),
    ],
)
def test_what_a_later_version_may_send_is_passed_over_and_said_once(
    kind: int, number: int, value: int, body: bytes, what: str
) -> None:
    with Job(4) as job:
        job.do([0], sends, kind, number, value, body)
        job.do(job.all, Rank.hold_rounds, 20)
        for lines in job.do(job.others(0), said_of):
            (line,) = lines
            assert what in line
            assert "does not know" in line
        assert all(len(heard(one)) == 4 for _, one in job.do(job.all, Rank.ask))
        assert set(job.do(job.all, Rank.why_over)) == {""}


def test_an_answer_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    answers = Answers()
    answers.add_json(
        {
            "groups": [["key", [[0, 0]], 1.0, {"rank": 0}, "more"]],
            "silent": [["asleep", [[1, 1]], "more"], [LEFT, [[2, 2]]]],
            "more": 1,
        }
    )
    assert answers.heard == {0}
    assert {rank: one.how for rank, one in answers.silent.items()} == {
        1: NOT_HEARD,
        2: LEFT,
    }


def fails(rank: Rank, times: int) -> None:
    """Any error of ours in the exchange's thread."""
    from nemo_patches.channel.exchange import Exchange

    step = Exchange._step
    left = [times]

    def broken(self: Exchange) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise IndexError("a bug")
        step(self)

    Exchange._step = broken  # type: ignore[method-assign]
    rank.exchange._wake()


def wait_for_end(rank: Rank) -> str:
    wait_until(lambda: rank.exchange.over, LIMIT_S)
    return rank.exchange.over


@pytest.mark.parametrize("culprit", [0, 1, 5])
@pytest.mark.parametrize("times", [1, 99])
def test_a_rank_whose_exchange_fails_is_never_called_gone(
    culprit: int, times: int
) -> None:
    with Job(6, per_host=2) as job:
        job.do(job.all, Rank.hold_rounds, 3)
        job.do([culprit], fails, times)
        expected = f"rank {culprit} has had an error of nemo_patches' own"
        for over in job.do(job.all, wait_for_end):
            assert over.startswith(expected)
        (line,) = job.do([culprit], said_of)[0]
        assert "please report it: IndexError('a bug')" in line
        for asker in job.others(culprit)[:2]:
            told = job.do([asker], Rank.ask)[0][1]
            if times == 1:  # it can still be asked
                assert len(heard(told)) == 6
            else:
                assert silences(told) == {culprit: NO_WATCH}


def test_a_rank_that_failed_and_ends_later_has_left() -> None:
    with Job(3) as job:
        job.do(job.all, Rank.hold_rounds, 3)
        job.do([2], fails, 1)
        job.do(job.all, wait_for_end)
        job.do([2], Rank.close)
        wait_until(lambda: silences(job.do([0], Rank.ask)[0][1]) == {2: LEFT}, LIMIT_S)


def test_an_error_in_the_line_of_the_first_call_is_said_and_comes_no_further(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(encoder_methods, "flag_text", None)  # any bug of ours
    first_calls = encoder_methods._FirstCalls()
    for _ in range(2):
        first_calls.say(torch.nn.Identity(), in_group=True)
    (line,) = said.lines
    assert "the first encoder call has ended by an error of its own" in line
