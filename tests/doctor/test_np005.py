"""NP005: what was not read, and which rules could not be judged for it; what is read of files that
a config names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NEST, NOTE, WARNING, found, report

from nemo_patches.tools.doctor import command
from nemo_patches.tools.doctor.request import Request

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


def said(folder: Path, text: str, *overrides: str) -> set[str]:
    findings = report(folder, text, *overrides).findings
    return {
        f"{rule.identifier} {finding.severity}"
        for rule, finding in findings
        if finding.severity > NOTE
    }


def test_inputs_in_a_file_are_judged_as_if_they_were_in_the_config(
    tmp_path: Path,
) -> None:
    (tmp_path / "inputs.yaml").write_text(
        f"- {STREAM}\n- {{type: group, input_cfg: folder/more.yaml}}\n"
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "more.yaml").write_text(f"# a comment\n- {STREAM}\n")
    written = (
        f"+model.train_ds.input_cfg=[{STREAM}, {{type: group, input_cfg: [{STREAM}]}}]"
    )
    assert (
        said(tmp_path, LHOTSE, IN_A_FILE, *OPEN)
        == said(tmp_path, LHOTSE, written, *OPEN)
        == {"NP104 warning"}
    )
    (tmp_path / "inputs.yaml").write_text(
        f"- {STREAM}\n- {{type: nemo, manifest_filepath: a.json}}\n"
    )
    (mixed,) = found(tmp_path, "NP124", LHOTSE, IN_A_FILE)
    assert mixed.severity is WARNING


def test_the_file_and_the_line_of_what_was_read_are_told(tmp_path: Path) -> None:
    text = LHOTSE.replace(
        "    shard_seed: 0\n",
        "    shard_seed: 5\n    input_cfg: inputs.yaml\n    shuffle: true\n",
    )
    (tmp_path / "inputs.yaml").write_text(
        f"- {STREAM}\n- {STREAM[:-1]},\n   shard_seed: 7}}\n"
    )
    (finding,) = found(tmp_path, "NP122", text)
    assert "inputs.yaml:3" in [value.origin for value in finding.read]
    assert 10 in [
        value.line for value in finding.read
    ]  # of the config: a suppression there answers it
    suppressed = text.replace(
        "inputs.yaml", "inputs.yaml  # nemo-patches: ignore[NP122] measured"
    )
    assert found(tmp_path, "NP122", suppressed) == []


def test_a_file_that_is_not_here_is_a_finding_that_names_the_rules(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (finding,) = found(tmp_path, "NP005", LHOTSE, IN_A_FILE, *OPEN)
    assert finding.severity is WARNING
    assert "NP104, NP124" in finding.what
    assert str(tmp_path) in finding.what
    (finding,) = found(
        tmp_path,
        "NP005",
        LHOTSE,
        IN_A_FILE.replace("inputs", "s3://bucket/inputs"),
        *OPEN,
    )
    assert "s3://bucket/inputs.yaml" in finding.what
    assert (
        command.carry_out(
            Request((str(tmp_path / "config.yaml"), IN_A_FILE), select=("NP104",))
        )
        == 1
    )
    assert "NP005 warning" in capfd.readouterr().out
    assert (
        command.carry_out(
            Request((str(tmp_path / "config.yaml"), IN_A_FILE), ignore=("NP005",))
        )
        == 0
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("- {type: nemo", "not YAML"),
        ("- !!python/name:os.system x\n", "the tag"),
        (
            "- {type: group, input_cfg: inputs.yaml}\n",
            "more than 10 files in each other",
        ),
        (
            "- {type: nemo, manifest_filepath: [" + "a, " * 60_000 + "]}\n",
            "more than 50000 values",
        ),
        ("# " + "x" * (1 << 20), "a config may have 1048576"),
        ("- {type: group, input_cfg: /dev/zero}\n", "not a regular file"),
        (f"- {{type: group, input_cfg: {'x' * 5000}}}\n", "is not on this machine"),
    ],
    ids=range(7),
)
def test_a_file_that_cannot_be_read_is_no_list_or_has_no_end(
    tmp_path: Path, content: str, why: str
) -> None:
    (tmp_path / "inputs.yaml").write_text(content)
    findings = found(tmp_path, "NP005", LHOTSE, IN_A_FILE, *OPEN)
    assert [finding.severity for finding in findings] == [WARNING]
    assert why in findings[0].what


def test_interpolations_in_a_file_are_its_own_and_variables_are_not_read(
    tmp_path: Path,
) -> None:
    entry = STREAM.replace("a.tar", "'${.manifest_filepath}.tar'").replace(
        "a.json", "'${oc.env:DATA}/a.json'"
    )
    (tmp_path / "inputs.yaml").write_text(f"- {entry}\n")
    assert said(tmp_path, LHOTSE, IN_A_FILE, *OPEN) == {"NP104 warning"}
    entry = STREAM.replace("a.tar", "'${model.tars}'")
    (tmp_path / "inputs.yaml").write_text(f"- {entry}\n")
    assert found(tmp_path, "NP002", LHOTSE, IN_A_FILE, *OPEN)


def test_only_what_would_matter_is_named(tmp_path: Path) -> None:
    """An expectation for each: the value that is not known, and whether a rule depends on it."""
    for overrides, rules in {
        (
            "+trainer.limit_train_batches=${oc.env:N}",
            "+model.train_ds.shar_path=x",
        ): "NP104, NP123",
        ("+trainer.limit_train_batches=${oc.env:N}",): "NP123",
        ("trainer.max_steps=${oc.env:N}",): "",
        ("model.train_ds.max_duration=${oc.env:N}",): "",
        ("model.train_ds.manifest_filepath=${oc.env:DATA}/a.json",): "",
        ("trainer.use_distributed_sampler=${oc.decode:X}",): "NP103",
        ("model.train_ds.shard_seed=${oc.decode:X}",): "NP122",
        ("model.train_ds.input_cfg=${oc.env:INPUTS}",): "NP104, NP122, NP124",
        ("+model.validation_ds.force_iterable_dataset=${oc.decode:X}",): "NP108",
        (
            "+model.encoder.pos_emb_max_len=${x:1}",
            "model.train_ds.max_duration=60",
            "+model.encoder.sync_max_audio_length=false",
        ): "NP102",
    }.items():
        given = [f"++{text.lstrip('+')}" for text in overrides]
        warnings = [
            finding
            for finding in found(tmp_path, "NP005", LHOTSE, *OPEN[2:], *given)
            if finding.severity > NOTE
        ]
        assert [finding.what.split(": ")[1] for finding in warnings] == [rules] * bool(
            rules
        ), overrides


def test_what_is_still_to_be_given_is_a_note(tmp_path: Path) -> None:
    for override in (
        "+model.train_ds.input_cfg='???'",
        "+trainer.limit_train_batches='???'",
        "trainer.devices=-1",
    ):
        findings = found(
            tmp_path,
            "NP005",
            LHOTSE,
            *OPEN[1:],
            override,
            "++model.train_ds.manifest_filepath=a.json",
        )
        assert {finding.severity for finding in findings} <= {NOTE}


def test_an_encoder_of_your_own_and_a_type_of_your_own(tmp_path: Path) -> None:
    own = "model.encoder._target_=my_package.MyConformer"
    assert all(
        finding.severity is NOTE for finding in found(tmp_path, "NP005", NEST, own)
    )
    off = (
        "+model.encoder.sync_max_audio_length=false",
        "model.train_ds.max_duration=60",
    )
    (finding,) = [
        each
        for each in found(tmp_path, "NP005", NEST, own, *off)
        if each.severity > NOTE
    ]
    assert "NP102: model.encoder._target_" in finding.what
    mine = "+model.train_ds.input_cfg=[{type: my_type, path: x}]"
    (finding,) = [
        each
        for each in found(tmp_path, "NP005", LHOTSE, mine, *OPEN)
        if each.severity > NOTE
    ]
    assert "NP104: model.train_ds" in finding.what


def test_manifests_that_are_not_here_are_counted_on_another_machine(
    tmp_path: Path,
) -> None:
    given = ("model.train_ds.manifest_filepath=train.json",)
    (finding,) = found(tmp_path, "NP005", NEST, *given)
    assert finding.severity is NOTE
    assert "NP125: no file on this machine: train.json" in finding.what
    (tmp_path / "train.json").write_text("{}\n" * 100)
    assert found(tmp_path, "NP005", NEST, *given) == []


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


def test_a_trainer_that_is_not_lightnings_is_said_to_be_none(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path,
        "NP005",
        "model: {a: 1}\ntrainer: {_target_: nemo.lightning.Trainer}\n",
    )
    assert finding.severity is NOTE
