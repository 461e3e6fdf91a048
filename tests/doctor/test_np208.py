"""NP208: NCCL's asynchronous error handling."""

from __future__ import annotations

import pytest
from machines import ERROR, found

pytestmark = pytest.mark.one_nemo

NEW, OLD = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize("name", [NEW, OLD])
def test_switched_off_is_an_error_under_either_name(name: str) -> None:
    (finding,) = found("NP208", **{name: "0"})
    assert finding.severity is ERROR
    assert finding.what.startswith(f"{name}=0: ")


def test_on_is_nothing_and_the_new_name_counts() -> None:
    assert found("NP208") == []
    assert found("NP208", **{NEW: "1"}) == []
    assert found("NP208", **{OLD: "0", NEW: "3"}) == []


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_a_blocking_wait_raises_after_the_timeout(name: str) -> None:
    assert found("NP208", **{name: "1", NEW: "0"}) == []
    assert len(found("NP208", **{name: "0", NEW: "0"})) == 1
