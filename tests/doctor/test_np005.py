"""NP005: what was not read."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NOTE, WARNING, found

pytestmark = pytest.mark.one_nemo

STREAM = "{type: nemo_tarred, manifest_filepath: a.json, tarred_audio_filepaths: a.tar}"
IN_A_FILE = "+model.train_ds.input_cfg=inputs.yaml"
OPEN = (
    "+trainer.limit_train_batches=1.0",
    "model.train_ds.shard_seed=randomized",
    "model.joint.fuse_loss_wer=false",
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_sets_of_magpietts_may_be_in_a_file(tmp_path: Path) -> None:
    text = (
        "trainer: {devices: 2}\nmodel:\n  validation_ds: {use_lhotse: true, batch_size:"
        " 8, datasets: sets.yaml}\n"
    )
    (finding,) = found(tmp_path, "NP005", text)
    assert "model.validation_ds.datasets is in sets.yaml" in finding.what
    (tmp_path / "sets.yaml").write_text("- {name: a, shar_path: x}\n")
    assert found(tmp_path, "NP005", text) == []
    assert len(found(tmp_path, "NP108", text)) == 1
    elsewhere = "model: {tokenizer: {datasets: sets}}\n"
    assert found(tmp_path, "NP005", elsewhere) == []


def test_inputs_in_a_file_are_judged_as_if_they_were_in_the_config(
    tmp_path: Path,
) -> None:
    (tmp_path / "inputs.yaml").write_text(
        f"- {STREAM}\n- {{type: group, input_cfg: folder/more.yaml}}\n"
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "more.yaml").write_text(f"# a comment\n- {STREAM}\n")
    (finding,) = found(tmp_path, "NP104", LHOTSE, IN_A_FILE, *OPEN)
    assert "model.train_ds is a stream without a length" in finding.what
    (tmp_path / "inputs.yaml").write_text(
        f"- {STREAM}\n- {{type: nemo, manifest_filepath: a.json}}\n"
    )
    (mixed,) = found(tmp_path, "NP124", LHOTSE, IN_A_FILE)
    assert mixed.severity is WARNING


@pytest.mark.parametrize(
    "content",
    [
        None,
        "- {type: nemo",
        "- !!python/name:os.system x\n",
        "- {type: group, input_cfg: inputs.yaml}\n",
        "- {type: group, input_cfg: /dev/zero}\n",
        "input_cfg: []\n",
    ],
    ids=range(6),
)
def test_a_file_that_cannot_be_read_or_has_no_end(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "inputs.yaml").write_text(content)
    (finding,) = found(tmp_path, "NP005", LHOTSE, IN_A_FILE, *OPEN)
    assert finding.severity is WARNING
    assert "which cannot be read here" in finding.what


def test_what_only_the_jobs_machine_gives_is_a_note(tmp_path: Path) -> None:
    given = ("trainer.devices=${oc.env:N}", "model.train_ds.shard_seed=${oc.env:S}")
    others = "++model.train_ds.manifest_filepath=${oc.env:DATA}/a.json"
    (finding,) = found(tmp_path, "NP005", LHOTSE, *given, others)
    assert finding.severity is NOTE
    assert "model.train_ds.shard_seed, trainer.devices: only the job" in finding.what
    assert found(tmp_path, "NP005", LHOTSE, "trainer.devices='???'", others) == []


def test_a_model_from_a_checkpoint_asks_a_stream_for_its_length_too(
    tmp_path: Path,
) -> None:
    fine_tuned = (
        "~model.encoder",
        "~model.preprocessor",
        "~model.joint",
        f"+model.train_ds.input_cfg=[{STREAM}]",
    )
    rest = ("+trainer.val_check_interval=100", *OPEN[:2])
    for key in (
        "init_from_nemo_model",
        "init_from_pretrained_model",
        "init_from_ptl_ckpt",
        "restore_from",
    ):
        (finding,) = found(
            tmp_path,
            "NP104",
            LHOTSE,
            *fine_tuned,
            *rest,
            f"+{key}=stt_en_fastconformer_ctc_large",
        )
        assert key in str(finding.read[-1])
        assert (
            found(tmp_path, "NP104", LHOTSE, *fine_tuned, *rest, f"+{key}=null") == []
        )
    assert (
        found(
            tmp_path,
            "NP104",
            LHOTSE,
            *fine_tuned,
            *rest,
            "+init_from_pretrained_model=nvidia/canary-1b",
        )
        == []
    )
    (finding,) = found(
        tmp_path,
        "NP104",
        LHOTSE,
        *fine_tuned,
        *OPEN[:2],
        "+init_from_pretrained_model=nvidia/canary-1b",
    )
    assert "no epoch ends" in finding.what
