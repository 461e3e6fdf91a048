"""The effective sync_max_audio_length of every encoder, and what it means for this job.

With it on, also by default, every call of the encoder waits for every rank, without a timeout of
its own. With it off, ranks may grow their positional encodings differently (NP102). NeMo 2.1 always
has it on.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/11462
"""

from __future__ import annotations

from nemo_patches.tools.doctor.encoders import FLAG, Encoder, unknown_in
from nemo_patches.tools.doctor.finding import (
    Findings,
    RuleFinding,
    note,
    stops,
    warning,
)
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE

WHOLE = True
BAD = """\
trainer: {devices: 4}
model:
  encoder: {_target_: nemo.collections.asr.modules.ConvASREncoder, sync_max_audio_length: false}
"""
GOOD = """\
trainer: {devices: 1}
model:
  encoder: {_target_: nemo.collections.asr.modules.ConvASREncoder}
"""

_BOUNDED = (
    "`nemo-patches run -- COMMAND`, which bounds that wait, and says which rank is"
    " missing"
)


def check(job: Job) -> Findings:
    """One finding for each encoder, and one for each checkpoint that brings one."""
    if not job.several:
        return
    for encoder in job.encoders:
        yield from _of_class(encoder)
        yield _effective(job, encoder)
    for target in unknown_in(job.config):
        yield note(
            f"{target.key}: a class that the doctor does not know; it cannot tell"
            " whether it has a length sync",
            target,
            "`nemo-patches status` tells what would be patched; a subclass has its"
            " base's length sync",
        )
    for value in map(job.get, TABLE["checkpoints"]["of_an_encoder"]):
        if value.value is not None:
            yield note(
                f"the encoder that {value.key} brings has the {FLAG} of that"
                " checkpoint's own config, on by default: every call then waits for"
                " all ranks",
                value,
                _BOUNDED,
            )


def _of_class(encoder: Encoder) -> Findings:
    """What is wrong with the flag itself."""
    flag = encoder.get(FLAG)
    if not flag.given:
        return
    if not encoder.has_flag:
        yield stops(
            f"{encoder.name} does not take {FLAG}",
            flag,
            f"no {FLAG}: this class always reduces",
        )
    elif flag.known and not isinstance(flag.value, bool):
        yield warning(
            f"{flag.key} is {flag.value!r}, which is no switch: Python takes it as"
            f" {str(bool(flag.value)).lower()}",
            flag,
            f"{FLAG}: true or {FLAG}: false",
        )


def _effective(job: Job, encoder: Encoder) -> RuleFinding:
    flag = encoder.flag
    read = (encoder.get("_target_"), flag, job.strategy, job.devices, job.nodes)
    name = f"{encoder.where} ({encoder.name})"
    if not flag.known:
        return note(f"{name}: {FLAG} is {flag.value!r}", read)
    if not encoder.syncs:
        return note(f"{name}: off, no length is communicated", read)
    value = "on" if flag.given else "on, NOT SET"
    if not encoder.has_flag:
        value = "no switch, always on"
    ranks = f"all {job.ranks} ranks" if job.ranks else "all ranks"
    limit = job.group_timeout.total_seconds() / 60 if job.group_timeout else 30
    return note(
        f"{name}: {value}; every call, in validation too, waits for {ranks}, until the"
        f" process group's timeout ({limit:g} min)",
        read,
        _BOUNDED,
    )
