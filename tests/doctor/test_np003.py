"""NP003: Hydra's defaults list."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, found

pytestmark = pytest.mark.one_nemo


def test_a_defaults_list_that_names_other_files(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP003", "defaults:\n  - model: nest\n  - _self_\n" + NEST)
    assert (finding.severity, finding.line) == (NOTE, 1)


def test_none_for_the_file_itself(tmp_path: Path) -> None:
    assert found(tmp_path, "NP003", "defaults:\n  - _self_\n" + NEST) == []


def test_none_for_a_key_of_that_name_which_is_no_list(tmp_path: Path) -> None:
    assert found(tmp_path, "NP003", "defaults: {a: 1}\n" + NEST) == []
