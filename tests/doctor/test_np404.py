"""NP404: decorators that NeMo's own method has."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import beside_nemo, found

pytestmark = [pytest.mark.one_nemo, beside_nemo]


def test_a_decorator_that_is_missing(tmp_path: Path) -> None:
    own = "class Mine(EncDecCTCModel):\n    {}def forward(self, input_signal=None):\n        pass\n"
    (finding,) = found(tmp_path, "NP404", own.format(""))
    assert finding.what == "Mine.forward has no @typecheck, as NeMo's EncDecCTCModel has"
    assert found(tmp_path, "NP404", own.format("@typecheck()\n    ")) == []
    assert found(tmp_path, "NP404", own.format("").replace("forward", "forward_mine")) == []
