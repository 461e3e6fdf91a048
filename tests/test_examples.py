"""examples/: the doctor finds nothing in them, they train, and the demo's model is that of the NEST example, small.

On two ranks, examples/nest/pretrain.py is trained in test_auto_apply.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nest_training
import pytest
from omegaconf import OmegaConf
from ranks import run_ranks

from nemo_patches.tools.demo import data, nest
from nemo_patches.tools.demo.jobs import Job
from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import Severity

pytestmark = pytest.mark.one_nemo

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIGS = sorted(EXAMPLES.glob("*/*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_doctor_finds_nothing(path: Path) -> None:
    for patched in (None, examination.as_patched({})):
        report = examination.examine(path, (), examination.chosen(), patched)
        assert (report.error, report.exit_code) == ("", 0), report.findings


def test_with_the_tests_own_overrides_it_says_what_is_particular_to_them(tmp_path: Path) -> None:
    report = examination.examine(
        EXAMPLES / "nest" / "nest_ddp.yaml", nest_training.overrides(tmp_path), examination.chosen()
    )
    # Each rank has manifests of its own, by an environment variable that the doctor does not read.
    assert {rule.identifier for rule, finding in report.findings if finding.severity > Severity.NOTE} == {"NP112"}


def test_both_nest_configs_are_the_same_but_for_the_trainer() -> None:
    plain, ddp = (OmegaConf.load(EXAMPLES / "nest" / name) for name in ("nest.yaml", "nest_ddp.yaml"))
    assert (plain.trainer.devices, plain.trainer.get("strategy")) == (1, None)
    assert (ddp.trainer.devices, ddp.trainer.strategy) == (8, "ddp")
    for config in (plain, ddp):
        for name in ("accelerator", "devices", "num_nodes", "strategy"):
            config.trainer.pop(name, None)
    assert plain == ddp


# The demo's own: its size, its data, and inputs of 60 s as in NeMo's config, which outgrow the positional encodings.
OF_THE_DEMO = {
    *("num_classes", "d_model", "n_layers", "n_heads", "subsampling_conv_channels", "ff_expansion_factor", "dropout"),
    *("manifest_filepath", "noise_manifest", "batch_size", "num_workers", "shuffle", "channel_selector", "pin_memory"),
    *("max_duration", "min_duration", "mask_prob", "warmup_steps", "pos_emb_max_len", "sync_max_audio_length"),
}
# NeMo's defaults, written out in the example.
DEFAULTS = {"sample_rate": 16000, "window_size": 0.025, "window_stride": 0.01}


def test_the_demo_trains_the_model_of_the_example(tmp_path: Path) -> None:
    from datetime import timedelta

    config = OmegaConf.load(EXAMPLES / "nest" / "nest.yaml")
    del config.model.train_ds.manifest_filepath, config.model.train_ds.noise_manifest
    del config.model.validation_ds.manifest_filepath, config.model.validation_ds.noise_manifest
    config.model.encoder.d_model, config.model.num_classes = nest.WIDTH, nest.CODES
    example: Any = OmegaConf.to_container(config, resolve=True)
    del example["model"]["noise"]  # shared by the two data sets
    demo = nest.model(Job("training", True, 0, 1, 0, tmp_path, timedelta(0)))

    def compared(section: str, one: Any, other: Any) -> None:
        for name in {*one, *other} - OF_THE_DEMO:
            left, right = one.get(name, DEFAULTS.get(name)), other.get(name)
            if isinstance(right, dict):
                compared(f"{section}.{name}", left, right)
            else:
                assert left == right, f"{section}.{name}"

    compared("model", demo, example["model"])


def trained(rank: int, size: int, folder: str) -> list[int]:
    """Both one-rank trainings in a process: a step or two, on the CPU."""
    import torch

    torch.set_num_threads(1)
    small = {"n_layers": 1, "d_model": 32, "n_heads": 2, "subsampling_conv_channels": 16}
    steps = []
    for script, name, classes in (("nest/pretrain", "nest/nest.yaml", 64), ("ctc/finetune", "ctc/finetune.yaml", None)):
        config: Any = OmegaConf.load(EXAMPLES / name)
        config.exp_manager = None
        config.model.encoder.update(small)
        if classes is not None:
            config.model.num_classes = classes
        for kind in ("train", "validation"):
            section = config.model[f"{kind}_ds"]
            section.update(manifest_filepath=f"{folder}/{kind}-0.json", batch_size=2, num_workers=0)
            if classes is not None:
                section.noise_manifest = f"{folder}/noise.json"
        config.trainer.update(accelerator="cpu", devices=1, strategy="auto", max_steps=2)
        config.trainer.update(val_check_interval=2, check_val_every_n_epoch=None, enable_progress_bar=False)
        sys.path.insert(0, str((EXAMPLES / script).parent))
        steps.append(__import__(Path(script).name).train(config).global_step)
    return steps


def test_they_train_and_validate(tmp_path: Path) -> None:
    data.write_shards(data.make_audio(tmp_path), 1, tmp_path, uneven=False)
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text().replace('"text": ""', '"text": "tones"'))
    (result,) = run_ranks(trained, 1, str(tmp_path), group=False)
    assert result.value == [2, 2]
