"""Public hangs, each as a small job on two real ranks: what stock does, and what nemo_patches does.

All that are selected (`-k NAME`) run beside each other, forked from one import of NeMo. `make test`
runs them with nemo_patches, `make test-matrix` as stock, too.
`python tests/hangs/run.py NAME` shows one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta

import pytest
import run
import runs
from gallery import HANGS_BY_NAME, NAMED
from scenario import STALL_TIMEOUT_S

from nemo_patches.tools.demo import job_logs

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
AT_ONCE = 6  # they mostly wait
STALL_TIMEOUT = timedelta(seconds=STALL_TIMEOUT_S)
LINE = timedelta(seconds=5)  # after stall_timeout, on an idle machine
ROOM = timedelta(seconds=15)  # what a busy one may add
Results = Mapping[tuple[str, bool], runs.Result]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Of the tests that are selected, by name and whether nemo_patches is applied."""
    selected = (
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    )
    runs_of = dict.fromkeys((each["name"], each["patched"]) for each in selected)
    pairs = [(HANGS_BY_NAME[name], patched) for name, patched in runs_of]
    found = runs.run(pairs, tmp_path_factory.mktemp("hangs"), AT_ONCE)
    return {(each.hang.name, each.patched): each for each in found}


# Stock is always the same here: NeMo's, Lightning's and torch's versions are pinned.
STOCK = pytest.param(False, id="stock", marks=pytest.mark.weekly)
OURS = pytest.param(True, id="nemo_patches")


@pytest.mark.parametrize("name", HANGS_BY_NAME)
@pytest.mark.parametrize("patched", [STOCK, OURS])
def test_stock_hangs_or_dies_and_nemo_patches_ends_or_names_it(
    name: str, patched: bool, results: Results
) -> None:
    result = results[name, patched]
    last = [line for log in result.logs for line in job_logs.lines(log)[-40:]]
    assert result.as_expected, "\n".join([str(result), *last])
    if patched and result.ending == NAMED:
        assert all(line.after < STALL_TIMEOUT + LINE + ROOM for line in result.lines), (
            result.lines
        )


STOOD = (
    r"  rank 0: backward, which reduces the gradients, in skipped_backward \(steps.py:\d+\)\n"
    r"  rank 1: DDP's buffer broadcast, in \w+ \(\w+.py:\d+\)"
)


@pytest.mark.parametrize("name", ["skipped-backward"])
@pytest.mark.parametrize(
    ("patched", "said"),
    [
        pytest.param(False, f"stock hangs:\n{STOOD}$", marks=pytest.mark.weekly),
        (
            True,
            rf"with nemo_patches it is named:\n{STOOD}\n  its line, after \d+ s: rank 0 ",
        ),
    ],
)
def test_a_result_says_where_each_rank_stands(
    name: str, patched: bool, said: str, results: Results
) -> None:
    assert re.match(said, str(results[name, patched]))


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["nest"]) == 2
    assert (
        "run.py: nest is not allowed; allowed: one of length-sync, growing-positions, "
        in capsys.readouterr().out
    )
