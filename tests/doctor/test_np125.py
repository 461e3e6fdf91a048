"""NP125: a set of which nothing is left; what drop_last leaves was measured with NeMo's and
Lightning's samplers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from configs import LHOTSE, NEST, WARNING, found

pytestmark = pytest.mark.one_nemo


@pytest.mark.parametrize("seconds", ["-1", "-1.0", "0", "-40"])
def test_a_limit_that_no_entry_meets(tmp_path: Path, seconds: str) -> None:
    for text in (NEST, LHOTSE):
        (finding,) = found(
            tmp_path,
            "NP125",
            text,
            f"model.train_ds.max_duration={seconds}",
            "trainer.devices=1",
        )
        assert finding.severity is WARNING
    (finding,) = found(tmp_path, "NP125", NEST, "+model.train_ds.min_duration=41")
    assert "41 s and at most 40.0 s" in finding.what


def test_padding_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP125", LHOTSE, "+model.train_ds.pad_min_duration=41")
    assert "model.train_ds" in finding.what
    for override in (
        "+model.train_ds.pad_min_duration=40",
        "+model.train_ds.pad_min_duration='???'",
    ):
        assert found(tmp_path, "NP125", LHOTSE, override) == []
    # Not read there.
    assert found(tmp_path, "NP125", NEST, "+model.train_ds.pad_min_duration=41") == []


def test_none_for_limits_that_leave_something(tmp_path: Path) -> None:
    assert found(tmp_path, "NP125", NEST) == []
    for override in (
        "+model.train_ds.min_duration=40",
        "model.train_ds.max_duration=null",
    ):
        assert found(tmp_path, "NP125", NEST, override) == []
    assert found(tmp_path, "NP125", NEST, "model.train_ds.max_duration='???'") == []


# entries, batch_size, ranks, whether a rank has a batch: with Lhotse's sampler and with Lightning's
@pytest.mark.parametrize(
    ("entries", "size", "ranks", "lhotse", "lightning"),
    [
        (10, 4, 2, True, True),
        (10, 4, 3, False, True),
        (10, 4, 4, False, False),
        (7, 4, 2, False, True),
        (8, 4, 2, True, True),
        (3, 4, 2, False, False),
        (3, 4, 1, False, False),
        (4, 4, 1, True, True),
    ],
)
def test_drop_last_leaves_a_small_set_without_a_batch(
    tmp_path: Path, entries: int, size: int, ranks: int, lhotse: bool, lightning: bool
) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"audio_filepath": "a.wav"}\n\n' * entries)
    small = [
        f"model.validation_ds.{key}={value}"
        for key, value in (("batch_size", size), ("manifest_filepath", manifest))
    ]
    small += [f"trainer.devices={ranks}", "+model.validation_ds.drop_last=true"]
    for text, has_a_batch in ((LHOTSE, lhotse), (NEST, lightning)):
        said = found(tmp_path, "NP125", text, *small)
        assert len(said) == (not has_a_batch)
        if said:
            assert f"in batches of {size}" in said[0].what
        assert found(tmp_path, "NP125", text, *small[:-1]) == []


def test_a_manifest_that_cannot_be_counted_is_left_alone(tmp_path: Path) -> None:
    one_line, pipe = tmp_path / "audio.tar", tmp_path / "pipe"
    with one_line.open("wb") as file:
        file.truncate(1 << 30)
    os.mkfifo(pipe)
    drop = "+model.validation_ds.drop_last=true"
    for path in (one_line, pipe, tmp_path, tmp_path / "nowhere", "x" * 5000):
        assert (
            found(
                tmp_path,
                "NP125",
                NEST,
                drop,
                f"model.validation_ds.manifest_filepath={path}",
            )
            == []
        )
