"""The supported range is stated once, and `make test-matrix` covers it with the releases that it
says.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from ranks import run_ranks

from nemo_patches.patching.admission import (
    DIFFS_ONLY,
    SUPPORTED_SERIES,
    UnsupportedNeMo,
    require_supported,
)

MAKEFILE = Path(__file__).parent.parent / "Makefile"


def test_the_matrix_has_one_release_of_each_supported_series() -> None:
    (releases,) = re.findall(r"^MATRIX = (.+)$", MAKEFILE.read_text(), re.MULTILINE)
    assert (
        tuple(release.rpartition(".")[0] for release in releases.split())
        == SUPPORTED_SERIES
    )


def test_why_two_series_have_diffs_only_is_said_where_the_refusal_points() -> None:
    both = " and ".join(DIFFS_ONLY)
    for series in DIFFS_ONLY:
        with pytest.raises(
            UnsupportedNeMo,
            match=f"for {both} there are diffs, and docs/vendors.md says why",
        ):
            require_supported(f"{series}.0", {})
    page = (MAKEFILE.parent / "docs" / "vendors.md").read_text()
    assert f"For {both} there are diffs, and `apply()` refuses them" in page
    assert not set(DIFFS_ONLY) & set(SUPPORTED_SERIES)


@pytest.mark.parametrize("version", ["2.8.0", "1.22.0", "3.1.0", "2.9.0rc1"])
def test_an_unknown_series_is_compared_by_its_code(version: str) -> None:
    """Also one between two that are supported; the sentence lists them."""
    with pytest.raises(UnsupportedNeMo) as refused:
        require_supported(version, {})
    text = str(refused.value)
    assert f"supported: {', '.join(SUPPORTED_SERIES)}. With" in text
    newer = (
        "newer than any that was tested" if version > "3" else "of a series that was"
    )
    assert f"NeMo {version} is {newer}" in text
    assert "were compared with those of" in text and "no difference" in text
    require_supported(version, {"NEMO_PATCHES_UNSUPPORTED": "1"})


def this_nemo(rank: int = 0, size: int = 1) -> str:
    import nemo.collections.asr  # so that the version is that of the code under test
    import nemo.package_info

    assert Path(nemo.collections.asr.__file__).is_relative_to(
        Path(nemo.package_info.__file__).parent
    )
    return str(nemo.package_info.__version__)


@pytest.mark.matrix
def test_this_process_and_the_ranks_run_the_nemo_that_the_matrix_names() -> None:
    expected = os.environ.get("TEST_NEMO") or this_nemo()
    ranks = [result.value for result in run_ranks(this_nemo, 2, group=False)]
    assert [this_nemo(), *ranks] == [expected] * 3
