"""NP308: data loaders that differ between ranks; batches were counted with NeMo's and Lightning's
own samplers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST
from job_ranks import ERROR, WARNING, found, ranks

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import loaders, yaml_text
from nemo_patches.tools.doctor.job import Job

pytestmark = pytest.mark.one_nemo


def settings(text: str, size: int, *overrides: str) -> dict[str, str]:
    return loaders.settings(
        Job(
            reading.with_overrides(
                yaml_text.parse(Path("config.yaml"), text), overrides
            )
        ),
        size,
    )


def test_settings_and_batches_that_differ() -> None:
    assert found("NP308", ranks()) == []
    same = {rank: {"loaders": settings(NEST, 4)} for rank in range(4)}
    assert found("NP308", ranks(same)) == []
    assert "on all of them model.train_ds.batch_size: 8" in ranks(same).lines()
    other = {**same, 2: {"loaders": settings(NEST, 4, "model.train_ds.batch_size=16")}}
    (finding,) = found("NP308", ranks(other))
    assert finding.severity is WARNING
    assert "16 on rank 2 (node1), 8 on ranks 0-1, 3" in finding.what
    batches = {
        rank: {"loaders": {"model.train_ds, batches": str(10 + (rank == 3))}}
        for rank in range(4)
    }
    (finding,) = found("NP308", ranks(batches))
    assert finding.severity is ERROR
    assert "11 on rank 3 (node1), 10 on ranks 0-2" in finding.what
    unread = {
        **same,
        1: {"loaders": {"the config": "nest.yaml: No such file or directory"}},
    }
    assert any(
        "on rank 1 (node0), not set on ranks 0" in finding.what
        for finding in found("NP308", ranks(unread))
    )


# entries, batch_size, ranks, drop_last: the batches of each rank, with Lhotse's sampler and with
# Lightning's
@pytest.mark.parametrize(
    ("entries", "size", "size_of_job", "drop_last", "lhotse", "lightning"),
    [
        (1000, 16, 2, "true", "31", "31"),
        (1000, 7, 2, "false", "72", "72"),
        (10, 4, 2, "true", "1", "1"),
        (10, 4, 2, "false", "2", "2"),
        (10, 4, 3, "true", "0", "1"),
        (10, 4, 3, "false", "1", "1"),
        (7, 4, 2, "true", "0", "1"),
    ],
)
def test_the_batches_of_a_rank(
    tmp_path: Path,
    entries: int,
    size: int,
    size_of_job: int,
    drop_last: str,
    lhotse: str,
    lightning: str,
) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"audio_filepath": "a.wav"}\n' * entries)
    given = [
        f"++model.validation_ds.{key}={value}"
        for key, value in (("batch_size", size), ("drop_last", drop_last))
    ]
    given += [f"model.validation_ds.manifest_filepath={manifest}"]
    for text, expected in ((LHOTSE, lhotse), (NEST, lightning)):
        made = settings(text, size_of_job, *given)
        assert made["model.validation_ds, batches"] == expected
        limited = settings(text, size_of_job, *given, "+trainer.limit_val_batches=0")
        assert limited["model.validation_ds, batches"] == "0"
    assert made["model.validation_ds, sampler"] == "Lightning's"
    each = settings(NEST, size_of_job, *given, "+trainer.use_distributed_sampler=false")
    assert each["model.validation_ds, sampler"] == "none, each rank reads all of it"
    assert "model.validation_ds, batches" not in settings(
        LHOTSE, 2, *given, "+model.validation_ds.batch_duration=9"
    )
    for kind in (
        "{type: my_own}",
        "{type: txt, paths: x}",
        "{type: nemo, manifest_filepath: other.json}",
    ):
        inputs = f"+model.validation_ds.input_cfg=[{kind}]"  # the manifest beside it is not read
        assert "model.validation_ds, batches" not in settings(LHOTSE, 2, *given, inputs)
