"""The process group's timeout, where it is not a duration.

When it passes, PyTorch ends the job. A number is not a duration: the job stops at its start. YAML
can express a duration only for NeMo up to 2.7: 3.0 refuses the _target_, and the training script
must create the strategy.
Link: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
"""

from __future__ import annotations

from nemo_patches.tools.doctor.finding import Findings, note, stops
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE
from nemo_patches.tools.doctor.syntax import last_part

BAD = """\
trainer:
  devices: 4
  strategy: {_target_: lightning.pytorch.strategies.DDPStrategy, timeout: 3600}
"""
GOOD = BAD.replace(", timeout: 3600", "")

_AS_A_DURATION = (
    "up to NeMo 2.7, timeout: {_target_: datetime.timedelta, minutes: 30}; "
    "from 3.0 on, DDPStrategy(timeout=timedelta(minutes=30)) in the training script"
)


def check(job: Job) -> Findings:
    """Only where the config sets it, as a strategy's keyword; a number stops the job on one rank,
    too.
    """
    value = job.get("trainer.strategy.timeout")
    strategy = last_part(str(job.strategy.value))
    timed = TABLE["strategies_with_a_timeout"]
    if isinstance(value.value, (int, float, str)) and strategy in timed:
        what = f"{value.key} is {value.value!r}, and {strategy} takes a timedelta"
        yield stops(what, value, _AS_A_DURATION)
    elif job.several and job.ddp and job.group_timeout is not None:
        what = (
            f"{value.key}: NeMo 3.0 refuses _target_: datetime.timedelta, and the job"
            " stops at its start there"
        )
        yield note(what, value, _AS_A_DURATION)
