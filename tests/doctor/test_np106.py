"""NP106: fewer tar files than ranks."""

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
        ("'audio_{0..2}.tar'", "3 tar files for 4 ranks"),
        ("audio__OP_0..1_CL_.tar", "2 tar files"),
        ("'a_{0..0}_{0..2}.tar'", "3 tar files"),
        ("'a_{x,y,z}.tar'", "3 tar files"),
        ("['a.tar','b.tar']", "2 tar files"),
        ("[['a_{0..3}.tar'],['b_{0..2}.tar']]", "3 tar files"),
    ],
)
def test_fewer_files_than_ranks(tmp_path: Path, value: str, said: str) -> None:
    (finding,) = found(tmp_path, "NP106", NEST, TARRED, files(value))
    assert finding.severity is WARNING
    assert said in finding.what


@pytest.mark.parametrize(
    "overrides",
    [
        (TARRED, files("'audio_{0..3}.tar'")),
        (
            TARRED,
            files("'audio_{0..129}.tar'"),
        ),  # those that are left over are never read, and nothing hangs
        (TARRED, files("'audio_{0..2}.tar'"), "trainer.devices=-1"),
        (
            TARRED,
            files("'audio_{0..2}.tar'"),
            "+model.train_ds.tarred_shard_strategy=replicate",
        ),
        (TARRED, files("'audio_{0..2}.tar'"), "trainer.devices=1"),
        (TARRED, files("'audio_{0..2}.tar'"), "+model.train_ds.use_lhotse=true"),
        (TARRED, files("???")),
        (TARRED, files("[a.tar,5]")),
        (TARRED, files("[[a.tar,b.tar],[c.tar]]")),
        (files("'audio_{0..2}.tar'"),),
    ],
)
def test_none_otherwise(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert found(tmp_path, "NP106", NEST, *overrides) == []


@pytest.mark.installed
def test_nemo_stops_where_a_rank_has_no_tar_file(tmp_path: Path) -> None:
    module = pytest.importorskip("nemo.collections.asr.data.audio_to_text")
    (tmp_path / "m.json").write_text(
        '{"audio_filepath": "a.wav", "duration": 1.0, "text": "a", "shard_id": 0}\n'
    )

    def read(ranks: int) -> None:
        module.TarredAudioToCharDataset(
            audio_tar_filepaths=str(tmp_path / "a_{0..2}.tar"),
            manifest_filepath=str(tmp_path / "m.json"),
            labels=["a"],
            sample_rate=16000,
            global_rank=0,
            world_size=ranks,
        )

    read(ranks=3)
    with pytest.raises(IndexError):
        read(ranks=4)
