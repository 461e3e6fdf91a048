"""sync_batchnorm on the CPU: the first training step stops with an error.

PyTorch supports it on GPUs only. It never has anything to do with a hang in the length sync.
Link: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from __future__ import annotations

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.encoders import Encoder
from nemo_patches.tools.doctor.finding import WARNING, Change, Findings, warning
from nemo_patches.tools.doctor.job import Job

WORST = WARNING
BAD = """\
trainer: {devices: 2, accelerator: cpu, sync_batchnorm: true}
model:
  encoder: {_target_: nemo.collections.asr.modules.ConformerEncoder}
"""
GOOD = BAD.replace(", sync_batchnorm: true", "")


def check(job: Job) -> Findings:
    """Where an encoder that is known has batch normalisation."""
    switch = job.trainer("sync_batchnorm", False)
    if not job.several or not switch.on or job.accelerator.value != "cpu":
        return
    batch = [
        value
        for value in map(_normalisation, job.encoders)
        if value.value in ("batch_norm", "batch")
    ]
    if batch:
        yield warning(
            "sync_batchnorm on the CPU: the first training step stops with an error",
            (switch, job.accelerator, *batch),
            "sync_batchnorm: false",
            change=Change(("trainer", "sync_batchnorm"), False),
        )


def _normalisation(encoder: Encoder) -> Value:
    if encoder.cls and not encoder.cls.positional:  # ConvASREncoder
        return encoder.get("normalization_mode", "batch")
    if encoder.cls and encoder.cls.name == "TransformerEncoder":
        return Value(f"{encoder.where} (TransformerEncoder)", "layer_norm", "default")
    return encoder.get("conv_norm_type", "batch_norm")
