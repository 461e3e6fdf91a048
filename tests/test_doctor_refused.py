"""What NP111, NP125, NP130, NP131 and NP134 say of a data set, beside what NeMo's own Lhotse loader
does with it.
"""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import nemo
from omegaconf import OmegaConf
from ranks import run_ranks

from nemo_patches.tools.doctor import config as reading
from nemo_patches.tools.doctor import examination, yaml_text
from nemo_patches.tools.doctor.finding import Severity
from nemo_patches.tools.doctor.job import Job

RULES = ("NP111", "NP125", "NP130", "NP131")
NEMO_3 = int(nemo.__version__.split(".")[0]) >= 3
TWO = {"batch_size": 2}
ENTRY = {"type": "nemo", "manifest_filepath": "manifest.json"}

# What a set has beside a manifest and seeds; whether NeMo stops or reads nothing, before 3.0 and
# from 3.0 on.
CASES: list[tuple[dict[str, Any], bool, bool]] = [
    (TWO, False, False),
    ({"batch_duration": 10}, False, False),
    ({}, False, True),
    ({"bucket_duration_bins": [1.2, 1.7]}, False, True),
    ({"batch_tokens": 100}, False, True),
    ({"batch_size": 0}, True, True),
    ({"batch_size": 8.5}, True, True),
    ({"batch_size": 8.0}, True, True),
    ({"batch_duration": 0}, True, True),
    (
        {
            "batch_duration": 10,
            "bucket_duration_bins": [1.7, 1.2],
            "use_bucketing": True,
        },
        True,
        True,
    ),
    (
        {
            "batch_duration": 10,
            "bucket_duration_bins": [1.2, 1.2],
            "use_bucketing": True,
        },
        False,
        False,
    ),
    (
        {"batch_duration": 10, "bucket_duration_bins": [], "use_bucketing": True},
        True,
        True,
    ),
    ({**TWO, "force_map_dataset": True, "force_iterable_dataset": True}, True, True),
    ({**TWO, "pad_min_duration": 5, "max_duration": 2.2}, True, True),
    ({**TWO, "pad_min_duration": 2.2, "max_duration": 2.2}, False, False),
    ({**TWO, "pad_min_duration": 2, "pad_direction": "up"}, True, True),
    ({**TWO, "pad_direction": "up"}, False, False),
    ({**TWO, "truncate_duration": 1, "truncate_offset_type": "middle"}, True, True),
    ({**TWO, "seed": "abc"}, True, True),
    ({**TWO, "seed": "randomized"}, False, False),
    ({**TWO, "shard_seed": "random"}, True, True),
    ({**TWO, "shard_seed": "7"}, True, True),
    ({**TWO, "shard_seed": None}, True, True),
    ({**TWO, "shuffle": None}, True, True),
    ({**TWO, "input_cfg": []}, True, True),
    ({**TWO, "input_cfg": ["inputs.yaml"]}, True, True),
    ({**TWO, "input_cfg": [{"manifest_filepath": "manifest.json"}]}, True, True),
    ({**TWO, "input_cfg": [{**ENTRY, "type": "nemo_tared"}]}, True, True),
    ({**TWO, "input_cfg": [{"type": "group"}]}, True, True),
    ({**TWO, "input_cfg": [{**ENTRY, "weight": 1}, ENTRY]}, True, True),
    (
        {**TWO, "input_cfg": [{**ENTRY, "weight": 1}, {**ENTRY, "weight": 2}]},
        False,
        False,
    ),
    ({**TWO, "input_cfg": [{**ENTRY, "weight": 0}]}, False, False),
]
SETS: dict[str, Any] = {
    "multi_config": True,
    "a": {"manifest_filepath": "manifest.json", **TWO},
}
WEIGHTED = {"sampler_fusion": "randomized_round_robin"}
MULTI: list[tuple[dict[str, Any], bool]] = [
    (SETS, False),
    ({**SETS, "sampler_fusion": "zip"}, False),
    ({**SETS, "sampler_fusion": "mix"}, True),
    ({**SETS, **WEIGHTED, "sampler_weights": {"b": 1.0}}, True),
    ({**SETS, **WEIGHTED, "sampler_weights": {"a": 1.0}}, False),
]
WHOLE = {"use_lhotse": True, "shuffle": True, "seed": 0, "shard_seed": 0}
CONFIGS: list[dict[str, Any]] = [
    *({**WHOLE, "manifest_filepath": "manifest.json", **case} for case, _, _ in CASES),
    *({**WHOLE, **case} for case, _ in MULTI),
]
STOPS = [
    *((from_3 if NEMO_3 else before) for _, before, from_3 in CASES),
    *(stops for _, stops in MULTI),
]


def write_data(folder: Path) -> None:
    lines = []
    for number in range(8):
        path, seconds = folder / f"{number}.wav", 1 + number % 4 / 2
        with wave.open(str(path), "wb") as audio:
            audio.setnchannels(1)
            audio.setsampwidth(2)
            audio.setframerate(16000)
            audio.writeframes(b"\0\0" * int(16000 * seconds))
        lines.append(
            json.dumps(
                {
                    "audio_filepath": str(path),
                    "duration": seconds,
                    "text": "a",
                    "lang": "en",
                }
            )
        )
    (folder / "manifest.json").write_text("\n".join(lines))


def stopped(_rank: int, _size: int, folder: str) -> list[str]:
    """Why NeMo does not come to a second batch with each config; empty where it does."""
    import os

    from nemo.collections.common.data.lhotse.dataloader import (
        get_lhotse_dataloader_from_config,
    )
    from torch.utils.data import Dataset

    class Counted(Dataset[int]):
        def __getitem__(self, cuts: Any) -> int:
            return len(list(cuts))

    os.chdir(folder)
    small = {
        "bucket_buffer_size": 100,
        "num_cuts_for_bins_estimate": 4,
        "num_buckets": 2,
        "concurrent_bucketing": False,
    }
    reasons = []
    for given in CONFIGS:
        try:
            loader = get_lhotse_dataloader_from_config(
                OmegaConf.create({**small, **given}), 0, 1, Counted()
            )
            reasons.append("" if next(iter(loader), 0) else "nothing is left")
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    return reasons


def test_the_doctor_stops_what_nemo_stops(tmp_path: Path, monkeypatch: Any) -> None:
    write_data(tmp_path)
    (rank,) = run_ranks(stopped, 1, str(tmp_path), group=False)
    by_nemo = [bool(reason) for reason in rank.value]
    assert by_nemo == STOPS, [
        (config, reason)
        for config, reason, stops in zip(CONFIGS, rank.value, STOPS, strict=True)
        if bool(reason) != stops
    ]
    monkeypatch.chdir(tmp_path)
    rules = examination.chosen([*RULES, "NP005"])
    wrong = []
    of_3 = [*(from_3 for _, _, from_3 in CASES), *(stops for _, stops in MULTI)]
    for config, stops in zip(CONFIGS, of_3, strict=True):
        source = yaml_text.parse(
            Path("config.yaml"),
            OmegaConf.to_yaml(OmegaConf.create({"model": {"train_ds": config}})),
        )
        found = examination.checked(Job(reading.with_overrides(source)), rules)
        said = [
            finding.what for _, finding in found if finding.severity > Severity.NOTE
        ]
        if bool(said) != stops:
            wrong.append((config, said))
    assert wrong == []


# --- a very long entry in batches by duration

LONG_S = 100.0
BINS = {"use_bucketing": True, "bucket_duration_bins": [1.7, 3.0]}
BY_DURATION: list[tuple[dict[str, Any], bool]] = [
    ({"batch_duration": 10}, True),
    ({"batch_duration": 10, "quadratic_duration": 15}, True),
    ({"batch_duration": 10, **BINS}, True),
    ({"batch_duration": 10, "max_duration": 20}, False),
    ({"batch_duration": 10, "truncate_duration": 10}, False),
    ({"bucket_batch_size": [4, 2], **BINS}, False),
    ({"bucket_batch_size": [4, 2], "batch_duration": 10, **BINS}, False),
]


def longest_batches(_rank: int, _size: int, folder: str) -> list[list[float]]:
    """Of each of these, how many seconds the longest batch of each of two ranks has."""
    import os

    from nemo.collections.common.data.lhotse.dataloader import (
        get_lhotse_dataloader_from_config,
    )
    from torch.utils.data import Dataset

    class Seconds(Dataset[float]):
        def __getitem__(self, cuts: Any) -> float:
            return sum(cut.duration for cut in cuts)

    os.chdir(folder)
    small = {
        **WHOLE,
        "manifest_filepath": "manifest.json",
        "bucket_buffer_size": 100,
        "concurrent_bucketing": False,
    }
    return [
        [max(get_lhotse_dataloader_from_config(OmegaConf.create({**small, **given}), rank, 2, Seconds()))
         for rank in (0, 1)]
        for given, _ in BY_DURATION
    ]  # fmt: skip


def test_one_rank_alone_gets_a_very_long_entry(tmp_path: Path) -> None:
    """NP134."""
    write_data(tmp_path)
    manifest = tmp_path / "manifest.json"
    entries = manifest.read_text().splitlines() * 3
    path = tmp_path / "long.wav"
    long = {**json.loads(entries[0]), "audio_filepath": str(path), "duration": LONG_S}
    manifest.write_text("\n".join([*entries, json.dumps(long)]))
    with wave.open(str(path), "wb") as audio:
        audio.setparams((1, 2, 16000, 0, "NONE", ""))
        audio.writeframes(b"\0\0" * int(16000 * LONG_S))
    (rank,) = run_ranks(longest_batches, 1, str(tmp_path), group=False)
    ranks_with_it = [
        sum(seconds >= LONG_S for seconds in ranks) for ranks in rank.value
    ]
    assert ranks_with_it == [int(alone) for _, alone in BY_DURATION], rank.value
    for given, alone in BY_DURATION:
        config = {
            "trainer": {"devices": 2},
            "model": {"train_ds": {**WHOLE, "shar_path": "a", **given}},
        }
        source = yaml_text.parse(
            Path("config.yaml"), OmegaConf.to_yaml(OmegaConf.create(config))
        )
        found = examination.checked(
            Job(reading.with_overrides(source)), examination.chosen(["NP134"])
        )
        assert [rule.identifier for rule, _ in found].count("NP134") == alone, given


# --- what NeMo asks the length of a training set for

SETS_OF_LHOTSE: list[dict[str, Any]] = [{}, {"force_iterable_dataset": True}]
SCHEDULES: list[dict[str, Any]] = [
    {"t_limit_train_batches": 1.0},
    {"t_limit_train_batches": 9},
    {"max_steps": 9},
]
FLAGS: list[dict[str, Any]] = [{}, {"is_tarred": True}]
MODELS = {"EncDecCTCModel": [], "EncDecMultiTaskModel": ["+model.transf_decoder={}"]}
LIMITS = (1.0, 100)


def has_no_length(_rank: int, _size: int, folder: str) -> tuple[list[bool], list[bool]]:
    """Whether NeMo's scheduler, and then its models, stop with each of these, as a set of Lhotse
    has no len().
    """
    import os
    from types import SimpleNamespace

    import torch
    from nemo.collections.asr import models
    from nemo.collections.common.data.lhotse.dataloader import (
        get_lhotse_dataloader_from_config,
    )
    from nemo.core.optim.lr_scheduler import prepare_lr_scheduler

    os.chdir(folder)

    def stops(call: Any) -> bool:
        try:
            call()
        except TypeError as error:
            assert "has no len()" in str(error)
            return True
        return False

    def loader(given: dict[str, Any]) -> Any:
        config = OmegaConf.create(
            {**WHOLE, "manifest_filepath": "manifest.json", **TWO, **given}
        )
        return get_lhotse_dataloader_from_config(
            config, 0, 1, torch.utils.data.Dataset()
        )

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    usual = {
        "name": "CosineAnnealing",
        "t_max_epochs": 2,
        "t_accumulate_grad_batches": 1,
        "t_num_workers": 1,
    }
    schedules = [
        stops(
            lambda given=given, more=more: prepare_lr_scheduler(
                optimizer, {**usual, **more}, loader(given)
            )
        )
        for given in SETS_OF_LHOTSE
        for more in SCHEDULES
    ]
    asking = []
    for name in MODELS:
        for given in SETS_OF_LHOTSE:
            for flag in FLAGS:
                for limit in LIMITS:
                    model = SimpleNamespace(
                        _setup_dataloader_from_config=lambda config: loader(config),
                        _update_dataset_config=lambda **_: None,
                        _trainer=SimpleNamespace(limit_train_batches=limit),
                        _train_dl=None,
                        world_size=1,
                    )
                    setup = getattr(models, name).setup_training_data
                    asking.append(
                        stops(
                            lambda given=given, flag=flag, model=model, setup=setup: (
                                setup(model, OmegaConf.create({**given, **flag, **TWO}))
                            )
                        )
                    )
    return schedules, asking


def test_the_doctor_knows_who_asks_for_a_length(tmp_path: Path) -> None:
    write_data(tmp_path)
    (rank,) = run_ranks(has_no_length, 1, str(tmp_path), group=False)
    by_nemo_schedules, by_nemo_models = rank.value
    encoder = {"_target_": "nemo.collections.asr.modules.ConformerEncoder"}

    def said(
        rule: str, given: dict[str, Any], trainer: dict[str, Any], *overrides: str
    ) -> bool:
        train = {**WHOLE, "manifest_filepath": "manifest.json", **TWO, **given}
        config = {"model": {"encoder": encoder, "train_ds": train}, "trainer": trainer}
        source = yaml_text.parse(
            Path("config.yaml"), OmegaConf.to_yaml(OmegaConf.create(config))
        )
        job = Job(reading.with_overrides(source, overrides))
        found = examination.checked(job, examination.chosen([rule]))
        return any("stops at its start" in finding.what for _, finding in found)

    schedule = "+model.optim={sched: {name: CosineAnnealing}}"
    by_doctor = [
        said(
            "NP133",
            given,
            {
                "limit_train_batches": more.get("t_limit_train_batches", 1.0),
                "max_steps": more.get("max_steps", -1),
            },
            schedule,
        )
        for given in SETS_OF_LHOTSE
        for more in SCHEDULES
    ]
    assert by_doctor == by_nemo_schedules
    by_doctor = [
        said("NP104", {**given, **flag}, {"limit_train_batches": limit}, *of_model)
        for of_model in MODELS.values()
        for given in SETS_OF_LHOTSE
        for flag in FLAGS
        for limit in LIMITS
    ]
    assert by_doctor == by_nemo_models


def is_validated(_rank: int, _size: int) -> list[bool]:
    """Whether Lightning comes to validation, with 8 batches, and without a length as Lhotse's sets
    are.
    """
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Batches(Dataset[Any]):
        def __getitem__(self, _index: int) -> Any:
            return torch.ones(4)

    class Sampler:
        def __iter__(self) -> Any:
            return iter(range(8))

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.validated = 0

        def training_step(self, batch: Any, _index: int) -> Any:
            return self.layer(batch).sum()

        def validation_step(self, _batch: Any, _index: int) -> None:
            self.validated += 1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    validated = []
    for trainer in (
        {"limit_train_batches": 20},
        {"limit_train_batches": 8},
        {"limit_train_batches": 20, "val_check_interval": 0.4},
        {
            "limit_train_batches": 20,
            "val_check_interval": 15,
            "check_val_every_n_epoch": None,
        },
    ):
        model = Model()
        loaders = [
            DataLoader(Batches(), sampler=Sampler(), batch_size=None) for _ in range(2)
        ]  # type: ignore[arg-type]
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        given: dict[str, Any] = {
            **quiet,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            **trainer,
        }
        pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, **given).fit(
            model, *loaders
        )
        validated.append(model.validated > 0)
    return validated


def test_an_epoch_shorter_than_its_limit_is_never_validated() -> None:
    """NP135."""
    (rank,) = run_ranks(is_validated, 1, group=False)
    assert rank.value == [False, True, True, True]
