"""NP206: open files."""

from __future__ import annotations

import pytest
from machines import NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo


def test_the_limit_is_set_against_the_number_of_ranks() -> None:
    (finding,) = found("NP206", open_files=(1024, 4096))
    assert finding.severity is NOTE
    assert "181 ranks" in finding.what
    (finding,) = found("NP206", open_files=(1024, None), WORLD_SIZE="256")
    assert finding.severity is WARNING
    assert finding.instead.startswith("ulimit -n 1324")
    assert found("NP206", open_files=(1324, None), WORLD_SIZE="256") == []
    assert found("NP206", open_files=(1024, 4096), WORLD_SIZE="8") == []
    assert found("NP206", open_files=(None, None), WORLD_SIZE="100000") == []


def test_too_few_for_one_process_is_a_finding_in_any_case() -> None:
    for few in (256, 300, 303):
        (finding,) = found("NP206", open_files=(few, 256))
        assert finding.severity is WARNING
        assert finding.what.startswith(f"{few} open files")
