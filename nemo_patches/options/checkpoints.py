"""NeMo's checkpoint callback under several ranks: every rank takes rank 0's view.

NeMoModelCheckpoint (nemo/utils/callbacks/nemo_model_checkpoint.py) and Lightning's ModelCheckpoint
under it branch between collectives on what a rank sees: its own metrics, paths that have these in
their names, whether a file exists. A rank that sees something else than rank 0 takes another
branch, and all hang. So they ask rank 0, over the exchange. The job's collectives stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from nemo_patches.channel.answers import ENDED, LEFT
from nemo_patches.channel.extremes import VALUE_BITS, VALUES, Extremes
from nemo_patches.channel.rounds import RoundFailed, RoundsStopped
from nemo_patches.options.patient_rounds import PatientRounds
from nemo_patches.sync.length_sync import GroupSyncs, current, process
from nemo_patches.sync.places import with_names
from nemo_patches.sync.rank_log import raised_by_signal_handler, report
from nemo_patches.text import first_line

_LATE = "not every rank has come to this checkpoint within {waited:.2f} s; all wait for that"
_AS_STOCK = "each rank decides for itself, as in stock NeMo"
_CHUNK = VALUE_BITS // 8  # bytes of a text in one round
# What the callback branches on, or passes to the code that saves and removes.
_STATE = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)
T = TypeVar("T")


class CheckpointError(RuntimeError):
    """The ranks can no longer agree on a checkpoint: a rank has died, or does something else than
    rank 0.
    """


class RankZero:
    """Rank 0's answers, under one process group. Only the training thread asks.

    No rank leaves alone: the others would wait for it without limit, where it waits for them in a
    barrier of NeMo's. There is one way out, a stop of the rounds, which all ranks see at the same
    one. A rank wants it that has waited for the first round in vain, that has met an error, or that
    is interrupted.
    """

    def __init__(self, group_syncs: GroupSyncs) -> None:
        self.group_syncs = weakref.ref(group_syncs)
        self._exchange = group_syncs.exchange
        self._is_rank_zero = group_syncs.group.rank == 0
        self._rounds = PatientRounds(
            owner=self,
            group_syncs=group_syncs,
            title="checkpoints",
            key="checkpoints",
            late_text=_LATE,
            place="step {}".format,
        )
        self._step = 0
        self._ended = False  # as stock, on every rank
        self._begin = group_syncs.exchange.rounds("checkpoints begin")
        try:
            self._begin.issue(0)
        except RoundFailed as error:
            self._end(str(error))

    def leave(self, why: str) -> None:
        """This rank can ask no more: have all ranks go on as stock."""
        self._ended = True
        self._rounds.leave(why)

    def answer(self, question: str, own: T, step: int) -> T:
        """Return rank 0's answer on every rank; each gives its own, as JSON has it. Waits for all
        as long as it takes.

        One round is enough if all are equal. Raises CheckpointError if a rank has died, or is
        elsewhere.
        """
        if self._ended or not self._has_begun():
            return own
        self._step = step
        text = json.dumps([question, own]).encode()
        try:
            said = self._ask(text)
        except RoundFailed as error:
            if self._any_is_gone():
                seen = time.strftime("%H:%M:%S")
                raise self._error(f"{error}; seen at {seen}") from None
            self._end(str(error))
            return own
        if said == text:
            return own
        rank_0s, answer = json.loads(said)
        if rank_0s != question:
            places = f"rank 0 is at {rank_0s}, this rank at {question}"
            raise self._error(f"the ranks are out of step: {places}")
        return answer  # type: ignore[no-any-return]

    def _has_begun(self) -> bool:
        """Whether the first round has come, which every rank issues before the first collective of
        a training. Where a rank is without nemo_patches, or no connection leads to it, none
        comes on any rank, and all go on as stock.

        That is decided by rank 0, for all: it may come on one rank just before another one's
        timeout. So a rank that has waited in vain waits for that decision.
        """
        try:
            if (
                self._begin.has_come()
                or self._begin.wait(current().timeout) is not None
            ):
                return True
            self._begin.give_up()
            while self._begin.wait(current().timeout) is None:
                pass
            return True
        except RoundsStopped as stopped:
            why = "one is not patched, or has checkpoints=stock, or is out of reach"
            self._end(
                f"not every rank takes part, as rank {stopped.rank} has found: {why}"
            )
        except RoundFailed as error:
            if self._any_is_gone():
                raise self._error(str(error)) from None
            self._end(str(error))
        return False

    def _any_is_gone(self) -> bool:
        """Whether a rank has died or left; else our own part has failed."""
        gone = self._exchange.ended.values()
        return any(silence.how in (LEFT, ENDED) for silence in gone)

    def _end(self, why: str) -> None:
        self.leave(why)
        report(logging.ERROR, f"checkpoints: {_AS_STOCK}: {why}")

    def _ask(self, text: bytes) -> bytes:
        """What rank 0 has as its text here."""
        digest = hashlib.blake2b(text, digest_size=8).digest()
        extremes = self._round(int.from_bytes(digest, "big") % VALUES)
        if extremes.highest.value == extremes.lowest.value:
            return text
        return self._take(text if self._is_rank_zero else b"")

    def _take(self, text: bytes) -> bytes:
        """Rank 0's text; the other ranks pass an empty one."""
        size = self._round(len(text)).highest.value
        chunks = []
        for start in range(0, size, _CHUNK):
            own = text[start : start + _CHUNK].ljust(_CHUNK) if text else b""
            chunks.append(self._round(int.from_bytes(own, "big")).highest.value)
        return b"".join(chunk.to_bytes(_CHUNK, "big") for chunk in chunks)[:size]

    def _round(self, value: int) -> Extremes:
        self._rounds.issue(value, self._step)
        return self._rounds.result()

    def _error(self, text: str) -> CheckpointError:
        self._rounds.end(text)
        lost = f"step {self._step}: the ranks cannot agree any more: {text}"
        return CheckpointError(f"checkpoints: {lost}. Go on from the last checkpoint")


class Checkpoints:
    """Of this process: whom it asks, and the process group in which an error of ours has ended
    that.
    """

    def __init__(self) -> None:
        self._rank_zero: RankZero | None = None
        self._given_up: Callable[[], object] = lambda: None

    def begin(self) -> RankZero | None:
        """Call it before the first collective of a training.

        Does not wait. None without other ranks.
        """
        group_syncs = process.present_group()
        if group_syncs is None or group_syncs.default_group() is self._given_up():
            return None
        if self._rank_zero is None or self._rank_zero.group_syncs() is not group_syncs:
            self._rank_zero = RankZero(group_syncs)
        return self._rank_zero

    def answer(self, question: str, own: T, step: int) -> T:
        """Rank 0's; without other ranks, this rank's own."""
        rank_zero = self.begin()
        return own if rank_zero is None else rank_zero.answer(question, own, step)

    def safely(self, function: Callable[[], T], otherwise: T) -> T:
        """What the function returns; an error of ours must not reach training.

        Whatever it raises, this rank asks no more.
        """
        try:
            return function()
        except CheckpointError:
            raise
        except BaseException as error:
            self._leave(error)
            if not isinstance(error, Exception) or raised_by_signal_handler(error):
                raise
            text = f"{_AS_STOCK}, after an error of ours, please report it"
            report(logging.ERROR, f"checkpoints: {text}: {error!r}")
            return otherwise

    def _leave(self, error: BaseException) -> None:
        group = torch.distributed.group.WORLD
        if group is not None:
            self._given_up = weakref.ref(group)
        if self._rank_zero is not None:
            self._rank_zero.leave(first_line(error))


checkpoints = Checkpoints()  # of this process


# What stands in for NeMo's methods; `original` is the method itself.


def setup(original: Any, callback: Any, *args: Any, **more: Any) -> Any:
    checkpoints.safely(checkpoints.begin, None)
    return original(callback, *args, **more)


def _monitor_candidates(original: Any, callback: Any, trainer: Any) -> Any:
    """Each save begins with this: the values for the checkpoint's name and score."""
    return _follow(callback, trainer, "save", original(callback, trainer))


def on_save_checkpoint(
    original: Any,
    callback: Any,
    trainer: Any,
    pl_module: Any,
    checkpoint: Any,
) -> Any:
    """Rank 0's path first: NeMo makes the file's name of it, looks for that and, before 3.0, loads
    it.
    """
    if not callback.always_save_nemo:
        return original(callback, trainer, pl_module, checkpoint)
    _follow(callback, trainer, "on_save_checkpoint", {})
    names = {
        "os": _OsOfRankZero(trainer.global_step),
        "torch": _TorchOfRankZero(callback, pl_module),
    }
    return with_names(original, names)(callback, trainer, pl_module, checkpoint)


def on_train_end(original: Any, callback: Any, trainer: Any, pl_module: Any) -> Any:
    if not trainer.fast_dev_run:
        _follow(callback, trainer, "on_train_end", {})
    return original(callback, trainer, pl_module)


METHODS: dict[str, Callable[..., Any]] = {
    "setup": setup,
    "_monitor_candidates": _monitor_candidates,
    "on_save_checkpoint": on_save_checkpoint,
    "on_train_end": on_train_end,
}
_Candidates = Mapping[str, Any]


def _follow(
    callback: Any, trainer: Any, question: str, candidates: _Candidates
) -> _Candidates:
    """Make a callback see what rank 0's callback sees, with its candidates where it uses them."""

    def take_over() -> _Candidates:
        names = f"{callback.filename} {callback.CHECKPOINT_NAME_LAST}"
        always = ("epoch", "step", callback.monitor)
        used = [name for name in candidates if name in always or f"{{{name}" in names]
        own = {
            "state": _plain({name: getattr(callback, name) for name in _STATE}),
            "metrics": _plain({name: candidates[name] for name in used}),
        }
        rank_0s = checkpoints.answer(question, own, trainer.global_step)
        if rank_0s is own:
            return candidates
        for name, value in _with_tensors(rank_0s["state"]).items():
            setattr(callback, name, value)
        others = {name: value for name, value in candidates.items() if name not in used}
        return {**others, **_with_tensors(rank_0s["metrics"])}

    return checkpoints.safely(take_over, candidates)


class _OsOfRankZero:
    """`os` as on_save_checkpoint sees it: a file exists where rank 0 finds it."""

    def __init__(self, step: int) -> None:
        self.path = self
        self._step = step

    def exists(self, path: str) -> bool:
        own = os.path.exists(path)
        question = "is the file there"
        return checkpoints.safely(
            lambda: checkpoints.answer(question, own, self._step), own
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _TorchOfRankZero:
    """`torch` as on_save_checkpoint of NeMo 2.1 to 2.7 sees it: it loads the best model on every
    rank, and rank 0 alone writes it. A rank that does not find the file, whose folder is another
    one, keeps its own model meanwhile.
    """

    def __init__(self, callback: Any, model: Any) -> None:
        self._is_written_by_all = (callback.model_parallel_size or 1) > 1
        self._model = model

    def load(self, path: str, **options: Any) -> Any:
        if self._is_written_by_all or os.path.exists(path):
            return torch.load(path, **options)
        text = f"{path} is not here; rank 0 has it, and saves it as .nemo"
        report(logging.WARNING, f"checkpoints: {text}")
        return self._model.state_dict()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _plain(value: Any) -> Any:
    """As JSON holds it."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    return value.item() if isinstance(value, torch.Tensor) else value


def _with_tensors(value: Any) -> Any:
    """Its numbers are tensors, as Lightning has them."""
    if isinstance(value, dict):
        return {name: _with_tensors(one) for name, one in value.items()}
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.tensor(value) if isinstance(value, int) else value
