"""Something in the config was not read, so the rules that need it could not be checked.

For example an input_cfg in a file that is not on this machine, or (a note) a value that only a
variable of the job's machine gives. Otherwise a run without findings would wrongly say that nothing
is wrong.
Link: docs/doctor.md
"""

from __future__ import annotations

from nemo_patches.tools.doctor.config import IN_FILES
from nemo_patches.tools.doctor.datasets import ROLES
from nemo_patches.tools.doctor.finding import Findings, note, warning
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE

BAD = """\
trainer: {devices: 4}
model:
  train_ds: {use_lhotse: true, input_cfg: "s3://bucket/train.yaml", batch_size: 8}
"""
GOOD = BAD.replace("s3://bucket/train.yaml", "???")


def check(job: Job) -> Findings:
    """The file of an input_cfg, of a set or of a group, or of a set's datasets; and values of the
    job's machine.
    """
    for keys, _ in job.config.mappings():
        of_a_set = not ROLES.keys().isdisjoint(keys)
        for key in IN_FILES if of_a_set else IN_FILES[:1]:
            inputs = job.get((*keys, key))
            if inputs.named:
                yield warning(
                    f"not judged: {inputs.key} is in {inputs.value}, which cannot be read here",
                    inputs,
                    "start the doctor in the folder and on a machine where NeMo finds that file",
                )
    values = [job.get(keys) for keys in sorted(job.config.of_machine)]
    decisive = tuple(value for value in values if value.keys[-1] in TABLE["decisive"])
    if decisive:
        names = ", ".join(value.key for value in decisive)
        what = f"not judged: {names}: only the job's machine gives the value"
        yield note(what, decisive, "an override with the value (key=value)")
