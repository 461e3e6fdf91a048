"""NP213: torch's debug server."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import NOTE, found

from nemo_patches.tools.doctor import machine

pytestmark = pytest.mark.one_nemo


def test_what_it_needs_is_missing() -> None:
    (finding,) = found("NP213", debug_server_lacks=("jinja2", "tabulate"))
    assert finding.severity is NOTE
    assert "jinja2 and tabulate" in finding.what
    assert found("NP213") == []


def test_only_a_torch_that_has_it_lacks_something(tmp_path: Path) -> None:
    for folder in ("with", "without"):
        (tmp_path / folder / "torch" / "distributed" / "debug").mkdir(parents=True)
    (tmp_path / "with" / "torch" / "distributed" / "debug" / "__init__.py").write_text("raise SystemExit")
    lacks = {
        each: machine.debug_server_lacks(tmp_path / each / "torch", ("yaml", "no_such")) for each in ("with", "without")
    }
    assert lacks == {"with": ("no_such",), "without": ()}
