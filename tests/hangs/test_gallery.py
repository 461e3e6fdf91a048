"""Public hangs, each as a small job on two real ranks: what stock does, and what nemo_patches does.

The jobs are those of `nemo-patches demo --hang NAME`. All that are selected (`-k NAME`) run beside each other, forked
from one import of NeMo.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pytest
import ranks  # its fork server has imported NeMo

from nemo_patches.tools.demo import logs
from nemo_patches.tools.demo.hangs import runs
from nemo_patches.tools.demo.hangs.gallery import HANGS_BY_NAME, NAMED
from nemo_patches.tools.demo.jobs import HANG_STALL_TIMEOUT

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
AT_ONCE = 6  # they mostly wait
LINE = timedelta(seconds=5)  # after stall_timeout, on an idle machine
ROOM = timedelta(seconds=15)  # what a busy one may add
Results = Mapping[tuple[str, bool], runs.Result]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of stock and with nemo_patches, by name."""
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    pairs = [(HANGS_BY_NAME[name], patched) for name in names for patched in (False, True)]
    found = runs.run(pairs, tmp_path_factory.mktemp("hangs"), AT_ONCE, ranks.free_port)
    return {(each.hang.name, each.patched): each for each in found}


@pytest.mark.parametrize("name", HANGS_BY_NAME)
def test_stock_hangs_or_dies_and_nemo_patches_ends_or_names_it(name: str, results: Results) -> None:
    for patched in (False, True):
        result = results[name, patched]
        assert result.as_expected, (result.ending, result.ranks, [logs.lines(log)[-15:] for log in result.logs])
        if patched and result.ending == NAMED:
            assert all(line.after < HANG_STALL_TIMEOUT + LINE + ROOM for line in result.lines), result.lines
