"""What NP111, NP125, NP130 and NP131 say of a data set, beside what NeMo's own Lhotse loader does with it."""

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
PARQUET = "p.parquet"  # of which the first bytes are enough to be no JSON

# What a set has beside a manifest and seeds; whether NeMo stops or reads nothing, before 3.0 and from 3.0 on.
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
    ({"batch_duration": 10, "bucket_duration_bins": [1.7, 1.2], "use_bucketing": True}, True, True),
    ({"batch_duration": 10, "bucket_duration_bins": [1.2, 1.2], "use_bucketing": True}, False, False),
    ({"batch_duration": 10, "bucket_duration_bins": [], "use_bucketing": True}, True, True),
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
    ({**TWO, "input_cfg": [{**ENTRY, "weight": 1}, {**ENTRY, "weight": 2}]}, False, False),
    ({**TWO, "input_cfg": [{**ENTRY, "weight": 0}, {**ENTRY, "weight": 1}]}, False, True),
    ({**TWO, "input_cfg": [{**ENTRY, "weight": 0}]}, False, False),
    ({**TWO, "input_cfg": "inputs.yaml"}, False, False),
    ({**TWO, "input_cfg": "inner.yaml"}, True, True),
    ({**TWO, "manifest_filepath": PARQUET}, True, True),
    ({**TWO, "input_cfg": [{"type": "nemo", "manifest_filepath": PARQUET}]}, True, True),
]
SETS: dict[str, Any] = {"multi_config": True, "a": {"manifest_filepath": "manifest.json", **TWO}}
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
STOPS = [*((from_3 if NEMO_3 else before) for _, before, from_3 in CASES), *(stops for _, stops in MULTI)]


def write_data(folder: Path) -> None:
    lines = []
    for number in range(8):
        path, seconds = folder / f"{number}.wav", 1 + number % 4 / 2
        with wave.open(str(path), "wb") as audio:
            audio.setnchannels(1)
            audio.setsampwidth(2)
            audio.setframerate(16000)
            audio.writeframes(b"\0\0" * int(16000 * seconds))
        lines.append(json.dumps({"audio_filepath": str(path), "duration": seconds, "text": "a", "lang": "en"}))
    (folder / "manifest.json").write_text("\n".join(lines))
    (folder / PARQUET).write_bytes(b"PAR1\x15\x04\x15\x80\x8c")
    (folder / "inputs.yaml").write_text("- {type: group, input_cfg: more.yaml}\n")
    (folder / "more.yaml").write_text("- {type: nemo, manifest_filepath: manifest.json}\n")
    (folder / "inner.yaml").write_text("input_cfg:\n- {type: nemo, manifest_filepath: manifest.json}\n")


def stopped(_rank: int, _size: int, folder: str) -> list[str]:
    """Why NeMo does not come to a second batch with each config; empty where it does."""
    import os

    from nemo.collections.common.data.lhotse.dataloader import get_lhotse_dataloader_from_config
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
            loader = get_lhotse_dataloader_from_config(OmegaConf.create({**small, **given}), 0, 1, Counted())
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
            Path("config.yaml"), OmegaConf.to_yaml(OmegaConf.create({"model": {"train_ds": config}}))
        )
        found = examination.checked(Job(reading.with_overrides(source)), rules)
        said = [finding.what for _, finding in found if finding.severity > Severity.NOTE]
        if bool(said) != stops:
            wrong.append((config, said))
    assert wrong == []
