"""NP204: the address that Gloo takes."""

from __future__ import annotations

import pytest
from machines import NOTE, WARNING, found

from nemo_patches.tools.doctor.gloo_probe import Gloo

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
@pytest.mark.parametrize(
    ("variables", "severity"),
    [
        ({}, NOTE),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, NOTE),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, WARNING),
        ({"SLURM_NNODES": "2"}, WARNING),
        ({"SLURM_NNODES": "1"}, NOTE),
    ],
)
def test_a_loopback_address_matters_where_there_are_other_hosts(
    address: str, variables: dict[str, str], severity: object
) -> None:
    (finding,) = found("NP204", gloo=Gloo(address=address), **variables)
    assert finding.severity is severity
    assert address in finding.what


@pytest.mark.parametrize("address", ["10.0.0.1", "fe80::1", ""])
def test_any_other_address_is_nothing(address: str) -> None:
    assert found("NP204", gloo=Gloo(address=address), SLURM_NNODES="2") == []
