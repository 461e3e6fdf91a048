"""What is read of a job: its ranks, who reads a data set, whether that is a stream, and its longest
input.
"""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

import pytest
from configs import LHOTSE, NEST

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import yaml_text
from nemo_patches.tools.doctor.datasets import Dataset
from nemo_patches.tools.doctor.job import Job

pytestmark = pytest.mark.one_nemo


def job(text: str, *overrides: str) -> Job:
    return Job(
        reading.with_overrides(yaml_text.parse(Path("config.yaml"), text), overrides)
    )


def training(*overrides: str, text: str = LHOTSE) -> Dataset:
    (found,) = (
        dataset for dataset in job(text, *overrides).datasets if dataset.training
    )
    return found


# --- ranks and strategy


@pytest.mark.parametrize(
    ("devices", "ranks"),
    [
        ("1", 1),
        ("4", 4),
        ("'4'", 4),
        ("'0,3'", 2),
        ("'2,'", 1),
        ("[0,1,5]", 3),
        ("-1", None),
        ("'-1'", None),
        ("auto", None),
        ("???", None),
        ("true", None),
        ("[]", None),
        ("{a: 1}", None),
    ],
)
def test_ranks_are_counted_as_lightning_counts_devices(
    devices: str, ranks: int | None
) -> None:
    assert job(NEST, f"trainer.devices={devices}").ranks == ranks
    assert job(NEST, f"trainer.devices={devices}", "trainer.num_nodes=3").ranks == (
        3 * ranks if ranks else None
    )
    assert (
        job(NEST, f"trainer.devices={devices}", "trainer.num_nodes=???").ranks is None
    )
    assert job(NEST, f"trainer.devices={devices}").several is (ranks != 1)


def test_one_process_is_lightnings_default_on_the_cpu() -> None:
    assert job(NEST, "~trainer.devices", "trainer.accelerator=cpu").ranks == 1
    assert job(NEST, "~trainer.devices").ranks is None
    assert job(NEST, "trainer.accelerator=cpu").ranks == 4


@pytest.mark.parametrize(
    "text",
    [
        "model: {a: 1}\n",
        "trainer: {_target_: x}\n",
        "trainer: {devices: 2}\nstrategy: x\n",
    ],
)
def test_a_trainer_that_is_not_lightnings_has_no_ranks_to_judge(text: str) -> None:
    assert not job(text).has_trainer
    assert not job(text).several


@pytest.mark.parametrize(
    ("strategy", "ddp"),
    [
        ("ddp", True),
        ("ddp_find_unused_parameters_true", True),
        ("auto", True),
        ("{_target_: lightning.pytorch.strategies.DDPStrategy}", True),
        ("{_target_: lightning.pytorch.strategies.ModelParallelStrategy}", False),
        ("fsdp", False),
        ("null", False),
        ("???", False),
        ("{a: 1}", False),
    ],
)
def test_which_strategies_are_ddp(strategy: str, ddp: bool) -> None:
    assert job(NEST, f"trainer.strategy={strategy}").ddp is ddp


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (
            "{_target_: datetime.timedelta, minutes: 5, seconds: 1}",
            timedelta(seconds=301),
        ),
        ("{_target_: datetime.timedelta, minutes: x}", None),
        ("{_target_: datetime.timedelta, days: 1e14}", None),
        ("{_target_: mine, minutes: 5}", None),
        ("5", None),
    ],
)
def test_the_groups_timeout(timeout: str, expected: timedelta | None) -> None:
    assert job(LHOTSE, f"+trainer.strategy.timeout={timeout}").group_timeout == expected


# --- data sets


@pytest.mark.parametrize(
    ("overrides", "reader"),
    [
        (("model.train_ds.use_lhotse=true",), "lhotse"),
        (("model.train_ds.use_lhotse=false",), "nemo"),
        (("model.train_ds.use_lhotse=???",), ""),
        (("~model.train_ds.use_lhotse",), ""),  # it has batch_duration
        (("~model.train_ds.use_lhotse", "~model.train_ds.batch_duration"), "nemo"),
        (("~model.train_ds.use_lhotse", "+model.train_ds.cuts_path=x"), "lhotse"),
    ],
)
def test_who_reads_a_set(overrides: tuple[str, ...], reader: str) -> None:
    assert training(*overrides).reader == reader


def test_speechlm2_always_has_lhotse() -> None:
    assert (
        training(text="data: {train_ds: {manifest_filepath: x}}\n").reader == "lhotse"
    )


@pytest.mark.parametrize(
    ("override", "tarred"),
    [
        ("++a=1", False),
        ("+model.train_ds.shar_path=x", True),
        ("+model.train_ds.tarred_audio_filepaths=x", True),
        ("+model.train_ds.force_iterable_dataset=true", True),
        ("+model.train_ds.input_cfg=x.yaml", None),
        ("+model.train_ds.input_cfg=[5, {type: nemo}]", False),
        ("+model.train_ds.input_cfg=[{type: group, input_cfg: x.yaml}]", None),
        (
            (
                "+model.train_ds.input_cfg=[{type: group, input_cfg: x.yaml}, {type:"
                " lhotse_shar, shar_path: x}]"
            ),
            True,
        ),
    ],
)
def test_what_is_a_stream(override: str, tarred: bool | None) -> None:
    assert training(override).tarred is tarred
    assert training(override, "+model.train_ds.force_map_dataset=true").tarred is False
    assert training("model.train_ds.is_tarred=???", text=NEST).tarred is None


def test_several_configs_in_one_set_are_sets_by_themselves() -> None:
    sets = "a: {cuts_path: x}, b: {cuts_path: y}"
    text = (
        "data: {train_ds: {multi_config: true, seed: 1, sampler_weights: {a: 1},"
        f" {sets}}}}}\n"
    )
    assert [dataset.where for dataset in job(text).datasets] == [
        "data.train_ds.a",
        "data.train_ds.b",
    ]
    sets = "a: {cuts_path: x}, b: {cuts_path: y, max_duration: 8}, c: 1"
    named = f"data: {{validation_ds: {{max_duration: 9, datasets: {{{sets}}}}}}}\n"
    assert [dataset.longest().seconds for dataset in job(named).datasets] == [9, 8]


@pytest.mark.parametrize(
    ("section", "sets"),
    [
        ("{use_lhotse: true, dataset: {shar_path: x}}", {"dataset": "lhotse"}),
        ("{dataset: {use_lhotse: true, input_cfg: x}}", {"dataset": "lhotse"}),
        (
            "{use_lhotse: true, datasets: [{name: a, shar_path: x}, {shar_path: y}]}",
            {"datasets.0": "lhotse", "datasets.1": "lhotse"},
        ),
        (
            "{dataloader_params: {use_lhotse: true, shar_path: x}, dataset_args: {}}",
            {"dataloader_params": "lhotse"},
        ),
        # Of a class of its own, which the config does not tell how it reads
        ("{dataset: {_target_: x.TTSDataset, dataset_meta: {}}}", {"dataset": ""}),
        ("{dataset: {manifest_filepath: null}}", {}),
    ],
)
def test_the_sets_of_tts_models(section: str, sets: dict[str, str]) -> None:
    text = f"model: {{validation_ds: {section}}}\n"
    found = {each.where: each.reader for each in job(text).datasets}
    assert found == {f"model.validation_ds.{path}": how for path, how in sets.items()}


@pytest.mark.parametrize(
    ("override", "seconds"),
    [
        ("model.train_ds.max_duration=null", math.inf),
        ("model.train_ds.max_duration=inf", math.inf),
        ("model.train_ds.max_duration=???", None),
        ("model.train_ds.max_duration=long", None),
        ("+model.train_ds.truncate_duration=20", 20),
        ("+model.train_ds.cut_into_windows_duration=30", 30),
        ("+model.train_ds.concatenate_duration_factor=2", 40),
        ("+model.train_ds.concatenate_samples=true", 40),
        (
            (
                "+model.train_ds={concatenate_samples: true, use_lhotse: true,"
                " max_duration: '???', cuts_path: x}"
            ),
            40,
        ),
        ("+model.train_ds.random_padding={prob: 1, max_total_duration: 45}", 45),
        ("+model.train_ds.random_padding={prob: 1, max_total_duration: 35}", 40),
        ("+model.train_ds.random_padding={prob: 1}", None),
    ],
)
def test_the_longest_input_of_lhotse(override: str, seconds: float | None) -> None:
    assert training(override).longest().seconds == seconds


@pytest.mark.parametrize(
    ("override", "seconds"),
    [
        ("+model.train_ds.audio_duration=4", 4),
        ("+model.train_ds.augmentor=null", 40),
        ("+model.train_ds.augmentor=???", None),
        ("+model.train_ds.is_code_switched=true", None),
        ("+model.train_ds.augmentor={speed: {prob: 1}}", 40 / 0.9),
        ("+model.train_ds.augmentor={speed: {min_speed_rate: 0}}", math.inf),
        ("+model.train_ds.augmentor={speed: {min_speed_rate: ???}}", None),
        ("+model.train_ds.augmentor={silence: {max_end_silence_secs: 2}}", 42),
        ("+model.train_ds.augmentor={silence: {max_end_silence_secs: ???}}", None),
    ],
)
def test_the_longest_input_of_nemo(override: str, seconds: float | None) -> None:
    override = override.replace("???", "'???'")
    assert training(override, text=NEST).longest().seconds == seconds
    assert training(
        override, "model.train_ds.max_duration=???", text=NEST
    ).longest().seconds in (None, 4)
