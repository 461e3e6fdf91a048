"""NP209: the flight recorder."""

from __future__ import annotations

import pytest
from machines import NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo

OLD_TORCH = "2.5.1"


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
        {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"},
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "False"},
    ],
)
def test_switched_off_is_a_finding_everywhere(variables: dict[str, str]) -> None:
    (finding,) = found("NP209", **variables)
    assert finding.severity is WARNING


def test_not_set_is_a_note_where_there_are_gpus_and_torch_may_have_it_off() -> None:
    assert found("NP209", torch=OLD_TORCH) == []
    assert found("NP209", gpus=8) == []
    (finding,) = found("NP209", gpus=8, torch=OLD_TORCH)
    assert finding.severity is NOTE
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT=1" in finding.what
    (finding,) = found(
        "NP209", gpus=8, torch=OLD_TORCH, TORCH_NCCL_TRACE_BUFFER_SIZE="2000"
    )
    (finding,) = found("NP209", gpus=8, torch="a build of our own")
    on = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert found("NP209", gpus=8, torch=OLD_TORCH, **on) == []
