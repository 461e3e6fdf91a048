"""NP208: NCCL's asynchronous error handling."""

from __future__ import annotations

import pytest
from machines import ERROR, NOTE, found

pytestmark = pytest.mark.one_nemo

NEW, OLD = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize("name", [NEW, OLD])
def test_switched_off_is_an_error_under_either_name(name: str) -> None:
    (finding,) = found("NP208", **{name: "0"})
    assert finding.severity is ERROR
    assert finding.what.startswith(f"{name}=0: ")


def test_on_is_nothing_and_an_old_name_a_note() -> None:
    assert found("NP208") == []
    assert found("NP208", **{NEW: "1"}) == []
    (finding,) = found("NP208", **{OLD: "1"})
    assert finding.severity is NOTE
    (finding,) = found("NP208", **{OLD: "0", NEW: "3"})  # the new name counts
    assert finding.severity is NOTE


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_a_blocking_wait_is_a_note(name: str) -> None:
    (finding,) = found("NP208", **{name: "1"})
    assert finding.severity is NOTE
    assert found("NP208", **{name: "0"}) == []
    (finding,) = found(
        "NP208", **{name: "1", NEW: "0"}
    )  # its wait raises after the timeout: no hang for ever
    assert finding.severity is NOTE
