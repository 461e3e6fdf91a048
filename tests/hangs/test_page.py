"""docs/hangs.md has every hang of the gallery, with its reports, its job, how it comes out, and its
settings.
"""

from __future__ import annotations

import re

import pytest
from gallery import DIES, ENDS, HANGS_BY_NAME, NAMED, Hang
from interpreters import CHECKOUT

pytestmark = pytest.mark.one_nemo
PAGE = (CHECKOUT / "docs" / "hangs.md").read_text(encoding="utf-8")
(TABLE,) = re.findall(
    r"^\| `python tests/hangs/run.py` \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE
)
ROWS = re.findall(
    r"^\| `([a-z0-9-]+)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", TABLE, re.MULTILINE
)
WORDS = {ENDS: "ends", NAMED: "named: ", DIES: "dies: "}


def test_it_has_them_all_in_their_order() -> None:
    assert [name for name, *_ in ROWS] == list(HANGS_BY_NAME)
    for page in ("README.md", "README.zh-CN.md", "CHANGELOG.md"):
        assert f"{len(ROWS)} " in (CHECKOUT / page).read_text(encoding="utf-8"), page


@pytest.mark.parametrize(
    ("hang", "row"),
    list(zip(HANGS_BY_NAME.values(), ROWS, strict=True)),
    ids=HANGS_BY_NAME,
)
def test_a_row_says_what_the_test_expects(hang: Hang, row: tuple[str, ...]) -> None:
    _, reports, job, stock, ours = row
    linked = re.findall(r"\]\(https://github.com/(\S+?)/issues/(\d+)\)", reports)
    assert [f"{repository}#{number}" for repository, number in linked] == list(
        hang.reports
    )
    assert job == hang.job
    assert stock.startswith(WORDS.get(hang.stock, "hangs"))
    assert ours.startswith(WORDS[hang.ours])
    variables = re.findall(r"`NEMO_PATCHES_([A-Z_]+)=(\S+)`", ours)
    assert {variable.lower(): value for variable, value in variables} == hang.settings
