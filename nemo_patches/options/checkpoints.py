"""NeMo's checkpoint callback under several ranks: all take rank 0's decisions, agreed on over the side channel.

NeMoModelCheckpoint (nemo/utils/callbacks/nemo_model_checkpoint.py) and Lightning's ModelCheckpoint under it branch
between collectives on what a rank sees: whether a file exists, its own metrics, and lists of paths that have these in
their names. A rank that sees something else than rank 0 takes another branch, and all hang. Here every rank takes over
rank 0's view before such a branch. The job's collectives stay what they are, and rank 0 does what it does in stock.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch

from nemo_patches.channel.extremes import VALUE_BITS, VALUES, Extremes
from nemo_patches.channel.side_channel import RoundFailed
from nemo_patches.sync.length_sync import GroupSyncs, current, process
from nemo_patches.sync.patient_rounds import PatientRounds
from nemo_patches.sync.rank_log import raised_by_signal_handler, report

_LATE = "not every rank has come to this checkpoint within {waited:.2f} s; all wait for that"
_CHUNK = VALUE_BITS // 8  # bytes of a text in one round
# What the callback branches on, or passes to the code that saves and removes. best_k_models: the metrics' list.
_PATHS = ("kth_best_model_path", "best_model_path", "last_model_path", "_last_checkpoint_saved", "previous_best_path")
_SCORES = ("current_score", "best_model_score", "kth_value")
Words = dict[str, Any]  # what JSON holds


class CheckpointError(RuntimeError):
    """The ranks can no longer agree on a checkpoint: a rank has died, or does something else than rank 0."""


@dataclass(frozen=True)
class CheckpointCounters:
    """What the ranks have agreed on about checkpoints, as seen by this rank."""

    agreements: int = 0
    followed: int = 0  # agreements in which rank 0's text differed from this rank's own
    waited: timedelta = timedelta(0)
    ended: str = ""  # why each rank decides for itself again; empty while they agree

    def __str__(self) -> str:
        return (
            f"checkpoints: {self.agreements} agreements, {self.followed} on something else than this rank's own; "
            f"waited {self.waited.total_seconds():.3f} s" + (f"; ended: {self.ended}" if self.ended else "")
        )


class RankZero:
    """Rank 0's texts, under one process group. Only the training thread asks."""

    def __init__(self, group_syncs: GroupSyncs) -> None:
        self._group_syncs = weakref.ref(group_syncs)
        self._channel, self._is_rank_zero = group_syncs.channel, group_syncs.group.rank == 0
        self._rounds = PatientRounds(self, group_syncs, "checkpoints", "checkpoints", _LATE, "step {}".format)
        self._begin = group_syncs.channel.rounds("checkpoints begin")
        self._step = self._agreements = self._followed = 0
        self.ended = ""
        try:
            self._begin.issue(0)
        except RoundFailed as error:
            self._end(error)

    def is_of(self, group_syncs: GroupSyncs) -> bool:
        return self._group_syncs() is group_syncs

    def counters(self) -> CheckpointCounters:
        return CheckpointCounters(self._agreements, self._followed, self._rounds.waited, self.ended)

    def words(self, kind: str, own: str, step: int | None) -> str:
        """Return rank 0's text of this kind on every rank; each gives its own. Waits for all ranks as long as it takes.

        One round is enough if all texts are equal. Raises CheckpointError if a rank has died, or is elsewhere.
        """
        self._step, text = self._step if step is None else step, f"{kind} {own}"
        if self.ended or not self._has_begun():
            return own
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % VALUES
        extremes = self._round(digest)
        self._agreements += 1
        if extremes.highest.value == extremes.lowest.value:
            return own
        said_kind, _, said = self._told(text.encode() if self._is_rank_zero else b"").decode().partition(" ")
        if said_kind != kind:
            raise self._error(f"the ranks are out of step: rank 0 is at {said_kind}, this rank at {kind}")
        self._followed += said != own
        return said

    def _has_begun(self) -> bool:
        """Whether the first round has come, which every rank issues before the first collective of a training. Where a
        rank is without nemo_patches, or no connection leads to it, none comes on any rank, and all go on as stock."""
        if self._begin.has_come():
            return True
        try:
            if self._begin.wait(current().timeout) is not None:
                return True
        except RoundFailed as error:
            if self._channel.ended_by is not None:
                raise self._error(str(error)) from None
            self._end(error)
        else:
            self._end("not every rank takes part: one is not patched, or has checkpoints=stock, or is out of reach")
        return False

    def _end(self, why: object) -> None:
        self.ended = str(why)
        self._rounds.end(self.ended)
        report(logging.ERROR, f"checkpoints: each rank decides for itself, as in stock NeMo: {self.ended}")

    def _told(self, text: bytes) -> bytes:
        """Rank 0's text; the other ranks pass an empty one."""
        size = self._round(len(text)).highest.value
        chunks = (
            self._round(int.from_bytes(text[start : start + _CHUNK].ljust(_CHUNK), "big")).highest.value
            for start in range(0, size, _CHUNK)
        )
        return b"".join(chunk.to_bytes(_CHUNK, "big") for chunk in chunks)[:size]

    def _round(self, value: int) -> Extremes:
        try:
            self._rounds.issue(value, self._step)
            return self._rounds.result()
        except RoundFailed as error:
            raise self._error(f"{error}; seen at {time.strftime('%H:%M:%S')}") from None

    def _error(self, text: str) -> CheckpointError:
        self._rounds.end(text)
        return CheckpointError(
            f"checkpoints: step {self._step}: the ranks cannot agree any more: {text}. Go on from the last checkpoint"
        )


class Checkpoints:
    """The checkpoints of this process: the ranks it asks, and the callbacks whose scores are not rank 0's."""

    def __init__(self) -> None:
        self._rank_zero: RankZero | None = None
        self._votes: weakref.WeakKeyDictionary[Any, _Votes] = weakref.WeakKeyDictionary()
        self._given_up: Callable[[], object] = lambda: None  # the process group in which an error of ours ended this

    def counters(self) -> CheckpointCounters:
        """Under the present (or last) process group."""
        return CheckpointCounters() if self._rank_zero is None else self._rank_zero.counters()

    def begin(self) -> None:
        """Call it before the first collective of a training. Does not wait."""
        self._safely(self._present)

    def words(self, kind: str, own: str, step: int | None = None) -> str:
        """Rank 0's text; without other ranks, this rank's own. Raises CheckpointError."""

        def ask() -> str:
            return own if (rank_zero := self._present()) is None else rank_zero.words(kind, own, step)

        return own if (said := self._safely(ask)) is None else said

    def follow(self, callback: Any, trainer: Any, kind: str, candidates: Mapping[str, Any]) -> Any:
        """Make a callback see what rank 0's callback sees, with rank 0's candidates where it uses them."""

        def take_over() -> Mapping[str, Any]:
            text = json.dumps(own := _view(callback, candidates))
            said_text = self.words(kind, text, trainer.global_step)
            votes = self._votes.get(callback)
            if said_text == text and votes is None:
                return candidates
            if votes is None or votes.of is not callback.best_k_models:  # new, or from a checkpoint
                votes = self._votes[callback] = _Votes(callback.best_k_models)
            votes.current = candidates.get(callback.monitor)
            if said_text == text:
                return candidates
            said: Words = json.loads(said_text)
            if said["state"] != own["state"]:
                _set_state(callback, said["state"])
                votes.of = callback.best_k_models
            others = {name: value for name, value in candidates.items() if name not in own["metrics"]}
            return {**others, **{name: _tensor(value) for name, value in said["metrics"].items()}}

        return candidates if (taken := self._safely(take_over)) is None else taken

    def votes_of(self, callback: Any) -> _Votes | None:
        """None if this rank's scores have always been the same as rank 0's."""
        return self._votes.get(callback)

    def _present(self) -> RankZero | None:
        group_syncs = process.present_group()
        if group_syncs is None or group_syncs.default_group() is self._given_up():
            return None
        if self._rank_zero is None or not self._rank_zero.is_of(group_syncs):
            self._rank_zero = RankZero(group_syncs)
        return self._rank_zero

    def _safely(self, function: Callable[[], Any]) -> Any:
        """The result; None after an error of ours, which must not reach training."""
        try:
            return function()
        except Exception as error:
            if isinstance(error, CheckpointError) or raised_by_signal_handler(error):
                raise
            if (group := torch.distributed.group.WORLD) is not None and self._given_up() is not group:
                self._given_up = weakref.ref(group)
                text = "each rank decides for itself, as in stock NeMo, after an error of ours, please report it"
                report(logging.ERROR, f"checkpoints: {text}: {error!r}")
            return None


class _Votes:
    """This rank's own scores. All ranks vote on whether a model is among the best, each by its own, as in stock."""

    def __init__(self, of: dict[str, Any]) -> None:
        self.of = of  # the callback's own list, which is rank 0's
        self.scores = list(of.values())
        self.current: Any = None

    def vote(self, original: Callable[..., bool], callback: Any, trainer: Any, current: Any) -> bool:
        """Vote as NeMo would without us. A rank without this metric votes by rank 0's."""
        if current is None:
            return original(callback, trainer, current)
        own, listed = current if self.current is None else self.current, callback.best_k_models
        if len(self.scores) != len(listed):
            self.scores = list(listed.values())
        worst = (max if callback.mode == "min" else min)(self.scores, default=None)
        kept = (listed, callback.kth_best_model_path)
        callback.best_k_models = {str(number): score for number, score in enumerate(self.scores)}
        callback.kth_best_model_path = "" if worst is None else str(self.scores.index(worst))
        try:
            is_among = original(callback, trainer, own)
        finally:
            callback.best_k_models, callback.kth_best_model_path = kept
        if is_among:
            if len(self.scores) == callback.save_top_k:
                self.scores.remove(worst)
            is_none = isinstance(own, torch.Tensor) and bool(torch.isnan(own))
            self.scores.append(torch.tensor(float("inf" if callback.mode == "min" else "-inf")) if is_none else own)
        return is_among


checkpoints = Checkpoints()  # of this process


def replacements(owner: type, in_force: Callable[[], bool]) -> dict[str, Callable[..., Any]]:
    """Replacements for methods of NeMoModelCheckpoint, its own and inherited ones, by name. in_force: whether
    they do something else than the original."""

    def wrapped(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, wrapper.__name__)

        @functools.wraps(original)
        def method(callback: Any, *args: Any, **more: Any) -> Any:
            return wrapper(original, callback, *args, **more) if in_force() else original(callback, *args, **more)

        return method

    return {wrapper.__name__: wrapped(wrapper) for wrapper in _WRAPPERS if hasattr(owner, wrapper.__name__)}


def setup(original: Any, callback: Any, *args: Any, **more: Any) -> Any:
    checkpoints.begin()
    return original(callback, *args, **more)


def _monitor_candidates(original: Any, callback: Any, trainer: Any) -> Any:
    """Each save begins with this: the values for the checkpoint's name and score."""
    return checkpoints.follow(callback, trainer, "save", original(callback, trainer))


def check_monitor_top_k(original: Any, callback: Any, trainer: Any, current: Any = None) -> Any:
    votes = checkpoints.votes_of(callback)
    return original(callback, trainer, current) if votes is None else votes.vote(original, callback, trainer, current)


def on_save_checkpoint(original: Any, callback: Any, trainer: Any, pl_module: Any, checkpoint: Any) -> Any:
    if not callback.always_save_nemo:
        return original(callback, trainer, pl_module, checkpoint)
    checkpoints.follow(callback, trainer, "on_save_checkpoint", {})
    names = {"os": _OsOfRankZero(trainer), "torch": _TorchOfRankZero(callback, pl_module)}
    function = FunctionType(
        original.__code__, {**original.__globals__, **names}, original.__name__, None, original.__closure__
    )
    return function(callback, trainer, pl_module, checkpoint)


def on_train_end(original: Any, callback: Any, trainer: Any, pl_module: Any) -> Any:
    if not trainer.fast_dev_run:
        checkpoints.follow(callback, trainer, "on_train_end", {})
    return original(callback, trainer, pl_module)


def _get_checkpoints_list(original: Any, callback: Any, filepath: Any) -> Any:
    """The folder's contents after a save, by which all ranks drop the same optimizer states."""
    return json.loads(checkpoints.words("list", json.dumps(list(map(str, original(callback, filepath))))))


_WRAPPERS = (
    setup,
    _monitor_candidates,
    check_monitor_top_k,
    on_save_checkpoint,
    on_train_end,
    _get_checkpoints_list,
)


class _OsOfRankZero:
    """`os` as on_save_checkpoint sees it: a file exists where rank 0 finds it."""

    def __init__(self, trainer: Any) -> None:
        self.path, self._step = self, trainer.global_step

    def exists(self, path: str) -> bool:
        return checkpoints.words("file", str(int(os.path.exists(path))), self._step) == "1"

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _TorchOfRankZero:
    """`torch` as on_save_checkpoint of NeMo 2.1 to 2.7 sees it: it loads the best model on every rank, and rank 0 alone
    writes it. A rank that does not find the file, whose folder is another one, keeps its own model meanwhile."""

    def __init__(self, callback: Any, model: Any) -> None:
        self._is_written_by_all, self._model = (callback.model_parallel_size or 1) > 1, model

    def load(self, path: str, **options: Any) -> Any:
        if self._is_written_by_all or os.path.exists(path):
            return torch.load(path, **options)
        report(logging.WARNING, f"checkpoints: {path} is not here; rank 0 has it, and saves it as .nemo")
        return self._model.state_dict()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _view(callback: Any, candidates: Mapping[str, Any]) -> Words:
    names = f"{callback.filename} {callback.CHECKPOINT_NAME_LAST}"
    used = [name for name in candidates if name in ("epoch", "step", callback.monitor) or f"{{{name}" in names]
    state = {
        "paths": {name: str(getattr(callback, name, "")) for name in _PATHS},
        "scores": {name: _number(getattr(callback, name, None)) for name in _SCORES},
        "best_k_models": {str(path): _number(score) for path, score in callback.best_k_models.items()},
    }
    return {"state": state, "metrics": {name: _number(candidates[name]) for name in used}}


def _set_state(callback: Any, state: Words) -> None:
    for name, path in state["paths"].items():
        setattr(callback, name, path)
    for name, score in state["scores"].items():
        setattr(callback, name, _tensor(score))
    callback.best_k_models = {path: _tensor(score) for path, score in state["best_k_models"].items()}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _tensor(value: Any) -> Any:
    return None if value is None else torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
