"""The supported range is stated once, and `make test-matrix` covers it with the releases that it says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from ranks import run_ranks

from nemo_patches.patching.admission import SUPPORTED_SERIES

MAKEFILE = Path(__file__).parent.parent / "Makefile"


def test_the_matrix_has_one_release_of_each_supported_series() -> None:
    (releases,) = re.findall(r"^MATRIX = (.+)$", MAKEFILE.read_text(), re.MULTILINE)
    assert tuple(release.rpartition(".")[0] for release in releases.split()) == SUPPORTED_SERIES


def this_nemo(rank: int = 0, size: int = 1) -> str:
    import nemo.collections.asr  # so that the version is that of the code under test
    import nemo.package_info

    assert Path(nemo.collections.asr.__file__).is_relative_to(Path(nemo.package_info.__file__).parent)
    return str(nemo.package_info.__version__)


@pytest.mark.matrix
def test_this_process_and_the_ranks_run_the_nemo_that_the_matrix_names() -> None:
    expected = os.environ.get("TEST_NEMO") or this_nemo()
    ranks = [result.value for result in run_ranks(this_nemo, 2, group=False)]
    assert [this_nemo(), *ranks] == [expected] * 3
