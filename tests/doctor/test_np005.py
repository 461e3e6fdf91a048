"""NP005: what was not read, and what is read of files that
a config names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import LHOTSE, NOTE, WARNING, found, report

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
    # Of the config: a suppression there answers it.
    assert 10 in [value.line for value in finding.read]
    suppressed = text.replace(
        "inputs.yaml", "inputs.yaml  # nemo-patches: ignore[NP122] measured"
    )
    assert found(tmp_path, "NP122", suppressed) == []


def test_a_file_that_is_not_here_is_a_finding(
    tmp_path: Path,
) -> None:
    (finding,) = found(tmp_path, "NP005", LHOTSE, IN_A_FILE, *OPEN)
    assert finding.severity is WARNING
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
        ("# " + "x" * (1 << 20), "more than 1048576 bytes"),
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
