"""NP304: ranks on which NeMo would not be patched."""

from __future__ import annotations

import pytest
from job_ranks import ERROR, NOTE, WARNING, found, ranks

pytestmark = pytest.mark.one_nemo


def test_some_are_an_error_and_all_a_warning() -> None:
    assert found("NP304", ranks()) == []
    why = {"unpatched": ("NeMo 9.9.0 is not supported",)}
    (finding,) = found("NP304", ranks({1: why, 2: why}))
    assert finding.severity is ERROR
    assert "on ranks 1-2" in finding.what
    (finding,) = found("NP304", ranks(dict.fromkeys(range(4), why)))
    assert finding.severity is WARNING


def test_auto_apply_on_some_ranks_only() -> None:
    off = {"auto_apply": "off here; `nemo-patches run -- COMMAND` switches it on"}
    (finding,) = found("NP304", ranks({3: off}))
    assert finding.severity is WARNING
    assert finding.what.startswith("rank 3: ")
    (finding,) = found("NP304", ranks(dict.fromkeys(range(4), off)))
    assert finding.severity is NOTE
