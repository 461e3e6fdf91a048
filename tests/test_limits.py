"""The limits of time of a question: each leaves those before it their time, in a job of any size."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nemo_patches import limits

pytestmark = pytest.mark.one_nemo
PACKAGE = Path(limits.__file__).parent
NAMES = {name for name in vars(limits) if name.endswith("_S")}


@pytest.mark.parametrize("size", [2, 64, 1024, 16_384])
def test_a_later_step_leaves_those_before_it_their_time(size: int) -> None:
    here_s = limits.HERE_S + size * limits.HERE_PER_RANK_S
    answers_s = limits.ANSWERS_S + size * limits.ANSWERS_PER_RANK_S
    patience_s = limits.PATIENCE_S + size * limits.REPORT_PER_RANK_S
    look_s = limits.LOOK_S + size * limits.REPORT_PER_RANK_S
    assert here_s + limits.OWN_STATE_S < answers_s
    assert answers_s < patience_s < look_s
    assert answers_s + 2 * limits.VERDICT_S < look_s


def test_each_is_used() -> None:
    used = set()
    for package in ("channel", "watch"):
        for path in (PACKAGE / package).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "limits":
                    used |= {alias.name for alias in node.names}
    assert used == NAMES
