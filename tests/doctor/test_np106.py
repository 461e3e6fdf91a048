"""NP106: tar files that do not divide by the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, WARNING, found

pytestmark = pytest.mark.one_nemo

TARRED = "model.train_ds.is_tarred=true"


def files(value: str) -> str:
    return f"model.train_ds.tarred_audio_filepaths={value}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("'audio_{0..129}.tar'", "130 tar files for 4 ranks: each gets 32, and 2 are never read"),
        ("audio__OP_0..4_CL_.tar", "5 tar files for 4 ranks: each gets 1, and 1 are never read"),
        ("'a_{0..1}_{0..2}.tar'", "6 tar files"),
        ("'a_{x,y,z}.tar'", "3 tar files for 4 ranks: no rank gets any"),
        ("['a.tar','b.tar']", "2 tar files"),
        ("[['a_{0..3}.tar'],['b_{0..4}.tar']]", "5 tar files"),
    ],
)
def test_files_that_are_left_over(tmp_path: Path, value: str, said: str) -> None:
    (finding,) = found(tmp_path, "NP106", NEST, TARRED, files(value))
    assert finding.severity is WARNING
    assert said in finding.what


@pytest.mark.parametrize(
    "overrides",
    [
        (TARRED, files("'audio_{0..127}.tar'")),
        (TARRED, files("'audio_{0..129}.tar'"), "trainer.devices=-1"),
        (TARRED, files("'audio_{0..129}.tar'"), "+model.train_ds.tarred_shard_strategy=replicate"),
        (TARRED, files("???")),
        (files("'audio_{0..129}.tar'"),),
    ],
)
def test_none_otherwise(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert found(tmp_path, "NP106", NEST, *overrides) == []


def test_none_for_one_rank_for_lhotse_and_for_what_is_no_list_of_files(tmp_path: Path) -> None:
    left_over = files("'audio_{0..128}.tar'")
    assert found(tmp_path, "NP106", NEST, TARRED, left_over, "trainer.devices=1") == []
    assert found(tmp_path, "NP106", NEST, TARRED, left_over, "+model.train_ds.use_lhotse=true") == []
    assert found(tmp_path, "NP106", NEST, TARRED, files("[a.tar,5]")) == []
    assert found(tmp_path, "NP106", NEST, TARRED, files("[[a.tar,b.tar],[c.tar]]")) == []
