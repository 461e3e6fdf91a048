"""The longest possible input, compared with the positional encodings:
whether the encoder may have to grow them.

They start with pos_emb_max_len frames, counted before subsampling, and grow at the first longer
input. If ranks grow differently, DDP's broadcast of buffers overwrites rows without an error, or
aborts the job.
Link: https://github.com/NVIDIA-NeMo/Speech/pull/3304
"""

from __future__ import annotations

import math

from nemo_patches.tools.doctor.encoders import FLAG, Encoder
from nemo_patches.tools.doctor.finding import (
    ERROR,
    Change,
    Findings,
    error,
    note,
    stops,
    warning,
)
from nemo_patches.tools.doctor.job import Job
from nemo_patches.tools.doctor.known_keys import TABLE

WORST = ERROR
BAD = """\
trainer: {devices: 4, strategy: ddp}
model:
  train_ds: {manifest_filepath: a.json, batch_size: 8, max_duration: 60}
  preprocessor: {_target_: nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor}
  encoder: {_target_: nemo.collections.asr.modules.ConformerEncoder, sync_max_audio_length: false}
"""
GOOD = BAD.replace("sync_max_audio_length: false", "pos_emb_max_len: 6016")


def check(job: Job) -> Findings:
    """For each encoder that can grow, where several ranks' buffers are broadcast; a length that is
    none, on any rank.
    """
    overwrites = job.several and job.ddp and not job.broadcast_buffers.off
    for encoder in job.encoders:
        yield from _no_number(encoder)
        max_len = encoder.max_len.number or 0
        if overwrites and encoder.grows and max_len > 0:
            yield from _of(job, encoder, int(max_len))


def _no_number(encoder: Encoder) -> Findings:
    """What the encoder cannot make positional encodings of."""
    attention = encoder.get("self_attention_model", "rel_pos").value
    max_len = encoder.max_len
    if (
        not encoder.positional
        or attention not in TABLE["attention"]["positional"]
        or not max_len.known
    ):
        return
    number = 1.0 if max_len.on else max_len.number
    if number is None or number < 0 or (not number and attention == "rel_pos"):
        yield stops(
            f"{max_len.key} is {max_len.value!r}, which is no number of frames",
            max_len,
            "pos_emb_max_len: as many frames as the longest input has",
        )


def _of(job: Job, encoder: Encoder, max_len: int) -> Findings:
    frames = encoder.frames()
    longest = {dataset.where: dataset.longest() for dataset in job.datasets}
    read = [encoder.flag, encoder.max_len, *(frames.read if frames else ())]
    read += [value for each in longest.values() for value in each.read]
    read += [job.strategy, job.broadcast_buffers]
    counts = {
        where: frames.of(each.seconds)
        for where, each in longest.items()
        if frames and each.seconds is not None and math.isfinite(each.seconds)
    }
    most = max(counts.values(), default=0)
    open_sets = " and ".join(where for where in longest if where not in counts)
    name = f"{encoder.where} ({encoder.name})"
    if frames and most > max_len:
        sets = ", ".join(
            f"{where} {longest[where].seconds:g} s"
            for where, count in counts.items()
            if count > max_len
        )
        what = (
            f"{name}: an input may have {most} frames ({sets}), and its positional"
            f" encodings start with {max_len} ({max_len * frames.hop / frames.rate:g} s, as"
            " frames count before subsampling). "
        )
        instead = f"pos_emb_max_len: {most}, which changes no number that is computed"
        if open_sets:
            instead += f"; and a max_duration for {open_sets}"
        if encoder.syncs and encoder.flag.known:
            make = note
            what += (
                "All ranks grow alike as long as each makes the same calls; with a call"
                " more on one rank DDP overwrites rows or aborts the job"
            )
        else:
            make = warning if encoder.syncs else error
            what += (
                f"With {FLAG} off each rank grows by its own input, and DDP then"
                " overwrites rows or aborts the job"
            )
            instead += f"; or {FLAG}: true; or nemo_patches"
        change = Change((*encoder.keys, "pos_emb_max_len"), most)
        yield make(what, tuple(read), instead, change=change)
    elif open_sets and not encoder.syncs:
        yield warning(
            f"{name}: nothing tells how long {open_sets} may be, in frames of this"
            f" encoder, and its positional encodings start with {max_len}; with {FLAG}"
            " off a longer input on one rank makes DDP overwrite rows or abort the job",
            tuple(read),
            f"a max_duration that fits; or {FLAG}: true; or nemo_patches",
        )
