"""The hangs that are run here: who reported each, and how it is to end. Imports neither torch nor
NeMo.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

# How a job ends. NAMED: a stall line on every living rank says which rank is waited for, and where
# it is.
ENDS, NAMED, HANGS, DIES = "ends", "is named", "hangs", "dies"


@dataclass(frozen=True)
class Hang:
    """A hang that was reported, and how its job is to end, as stock and with nemo_patches.

    module: the one here with the scenario, a function that has the hang's name, with underscores.
    named: a pattern of
    the stall line. settings: of apply(), in addition to a short stall_timeout.
    """

    name: str
    module: str
    reports: tuple[str, ...]
    ours: str
    named: str = ""
    stock: str = HANGS
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def function(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return Path(__file__).with_name(f"{self.module}.py")

    @property
    def job(self) -> str:
        """What the job does: the function's docstring."""
        module = ast.parse(self.source.read_text(encoding="utf-8"))
        functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
        (function,) = [node for node in functions if node.name == self.function]
        return " ".join((ast.get_docstring(function) or "").split())


def _issues(repository: str, *numbers: int) -> tuple[str, ...]:
    return tuple(f"{repository}#{number}" for number in numbers)


_speech = partial(_issues, "NVIDIA-NeMo/Speech")
_lightning = partial(_issues, "Lightning-AI/pytorch-lightning")
_torch = partial(_issues, "pytorch/pytorch")


def _of(rank: int, what: str) -> str:
    return rf"\brank {rank} \([^)]*\)[^|]*\b{what}"


_DEFERRED = {"metrics": "deferred"}
_TOGETHER = {"stop_together": "training"}
_READS = r"read \(\S*group.py:\d+\)"
_BUFFERS = "DDP's buffer broadcast"
_BACKWARD = "backward, which reduces the gradients"

_ALL = (
    # The length sync, and the positional encoding that it sizes.
    Hang("length-sync", "steps", _speech(8897), NAMED, _of(1, _READS)),
    Hang(
        "growing-positions", "steps", (*_speech(3304), *_torch(63916)), ENDS, stock=DIES
    ),
    Hang("encoder-on-some-ranks", "evaluation", _speech(11462), ENDS),
    Hang("chunked-audio", "evaluation", _speech(15648, 16048, 16192), ENDS, stock=DIES),
    Hang(
        "rank-0-validates",
        "evaluation",
        ("jpata/particleflow#233", "kaldi-asr/kaldi#4346"),
        ENDS,
    ),
    # Validation.
    Hang(
        "uneven-validation", "evaluation", _speech(532, 1861), ENDS, settings=_DEFERRED
    ),
    Hang(
        "fuse-loss-wer",
        "evaluation",
        _speech(16003, 4348, 10787),
        ENDS,
        settings=_DEFERRED,
    ),
    Hang(
        "metric-on-rank-0",
        "evaluation",
        ("talmolab/sleap-nn#476",),
        NAMED,
        _of(0, "barrier, in .*on_validation_end"),
    ),
    # Uneven training data.
    Hang(
        "uneven-training",
        "uneven",
        _lightning(3325, 20404, 20561),
        ENDS,
        settings=_TOGETHER,
    ),
    Hang(
        "training-meets-validation",
        "uneven",
        (
            *_speech(13562),
            *_torch(153779),
            *_lightning(20832, 6798),
            "lhotse-speech/lhotse#1459",
        ),
        ENDS,
        settings=_TOGETHER,
    ),
    Hang("epoch-ends-early", "uneven", _lightning(11841), ENDS, settings=_TOGETHER),
    Hang("timer", "uneven", _speech(13840), ENDS, settings=_TOGETHER),
    Hang(
        "own-loop",
        "uneven",
        (*_lightning(14635), "FunAudioLLM/CosyVoice#180", "wenet-e2e/wenet#2552"),
        ENDS,
    ),
    # Steps in which ranks do not make the same collectives.
    Hang(
        "skipped-backward",
        "steps",
        (*_lightning(5243), "NVIDIA-NeMo/Automodel#2468"),
        NAMED,
        f"{_of(0, _BACKWARD)}.*{_of(1, _BUFFERS)}",
    ),
    Hang(
        "log-keys",
        "steps",
        _lightning(19106),
        NAMED,
        f"{_of(0, 'barrier, in')}.*{_of(1, _BACKWARD)}",
    ),
    Hang(
        "reduce-on-one-rank",
        "steps",
        ("SWivid/F5-TTS#346",),
        NAMED,
        _of(0, r"all_reduce, in reduce_loss \(steps.py"),
    ),
    # Checkpoints.
    Hang("nest-checkpoint", "checkpoints", _speech(13739, 14380, 7938, 10025), ENDS),
    Hang(
        "checkpoint-by-step",
        "checkpoints",
        _lightning(19045, 11267),
        NAMED,
        _of(0, "broadcast_object_list, in"),
    ),
    Hang(
        "save-on-rank-0",
        "checkpoints",
        _lightning(10947),
        NAMED,
        _of(0, "barrier, in .*while saving a checkpoint"),
    ),
    Hang(
        "save-on-exception",
        "checkpoints",
        _lightning(20187),
        NAMED,
        _of(1, "barrier, in .*while saving a checkpoint"),
    ),
    Hang(
        "by-the-clock",
        "checkpoints",
        ("speechbrain/speechbrain#2401",),
        NAMED,
        _of(0, "barrier, in save_checkpoint"),
    ),
    Hang(
        "interrupted-save",
        "checkpoints",
        ("NVIDIA-NeMo/Automodel#3254",),
        NAMED,
        _of(1, "barrier, in save_new_checkpoint"),
    ),
    Hang(
        "dead-mount",
        "checkpoints",
        ("lhotse-speech/lhotse#1146",),
        NAMED,
        r"rank 0 \([^)]*\) writes a checkpoint: _open",
    ),
    # Data that does not come.
    Hang(
        "buffer-broadcast",
        "steps",
        _speech(9563),
        NAMED,
        f"{_of(0, _READS)}.*{_of(1, _BUFFERS)}",
    ),
    Hang(
        "loader-worker",
        "loaders",
        (*_torch(87995), "facebookresearch/fairseq#4816"),
        NAMED,
        r"worker 0 \(pid \d+\) is in open\(\) of \S*audio_0.wav, has \S+shard_17.tar open",
    ),
    Hang("forked-lock", "loaders", _torch(130610), NAMED, _of(1, "forked_lock")),
    Hang("remote-audio", "loaders", _speech(15612), NAMED, _of(1, "download")),
)
HANGS_BY_NAME: Mapping[str, Hang] = {hang.name: hang for hang in _ALL}
