"""NP102: the longest input against the positional encodings."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from configs import ERROR, NEST, NOTE, WARNING, found

from nemo_patches.tools.doctor.encoders import Frames
from nemo_patches.tools.doctor.finding import Change

pytestmark = pytest.mark.one_nemo

OFF = "+model.encoder.sync_max_audio_length=false"
# What NeMo's NEST config has.
STOCK = "model.train_ds.max_duration=60", "model.validation_ds.max_duration=60"


def test_the_stock_nest_config_is_reported(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP102", NEST, *STOCK)
    assert finding.severity is NOTE  # all ranks grow alike: NVIDIA trains so
    assert "may have 6016 frames" in finding.what
    assert "start with 5000 (50 s" in finding.what
    assert finding.change == Change(("model", "encoder", "pos_emb_max_len"), 6016)


def test_with_the_flag_off_it_is_an_error(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP102", NEST, *STOCK, OFF)
    assert finding.severity is ERROR


@pytest.mark.parametrize(
    "override",
    [
        "trainer.strategy={_target_:lightning.pytorch.strategies.DDPStrategy,broadcast_buffers:false}",
        "trainer.strategy=fsdp",
        "trainer.strategy={_target_:lightning.pytorch.strategies.ModelParallelStrategy}",
        "trainer.devices=1",
        "model.encoder.pos_emb_max_len=6016",
        "++model.encoder.self_attention_model=rel_pos_local_attn",
    ],
)
def test_no_error_where_nothing_is_overwritten_or_nothing_grows(
    tmp_path: Path, override: str
) -> None:
    assert all(
        finding.severity is NOTE
        for finding in found(tmp_path, "NP102", NEST, *STOCK, OFF, override)
    )


def test_a_set_without_a_limit(tmp_path: Path) -> None:
    unlimited = "~model.validation_ds.max_duration"
    (finding,) = found(tmp_path, "NP102", NEST, unlimited, OFF)
    assert finding.severity is WARNING
    assert "model.validation_ds" in finding.what
    assert found(tmp_path, "NP102", NEST, unlimited) == []
    assert found(tmp_path, "NP102", NEST, OFF) == []


@pytest.mark.parametrize(
    ("override", "frames"),
    [
        ("model.preprocessor.window_stride=0.005", 8016),
        ("++model.preprocessor.n_window_stride=80", 8016),
        # One frame more than 50 s have, and then the padding.
        ("model.train_ds.max_duration=50", 5008),
    ],
)
def test_what_makes_more_frames(tmp_path: Path, override: str, frames: int) -> None:
    (finding,) = found(tmp_path, "NP102", NEST, override)
    assert f"may have {frames} frames" in finding.what


@pytest.mark.parametrize(
    ("longer", "frames"),
    [
        ("augmentor={speed:{prob:0.5,min_speed_rate:0.5}}", 8016),
        ("augmentor={time_stretch:{prob:0.5,min_speed_rate:0.8}}", 5008),
        (
            "augmentor={silence:{max_start_silence_secs:6,max_end_silence_secs:6}}",
            5216,
        ),
        ("random_padding={prob:1,max_total_duration:51}", 5104),
    ],
)
def test_what_is_made_longer_after_the_limit(
    tmp_path: Path, longer: str, frames: int
) -> None:
    override = f"+model.train_ds.{longer}"
    (finding,) = found(tmp_path, "NP102", NEST, override)
    assert finding.severity is NOTE
    assert f"may have {frames} frames" in finding.what
    (finding,) = found(tmp_path, "NP102", NEST, override, OFF)
    assert finding.severity is ERROR


def test_concatenation_of_samples(tmp_path: Path) -> None:
    longer = (
        "+model.train_ds.use_lhotse=true",
        "+model.train_ds.concatenate_samples=true",
        "+model.train_ds.concatenate_duration_factor=2.0",
        OFF,
    )
    (finding,) = found(tmp_path, "NP102", NEST, *longer)
    assert finding.severity is ERROR
    longer = (*longer[:2], "++model.train_ds.concatenate_duration_factor=1.0", OFF)
    assert found(tmp_path, "NP102", NEST, *longer) == []


@pytest.mark.parametrize(
    "longer",
    [
        "is_code_switched=true",
        "augmentor=???",
        "augmentor={speed:{min_speed_rate:???}}",
    ],
)
def test_what_is_made_longer_by_what_is_not_told(tmp_path: Path, longer: str) -> None:
    override = f"+model.train_ds.{longer}"
    assert found(tmp_path, "NP102", NEST, override) == []
    (finding,) = found(tmp_path, "NP102", NEST, override, OFF)
    assert finding.severity is WARNING


def test_a_limit_that_cannot_be_told_is_no_fault(tmp_path: Path) -> None:
    assert found(tmp_path, "NP102", NEST, "model.train_ds.max_duration=???") == []
    (finding,) = found(tmp_path, "NP102", NEST, "model.train_ds.max_duration=???", OFF)
    assert finding.severity is WARNING
    assert "model.train_ds" in finding.what


def test_a_set_that_is_not_read_does_not_count(tmp_path: Path) -> None:
    unused = "+model.test_ds={manifest_filepath:null,max_duration:600}"
    assert found(tmp_path, "NP102", NEST, unused) == []
    (finding,) = found(tmp_path, "NP102", NEST, unused.replace("null", "x.json"))
    assert "model.test_ds 600 s" in finding.what


@pytest.mark.parametrize(
    "override",
    [
        "+model.train_ds.augmentor={noise:{prob:0.5},white_noise:{prob:1}}",
        "+model.train_ds.noise_manifest=noise.json",
        "+model.train_ds.is_concat=true",  # manifests, not audio
        "model.train_ds.max_duration=49.9",
    ],
)
def test_what_does_not(tmp_path: Path, override: str) -> None:
    assert found(tmp_path, "NP102", NEST, override) == []


def test_sets_inside_a_set_inherit_and_an_adapter_is_not_measured_in_audio_frames(
    tmp_path: Path,
) -> None:
    text = """\
model:
  perception:
    modality_adapter:
      _target_: nemo.collections.asr.modules.ConformerEncoder
      sync_max_audio_length: false
data:
  validation_ds:
    max_duration: 600
    datasets:
      one: {shar_path: x}
trainer: {devices: 2}
"""
    (finding,) = found(tmp_path, "NP102", text)
    assert finding.severity is WARNING


@pytest.mark.installed
def test_frames_are_those_of_nemos_own_preprocessor() -> None:
    torch = pytest.importorskip("torch")
    modules = pytest.importorskip("nemo.collections.asr.modules.audio_preprocessing")
    for pad_to, exact_pad in itertools.product((0, 16), (False, True)):
        real = modules.AudioToMelSpectrogramPreprocessor(
            pad_to=pad_to, exact_pad=exact_pad, n_fft=512
        )
        for seconds in (1.0, 1.005, 1.59, 1.6):
            samples = int(seconds * 16000)
            made, _ = real(
                input_signal=torch.zeros(1, samples), length=torch.tensor([samples])
            )
            assert (
                Frames(16000.0, 160, not exact_pad, pad_to, ()).of(seconds)
                == made.shape[-1]
            )


def test_nothing_is_said_of_what_the_config_leaves_open(tmp_path: Path) -> None:
    assert (
        found(tmp_path, "NP102", NEST, *STOCK, OFF, "model.encoder.pos_emb_max_len=???")
        == []
    )
    assert (
        found(tmp_path, "NP102", NEST, "~model.train_ds", "~model.validation_ds", OFF)
        == []
    )


@pytest.mark.parametrize(
    ("overrides", "stops"),
    [
        (("model.encoder.pos_emb_max_len=null",), True),
        (("model.encoder.pos_emb_max_len='5000'",), True),
        (("model.encoder.pos_emb_max_len=[5000]",), True),
        (("model.encoder.pos_emb_max_len=-1",), True),
        (("model.encoder.pos_emb_max_len=0",), True),
        (("model.encoder.pos_emb_max_len=null", "trainer.devices=1"), True),
        (
            (
                "model.encoder.pos_emb_max_len=null",
                "+model.encoder.self_attention_model=rel_pos_local_attn",
            ),
            True,
        ),
        (
            (
                "model.encoder.pos_emb_max_len=null",
                "+model.encoder.self_attention_model=no_pos",
            ),
            False,
        ),
        (
            (
                "model.encoder.pos_emb_max_len=0",
                "+model.encoder.self_attention_model=abs_pos",
            ),
            False,
        ),
        (("model.encoder.pos_emb_max_len=5000.0",), False),
        (("model.encoder.pos_emb_max_len=true",), False),
        (("model.encoder.pos_emb_max_len='???'",), False),
    ],
)
def test_a_length_that_is_no_number_of_frames(
    tmp_path: Path, overrides: tuple[str, ...], stops: bool
) -> None:
    said = [finding.what for finding in found(tmp_path, "NP102", NEST, *overrides)]
    assert any("the job stops at its start" in what for what in said) is stops


@pytest.mark.parametrize(
    ("seconds", "severity"), [("90", [NOTE]), ("40", []), ("-1", [])]
)
def test_a_diarization_set_is_limited_by_its_session_length(
    tmp_path: Path, seconds: str, severity: list[object]
) -> None:
    session = [
        f"+model.{name}.session_len_sec={seconds}"
        for name in ("train_ds", "validation_ds")
    ]
    assert [
        finding.severity for finding in found(tmp_path, "NP102", NEST, *session)
    ] == severity


def test_a_negative_limit_is_not_called_safe(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP102", NEST, "model.train_ds.max_duration=-1", OFF)
    assert finding.severity is WARNING
    assert "model.train_ds" in finding.what


def test_templates_beside_the_model_are_no_encoders_and_no_sets(tmp_path: Path) -> None:
    template = (
        "_base: &base {_target_: nemo.collections.asr.modules.ConformerEncoder,"
        " pos_emb_max_len: 100}\n"
    )
    template += "_sets: {train_ds: {manifest_filepath: x, max_duration: 900}}\n"
    assert found(tmp_path, "NP102", template + NEST) == []
    assert len(found(tmp_path, "NP101", template + NEST)) == 1
    merged = NEST.replace("  encoder:\n", "  encoder:\n    <<: *base\n").replace(
        "    pos_emb_max_len: 5000\n", ""
    )
    (finding,) = found(tmp_path, "NP102", template + merged)
    assert "start with 100" in finding.what


def test_what_to_write_instead_names_the_sets_without_a_limit(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path, "NP102", NEST, STOCK[0], "~model.validation_ds.max_duration"
    )
    assert "model.validation_ds" in finding.instead
    (finding,) = found(tmp_path, "NP102", NEST, *STOCK)
    assert "max_duration for" not in finding.instead


def test_without_a_preprocessor_frames_are_not_told(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, "NP102", NEST, "~model.preprocessor", *STOCK, OFF)
    assert finding.severity is WARNING
    assert "model.validation_ds" in finding.what
    assert found(tmp_path, "NP102", NEST, "~model.preprocessor", *STOCK) == []


def test_a_class_without_the_flag_is_not_told_to_set_it(tmp_path: Path) -> None:
    squeezeformer = (
        "model.encoder={_target_: nemo.collections.asr.modules.SqueezeformerEncoder}"
    )
    (finding,) = found(tmp_path, "NP102", NEST, squeezeformer, *STOCK)
    assert finding.severity is NOTE
    assert "sync_max_audio_length" not in finding.what
    assert (
        found(
            tmp_path, "NP102", NEST, squeezeformer, "~model.validation_ds.max_duration"
        )
        == []
    )
