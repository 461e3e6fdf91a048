"""NeMo with the diff of its series, without nemo_patches: its ranks, and what they compute, against
stock NeMo.

`make test` runs the scenarios of IN_MAKE_TEST, `make test-vendored` all.
TEST_VENDORED names another NeMo than the installed one, a folder with `nemo/`, as `make
test-vendored` does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from interpreters import CHECKOUT, environment, run

from nemo_patches.vendoring import checkouts

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone, pytest.mark.timeout(2 * 800)]
PROGRAM = Path(__file__).parent / "vendored" / "scenarios.py"
TIMEOUT_S = 4.0  # as in PROGRAM
SLACK_S = 3.0  # what a busy machine may add to a call
EXIT_S = 60.0  # an exit that hangs takes minutes
LIMIT_S = 800.0  # for all scenarios, which take a minute on an idle machine
IN_MAKE_TEST = (
    "late",
    "skip",
    "two encoders",
    "stopped rank",
    "dead",
    "leaves",
    "growth0",
    "healthy",
    "watch",
    "fifo",
    "forked",
)
SCENARIOS = (
    *IN_MAKE_TEST,
    "compiled",
    "extra",
    "stopped server",
    "uneven",
    "leaves unconnected",
    "growth1",
    "flag is off",
    "switched off",
    "again",
    "inference",
    "lives on",
    "ends first",
    "ends soon",
    "killed",
    "many encoders",
    "many groups",
    "long evaluation",
    "hidden group",
)
Rank = dict[str, Any]


def stock() -> Path:
    """A folder with `nemo/`."""
    spec = importlib.util.find_spec("nemo")
    assert spec is not None and spec.origin is not None
    return Path(os.environ.get("TEST_VENDORED", Path(spec.origin).parent.parent))


def each(*names: str) -> pytest.MarkDecorator:
    """A test for each of these scenarios."""
    cases = [
        name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.weekly)
        for name in names
    ]
    return pytest.mark.parametrize("name", cases)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Rank]]:
    """What each scenario's ranks did, by its name; "stock" is the healthy one on stock NeMo."""
    tests = [item for item in request.session.items if item.path == request.path]
    is_weekly = any(item.get_closest_marker("weekly") for item in tests)
    tree = tmp_path_factory.mktemp("vendored")
    # With what is compiled, which holds for files of the same time.
    shutil.copytree(stock() / "nemo", tree / "nemo")
    series = ".".join(checkouts.read(tree).version.split(".")[:2])
    git = [
        "git",
        "apply",
        "--whitespace=nowarn",
        str(CHECKOUT / "patches" / f"nemo-{series}.diff"),
    ]
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    subprocess.run(git, cwd=tree, env=outside, check=True, timeout=60)
    results = run_program(
        tree, "edited", *(SCENARIOS if is_weekly else IN_MAKE_TEST)
    ) | {"stock": run_program(stock(), "stock", "healthy")["healthy"]}
    shutil.rmtree(tree)
    return results


def run_program(nemo: Path, *arguments: str) -> dict[str, list[Rank]]:
    beside = map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    done = run(
        [sys.executable, PROGRAM, *arguments],
        environment(nemo, *beside),
        LIMIT_S,
        cwd=nemo,
    )
    lines = [
        json.loads(line)
        for line in done.stdout.splitlines()
        if line.startswith('{"nemo": ')
    ]
    assert len(lines) == len(arguments) - 1, done.stderr[-3000:]
    assert {line["nemo"] for line in lines} == {str(nemo / "nemo" / "__init__.py")}
    return {line["name"]: line["ranks"] for line in lines}


def values(ranks: list[Rank]) -> list[Any]:
    for rank in ranks:
        assert (rank["code"], rank.get("error")) == (0, None), (
            rank.get("error", "") + rank["stderr"]
        )
    return [rank["value"] for rank in ranks]


def lines(rank: Rank, *words: str) -> list[str]:
    own = [line for line in rank["stderr"].splitlines() if line.startswith("[rank ")]
    return [line for line in own if all(word in line for word in words)]


def timed_out(call: dict[str, Any]) -> bool:
    return bool(
        TIMEOUT_S - 0.1 <= call["seconds"] < TIMEOUT_S + SLACK_S
        and call["max"] == call["length"]
    )


def test_a_late_rank_is_waited_for_once_and_named(found: dict[str, list[Rank]]) -> None:
    first, second = values(found["late"])
    assert timed_out(first["first"])
    assert second["first"]["seconds"] < TIMEOUT_S
    own = (
        "[rank 0 of 2] not every rank's length came within 4 s,"
        " using this rank's own, 300; "
    )
    assert lines(found["late"][0], "not every rank") == [
        f"{own}of 3 calls rank 1 made 2"
    ]
    assert lines(found["late"][1]) == []


@each(
    "skip",
    "extra",
    "two encoders",
    "uneven",
    "stopped rank",
    "stopped server",
    "again",
    "many encoders",
    "long evaluation",
    "compiled",
    "hidden group",
)
def test_they_agree_again(name: str, found: dict[str, list[Rank]]) -> None:
    """The program has asserted it; no call waits longer than the timeout, and none has less than
    its own length.
    """
    for value in values(found[name]):
        for call in value["then"]:
            assert call["seconds"] < TIMEOUT_S + SLACK_S
            assert call["max"] >= call["length"]


@each("stopped rank", "stopped server")
def test_a_stopped_rank_costs_one_wait(name: str, found: dict[str, list[Rank]]) -> None:
    """Also if it has the store's server: no call asks the store."""
    (waiting,) = (value["first"] for value in values(found[name]) if "first" in value)
    assert timed_out(waiting[0])
    assert all(call["seconds"] < SLACK_S for call in waiting[1:])


def test_a_dead_rank_costs_no_wait_and_one_line(found: dict[str, list[Rank]]) -> None:
    first, second = found["dead"]
    assert second["code"] == -signal.SIGKILL
    (calls,) = values([first])
    assert sum(call["seconds"] for call in calls) < 15  # no wait of 20 s
    assert [call["max"] for call in calls] == [300, 310, 320]
    assert len(lines(first, "] the length sync has ended")) == len(lines(first)) == 1


@each("leaves", "leaves unconnected")
def test_an_exit_waits_for_no_rank(name: str, found: dict[str, list[Rank]]) -> None:
    first, _ = values(found[name])
    assert timed_out(first)
    assert found[name][0]["exit_s"] < EXIT_S


@each("growth0", "growth1")
def test_ranks_with_tables_of_their_own_have_no_wrong_row(
    name: str, found: dict[str, list[Rank]]
) -> None:
    long_rank = int(name[-1])
    for rank, value in enumerate(values(found[name])):
        assert {"conformer", "conv_asr"} <= value.keys()
        for wrong, longest in value.values():
            assert wrong == 0
            assert (longest >= 1200) == (rank == long_rank)


def test_a_healthy_job_computes_what_stock_computes_to_the_bit(
    found: dict[str, list[Rank]],
) -> None:
    for edited, before in zip(
        values(found["healthy"]), values(found["stock"]), strict=True
    ):
        assert edited == before
        for name in edited:
            assert len(set(edited[name]["sums"])) > 3
            assert edited[name]["tables"]
    assert [lines(rank) for rank in found["healthy"]] == [[], []]


def test_the_watch_names_the_rank_that_does_not_call(
    found: dict[str, list[Rank]],
) -> None:
    """Its own log says it, too, and nothing before: six calls were made."""
    values(found["watch"])
    text = "no encoder call for 1 s; of 6 calls rank 2 made 5; this rank is at "
    for rank in (0, 1):
        (line,) = lines(found["watch"][rank], "of 6 calls")
        assert line.startswith(f"[rank {rank} of 3] {text}{PROGRAM.parent.parent}/")


@pytest.mark.weekly
def test_with_the_flag_off_nobody_waits_and_the_watch_counts(
    found: dict[str, list[Rank]],
) -> None:
    if values(found["flag is off"]) != ["no flag", "no flag"]:  # NeMo 2.1
        assert values(found["flag is off"]) == [300, 60]
        assert lines(found["flag is off"][0], "of 1 calls rank 1 made 0")


@pytest.mark.weekly
def test_switched_off_it_does_nothing(found: dict[str, list[Rank]]) -> None:
    for rank, value in enumerate(values(found["switched off"])):
        assert value["seconds"] < SLACK_S
        assert (value["max"], value["threads"]) == (300 + rank, 0)


@pytest.mark.weekly
def test_a_validation_longer_than_the_table_leaves_one_that_training_can_use(
    found: dict[str, list[Rank]],
) -> None:
    for value in values(found["inference"]):
        assert all(wrong == 0 and longest >= 1200 for wrong, longest in value.values())


@pytest.mark.weekly
def test_after_a_clean_end_nothing_is_said(found: dict[str, list[Rank]]) -> None:
    """Neither by us nor, as a request to a server that has ended would make it, by c10d."""
    assert values(found["lives on"]) == ["", ""]
    first, second = found["ends first"]
    values([first, second])
    assert lines(first) == []
    assert [line.split("; this rank")[0] for line in lines(second, "no encoder")] == [
        "[rank 1 of 2] no encoder call for 1 s; the job's store has ended"
    ]
    for rank in found["lives on"] + found["ends first"]:
        assert "frame #" not in rank["stderr"]


@pytest.mark.weekly
def test_a_line_is_said_before_a_rank_that_timed_out_can_end(
    found: dict[str, list[Rank]],
) -> None:
    (line,) = lines(found["ends soon"][0], "not every rank")
    assert line.endswith("own, 300; of 1 calls rank 1 made 0")


@pytest.mark.weekly
def test_a_count_that_is_not_known_is_told_as_the_least(
    found: dict[str, list[Rank]],
) -> None:
    (line,) = lines(found["killed"][0], "no encoder call")
    assert re.search(r"; of 4 calls rank 1 made at least [123]; ", line), line


@pytest.mark.weekly
def test_an_encoder_that_is_dropped_costs_nothing(found: dict[str, list[Rank]]) -> None:
    for value in values(found["many encoders"]):
        assert value["after"] == value["before"]


@pytest.mark.weekly
def test_process_groups_that_end_cost_nothing(found: dict[str, list[Rank]]) -> None:
    """But the round of the first group that stays in flight."""
    first, second = values(found["many groups"])
    assert timed_out_after(first[0], 2.0)
    for calls in (first[1:], second):
        assert [call["max"] for call in calls] == [101] * 11
        # Each group costs descriptors and threads; c10d's own threads end in their own time.
        for now, before in zip(calls[-1]["now"], calls[1]["now"], strict=True):
            assert now <= before + 2


def timed_out_after(call: dict[str, Any], limit: float) -> bool:
    return bool(limit - 0.1 <= call["seconds"] and call["max"] == call["length"])


def test_ranks_that_wait_outside_the_encoder_say_so_and_where(
    found: dict[str, list[Rank]],
) -> None:
    values(found["fifo"])
    text = "no encoder call for 2 s; all ranks made 5: they wait outside the encoder"
    for rank, function in enumerate(("fifo", "__getitem__")):
        (line,) = lines(found["fifo"][rank], "no encoder call")
        assert line.startswith(f"[rank {rank} of 2] {text}; this rank is at {PROGRAM}:")
        assert line.endswith(f" ({function})")


@pytest.mark.weekly
def test_a_long_evaluation_is_no_training(found: dict[str, list[Rank]]) -> None:
    for value in values(found["long evaluation"]):
        assert [call["max"] for call in value["then"]] == [301, 401]


@pytest.mark.weekly
def test_one_graph_takes_part_and_has_a_length_of_its_own(
    found: dict[str, list[Rank]],
) -> None:
    for rank, value in enumerate(values(found["compiled"])):
        assert value["graph"] == [[50, 101], [70, 101], [300 + rank, 300 + rank]]
        assert value["then"][0]["max"] == 401
    assert [lines(rank) for rank in found["compiled"]] == [[], []]


def test_a_forked_child_is_no_rank(found: dict[str, list[Rank]]) -> None:
    for value in values(found["forked"]):
        assert [value[0], value[2]] == [0, 0]
        assert [value[1]["max"], value[3]["max"]] == [201, 211]
    assert [lines(rank) for rank in found["forked"]] == [[], []]


# The file alone needs torch, and neither NeMo nor nemo_patches.
SETTINGS = """
import os, runpy, sys
sys.modules.update(nemo=None, nemo_patches=None)
file, *given = sys.argv[1:]
for variable, value in (one.split("=") for one in given):
    os.environ[variable] = value
    try:
        found = runpy.run_path(file)
        print(found["TIMEOUT_S"], found["WATCH_S"])
    except ValueError as error:
        print(error)
    del os.environ[variable]
"""


def test_the_settings_are_seconds() -> None:
    file = CHECKOUT / "patches" / "bounded_length_sync.py"
    wrong = ("soon", "-1", "nan", "inf", "86401")
    given = [
        "NEMO_LENGTH_SYNC_TIMEOUT=2.5",
        "NEMO_ENCODER_WATCH_S=0",
        *(f"NEMO_LENGTH_SYNC_TIMEOUT={text}" for text in wrong),
    ]
    done = run([sys.executable, "-c", SETTINGS, file, *given], environment(), 300)
    assert done.stdout.splitlines() == [
        "2.5 60.0",
        "10.0 0.0",
        *(
            f"NEMO_LENGTH_SYNC_TIMEOUT={text!r} is not allowed; allowed: 0 (off) to"
            " 86400 seconds"
            for text in wrong
        ),
    ], done.stderr
