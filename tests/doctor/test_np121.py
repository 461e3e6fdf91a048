"""NP121: Sortformer in streaming mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import NEST, NOTE, found

pytestmark = pytest.mark.one_nemo

STREAMING = "+model.streaming_mode=true"
SORTFORMER = "+model.sortformer_modules={num_spks: 4}"


def test_another_reduce_of_a_length(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP121", NEST, STREAMING, SORTFORMER)
    assert finding.severity is NOTE


def test_none_otherwise(tmp_path: Path) -> None:
    assert found(tmp_path, "NP121", NEST, SORTFORMER) == []
    assert found(tmp_path, "NP121", NEST, STREAMING) == []
    assert (
        found(tmp_path, "NP121", NEST, STREAMING, SORTFORMER, "trainer.devices=1") == []
    )
