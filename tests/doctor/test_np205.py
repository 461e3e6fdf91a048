"""NP205: /dev/shm."""

from __future__ import annotations

import pytest
from machines import WARNING, found, machine

from nemo_patches.tools.doctor import command
from nemo_patches.tools.doctor import machine as machine_facts
from nemo_patches.tools.doctor.request import Request

pytestmark = pytest.mark.one_nemo


def test_little_room_is_a_finding() -> None:
    (finding,) = found("NP205", shared_memory=64 << 20)
    assert finding.severity is WARNING
    assert finding.what.startswith("64 MiB are free in /dev/shm")
    assert found("NP205", shared_memory=1 << 30) == []
    assert found("NP205", shared_memory=None) == []


def test_what_was_looked_at_without_a_finding_gets_a_tick(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_facts, "gather", lambda: machine(shared_memory=1 << 20))
    assert command.carry_out(Request(select=("NP205", "NP206"))) == 1
    out = capfd.readouterr().out.splitlines()
    assert next(line for line in out if line.endswith("NP206 open files"))[0] in "\u2713o"
    assert not [line for line in out if line.endswith("NP205 /dev/shm")]
