"""skip_nan_grad: another collective in every step, and a look at every gradient.

After each backward pass it reduces over all ranks whether any gradient is NaN, without a timeout,
and waits for the GPU once for each parameter. No length fallback helps there.
Link: https://github.com/NVIDIA-NeMo/Speech/blob/main/nemo/collections/asr/models/asr_model.py
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import NOTE, Findings, note
from nemo_patches.tools.doctor.job import Job

WORST = NOTE
BAD = """\
trainer: {devices: 4}
model: {skip_nan_grad: true}
"""
GOOD = BAD.replace("skip_nan_grad: true", "skip_nan_grad: false")


def check(job: Job) -> Findings:
    """In the model's section, where NeMo looks for it."""
    switch = job.get("model.skip_nan_grad", False)
    if job.several and switch.known and switch.value:
        yield note(
            f"skip_nan_grad reduces over {job.all_ranks} after every backward pass, and"
            " waits there for a missing one",
            switch,
            "skip_nan_grad: false, unless gradients are known to be NaN at times",
        )
