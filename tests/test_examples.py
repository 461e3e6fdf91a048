"""examples/: the doctor finds nothing in them, they train, and the demo's model is that of the NEST
example, small.

On two ranks, examples/nest/pretrain.py is trained in test_auto_apply.py.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import nest_training
import pytest
from omegaconf import OmegaConf
from ranks import free_port, run_ranks

import nemo_patches
from nemo_patches.tools.demo import nest
from nemo_patches.tools.doctor import examination

pytestmark = pytest.mark.one_nemo

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIGS = sorted(EXAMPLES.glob("*/*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_doctor_finds_nothing(path: Path) -> None:
    report = examination.examine(path, (), examination.chosen())
    assert (report.error, report.exit_code) == ("", 0), report.findings


def test_the_doctor_finds_nothing_with_the_tests_own_overrides(tmp_path: Path) -> None:
    overrides = nest_training.overrides(tmp_path)
    report = examination.examine(
        EXAMPLES / "nest" / "nest_ddp.yaml", overrides, examination.chosen()
    )
    assert (report.error, report.exit_code) == ("", 0), report.findings


def test_both_nest_configs_are_the_same_but_for_the_trainer() -> None:
    plain, ddp = (
        OmegaConf.load(EXAMPLES / "nest" / name)
        for name in ("nest.yaml", "nest_ddp.yaml")
    )
    assert (plain.trainer.devices, plain.trainer.get("strategy")) == (1, None)
    assert (ddp.trainer.devices, ddp.trainer.strategy) == (8, "ddp")
    for config in (plain, ddp):
        for name in ("accelerator", "devices", "num_nodes", "strategy"):
            config.trainer.pop(name, None)
    assert plain == ddp


# The demo's own: its size, its data, and inputs of 60 s as in NeMo's config, which outgrow the
# positional encodings.
OF_THE_DEMO = {
    *(
        "num_classes",
        "d_model",
        "n_layers",
        "n_heads",
        "subsampling_conv_channels",
        "ff_expansion_factor",
        "dropout",
    ),
    *(
        "manifest_filepath",
        "noise_manifest",
        "batch_size",
        "num_workers",
        "shuffle",
        "channel_selector",
        "pin_memory",
    ),
    *(
        "max_duration",
        "min_duration",
        "mask_prob",
        "warmup_steps",
        "pos_emb_max_len",
        "sync_max_audio_length",
    ),
}


def test_the_demo_trains_the_model_of_the_example(tmp_path: Path) -> None:
    config = OmegaConf.load(EXAMPLES / "nest" / "nest.yaml")
    del config.model.train_ds.manifest_filepath, config.model.train_ds.noise_manifest
    del (
        config.model.validation_ds.manifest_filepath,
        config.model.validation_ds.noise_manifest,
    )
    config.model.encoder.d_model, config.model.num_classes = nest.WIDTH, nest.CODES
    example: Any = OmegaConf.to_container(config, resolve=True)
    del example["model"]["noise"]  # shared by the two data sets
    demo = nest.model(tmp_path, 0)

    def compared(section: str, one: Any, other: Any) -> None:
        for name in {*one, *other} - OF_THE_DEMO:
            left, right = one.get(name), other.get(name)
            if isinstance(right, dict):
                compared(f"{section}.{name}", left, right)
            else:
                assert left == right, f"{section}.{name}"

    compared("model", demo, example["model"])


def commands(readme: Path, folder: Path) -> list[list[str]]:
    """The README's first command, split at its &&, with its data in `folder`."""
    block = re.findall(r"(?:^    .*\n)+", readme.read_text(), re.MULTILINE)[0].replace(
        "/tmp/tones", str(folder)
    )
    words = shlex.split(block.replace("\\\n", " "))
    split = words.index("&&")
    return [words[:split], words[split + 1 :]]


def trained(rank: int, size: int, port: int, folder: str) -> None:
    """What torchrun would run, one after the other: a launcher for each would import NeMo six
    times.
    """
    import torch

    torch.set_num_threads(1)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "x",
    }
    os.environ.update(
        {name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1"
    )
    os.chdir(folder)
    nemo_patches.apply(timeout=5)
    for readme in READMES:
        words = commands(readme, Path(folder))[1]
        start = next(place for place, word in enumerate(words) if word.endswith(".py"))
        sys.argv = [str(EXAMPLES.parent / words[start]), *words[start + 1 :]]
        runpy.run_path(sys.argv[0], run_name="__main__")


READMES = sorted(EXAMPLES.glob("*/README.md"))


def test_the_commands_of_the_readmes_train_on_two_ranks(tmp_path: Path) -> None:
    assert len(READMES) == 3
    for readme in READMES:
        made, launched = commands(readme, tmp_path)
        assert made == ["python", "examples/make_audio.py", str(tmp_path)]
        launcher = ["torchrun", "--standalone", "--nproc-per-node", "2"]
        if readme.parent.name != "own_manifest":  # its script has the apply() itself
            launcher = ["nemo-patches", "run", "--timeout", "5", "--", *launcher]
        assert launched[: len(launcher) + 1] == [
            *launcher,
            next(word for word in launched if word.endswith(".py")),
        ]
    subprocess.run(
        [sys.executable, EXAMPLES / "make_audio.py", tmp_path], check=True, timeout=60
    )
    results = run_ranks(trained, 2, free_port(), str(tmp_path), group=False)
    assert results[0].stderr.count("`max_steps=4` reached") == 3
    assert len(results[0].lines("patched on all 2 ranks: ConformerEncoder")) == 1
    assert (tmp_path / "trained.nemo").is_file()


def test_the_script_with_hydra_in_the_documents_runs(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "auto-apply.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (settings,) = re.findall(r"# my_config\.yaml: (.*)", script)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "my_config.yaml").write_text(
        f"{settings}\ntrainer: {{accelerator: cpu, devices: 1, logger: false,"
        " enable_checkpointing: false}\nexp_manager:\n"
        f"  exp_dir: {tmp_path}\n  create_tensorboard_logger: false\n"
        "hydra: {run: {dir: .}}\n"
    )
    (tmp_path / "train.py").write_text(
        "import lightning.pytorch as pl\nfrom nemo.core.config import hydra_runner\n"
        "from nemo.utils.exp_manager import exp_manager\nimport nemo_patches\n\n"
        f"{script}    print('settings:', nemo_patches.status().settings)\n\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (line,) = re.findall("settings: .*", done.stdout)
    assert ", timeout=5 s, " in line
    assert line.endswith("stall_exit=600 s")
