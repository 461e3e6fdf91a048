"""NP203: Gloo does not work."""

from __future__ import annotations

import pytest
from machines import VERSIONS, WARNING, found

from nemo_patches.tools.doctor.gloo_probe import Gloo

pytestmark = pytest.mark.one_nemo


def test_gloo_that_fails() -> None:
    assert found("NP203", gloo=Gloo(address="10.0.0.1")) == []
    (finding,) = found("NP203", gloo=Gloo("no answer within 60 s"))
    assert finding.severity is WARNING
    assert "60 s" in finding.what
    assert finding.instead == ""
    (finding,) = found("NP203", gloo=Gloo("Unable to find address for: ib0"), GLOO_SOCKET_IFNAME="ib0")
    assert "an interface of this machine" in finding.instead


def test_without_torch_there_is_nothing_to_say() -> None:
    versions = {name: version for name, version in VERSIONS.items() if name != "torch"}
    assert found("NP203", gloo=Gloo("torch is not installed"), versions=versions) == []
