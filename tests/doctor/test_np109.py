"""NP109: an evaluation set with fewer entries than ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from configs import NEST, WARNING, found

pytestmark = pytest.mark.one_nemo


def manifest(folder: Path, entries: int) -> str:
    path = folder / "manifest.json"
    path.write_text('{"audio_filepath": "a.wav"}\n\n' * entries)
    return f"model.validation_ds.manifest_filepath={path}"


def test_fewer_entries_than_ranks(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP109", NEST, manifest(tmp_path, 3))
    assert finding.severity is WARNING
    assert "3 entries for 4 ranks" in finding.what


def test_none_with_as_many_or_where_the_manifest_is_elsewhere(tmp_path: Path) -> None:
    assert found(tmp_path, "NP109", NEST, manifest(tmp_path, 4)) == []
    assert found(tmp_path, "NP109", NEST, manifest(tmp_path, 3), "trainer.devices=-1") == []
    assert found(tmp_path, "NP109", NEST) == []
    assert found(tmp_path, "NP109", NEST, "model.validation_ds.manifest_filepath=/nowhere/manifest.json") == []


def test_what_is_no_manifest_is_left_alone(tmp_path: Path) -> None:
    one_line = tmp_path / "audio.tar"
    with one_line.open("wb") as file:
        file.truncate(1 << 30)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (one_line, pipe, tmp_path):
        assert found(tmp_path, "NP109", NEST, f"model.validation_ds.manifest_filepath={path}") == []
