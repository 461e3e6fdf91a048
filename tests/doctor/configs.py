"""Small configs for the doctor's tests, and what one rule finds in them; every change is an
override of Hydra's.
"""

from __future__ import annotations

from pathlib import Path

from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import RuleFinding, Severity

NOTE, WARNING, ERROR = Severity.NOTE, Severity.WARNING, Severity.ERROR

# NEST pre-training as upstream has it, but with inputs that fit: nothing but notes in it.
NEST = """\
model:
  sample_rate: 16000
  train_ds:
    manifest_filepath: ???
    batch_size: 8
    num_workers: 8
    pin_memory: true
    max_duration: 40.0
    drop_last: true
    is_tarred: false
    tarred_audio_filepaths: null
  validation_ds:
    manifest_filepath: ???
    batch_size: 8
    num_workers: 8
    max_duration: 40.0
  preprocessor:
    _target_: nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor
    sample_rate: ${model.sample_rate}
    window_stride: 0.01
    pad_to: 16
  encoder:
    _target_: nemo.collections.asr.modules.ConformerEncoder
    pos_emb_max_len: 5000
    conv_norm_type: batch_norm
trainer:
  devices: 4
  num_nodes: 1
  accelerator: gpu
  strategy: ddp
exp_manager:
  create_preemption_callback: false
"""

# A transducer on Lhotse, as NeMo's documentation has it.
LHOTSE = """\
model:
  sample_rate: 16000
  train_ds:
    use_lhotse: true
    manifest_filepath: ???
    batch_duration: 360
    max_duration: 40.0
    num_workers: 8
    shard_seed: 0
  validation_ds:
    use_lhotse: true
    manifest_filepath: ???
    batch_size: 4
    max_duration: 40.0
  preprocessor:
    _target_: nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor
  encoder:
    _target_: nemo.collections.asr.modules.ConformerEncoder
  joint:
    _target_: nemo.collections.asr.modules.RNNTJoint
    fuse_loss_wer: true
    fused_batch_size: 4
trainer:
  devices: 4
  strategy:
    _target_: lightning.pytorch.strategies.DDPStrategy
  use_distributed_sampler: false
  max_steps: 1000
"""


def report(folder: Path, text: str, *overrides: str) -> examination.Examination:
    """What all rules find in a text."""
    path = folder / "config.yaml"
    path.write_text(text)
    return examination.examine(path, overrides, examination.chosen())


def found(folder: Path, rule: str, text: str, *overrides: str) -> list[RuleFinding]:
    """What one rule finds in a text; the others must not fail on it, either."""
    done = report(folder, text, *overrides)
    assert not done.error, done.error
    assert not [
        finding for checked, finding in done.findings if checked.identifier == "NP001"
    ]
    return [finding for checked, finding in done.findings if checked.identifier == rule]
