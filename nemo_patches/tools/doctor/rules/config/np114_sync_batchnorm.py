"""sync_batchnorm on the CPU, or for a model without batch normalisation.

On the CPU the first training step stops with an error, because PyTorch supports it on GPUs only. Without batch
normalisation it does nothing. It never has anything to do with a hang in the length sync.
Link: https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from __future__ import annotations

from nemo_patches.tools.doctor.config import Value
from nemo_patches.tools.doctor.encoders import Encoder
from nemo_patches.tools.doctor.finding import WARNING, Change, Findings, note, warning
from nemo_patches.tools.doctor.job import Job

WORST = WARNING
FOLDED = True
BAD = """\
trainer: {devices: 2, accelerator: cpu, sync_batchnorm: true}
model:
  encoder: {_target_: nemo.collections.asr.modules.ConformerEncoder}
"""
GOOD = BAD.replace(", sync_batchnorm: true", "")


def check(job: Job) -> Findings:
    """Against the normalisation of the encoders that are known."""
    switch = job.trainer("sync_batchnorm", False)
    if not job.several or switch.value is not True or not job.encoders:
        return
    normalisations = [_normalisation(encoder) for encoder in job.encoders]
    batch = [value for value in normalisations if value.value in ("batch_norm", "batch")]
    if batch and job.accelerator.value == "cpu":
        yield warning(
            "sync_batchnorm on the CPU: the first training step stops with an error",
            (switch, job.accelerator, *batch),
            "sync_batchnorm: false",
            Change(("trainer", "sync_batchnorm"), False),
        )
    elif not batch and all(value.known for value in normalisations):
        what = "sync_batchnorm has nothing to do: no encoder in the config has batch normalisation"
        yield note(what, (switch, *normalisations))


def _normalisation(encoder: Encoder) -> Value:
    if encoder.cls and not encoder.cls.positional:  # ConvASREncoder
        return encoder.get("normalization_mode", "batch")
    if encoder.cls and encoder.cls.name == "TransformerEncoder":
        return Value(f"{encoder.where} (TransformerEncoder)", "layer_norm", "default")
    return encoder.get("conv_norm_type", "batch_norm")
