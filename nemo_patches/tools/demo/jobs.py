"""What the demo's own process and its ranks send each other, a rank's job and its events; and a rank's outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal

BATCH_SIZE = 2
TRAINING_STEPS = 6
STALL_AFTER_STEPS = 1
VALIDATE_EVERY = 3
VALIDATION_BATCHES = 2  # in each evaluation; UNEVEN_RANK has one more
UNEVEN_RANK = 0
EVALUATION_BATCHES = 6  # where a rank stays away
LENGTH_SYNC_TIMEOUT = timedelta(seconds=2)
IMPORT_LIMIT = timedelta(minutes=3)
LIMIT_PER_RANK = timedelta(seconds=30)  # for what takes 2 to 4 s; twice the stall is added

Task = Literal["a rank stays away", "training", "positional encoding"]


@dataclass(frozen=True)
class RankJob:
    """What one rank is to do."""

    task: Task
    patched: bool
    rank: int
    world_size: int
    port: int
    folder: Path  # with the manifests; the log goes there too
    stall: timedelta  # zero: none

    @property
    def settings(self) -> dict[str, Any]:
        """The keywords for nemo_patches.apply()."""
        return {"sync": "bounded", "timeout": LENGTH_SYNC_TIMEOUT.total_seconds(), "on_timeout": "fallback"}

    @property
    def slow_rank(self) -> int:
        """The rank that stalls, and that has the long batch. Never rank 0, whose buffers DDP gives to the others."""
        return self.world_size - 1

    @property
    def stays_away(self) -> bool:
        return self.task == "a rank stays away" and self.rank == self.slow_rank

    @property
    def limit(self) -> timedelta:
        return LIMIT_PER_RANK * self.world_size + 2 * self.stall

    @property
    def version(self) -> str:
        return "nemo_patches" if self.patched else "stock"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.task.replace(' ', '-')}-{self.version}-rank{self.rank}.log"


class Notice(Enum):
    """An event without data."""

    VALIDATED = auto()  # a batch
    STALLS = auto()  # for the job's stall
    STAYS_AWAY = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class TrainingStep:
    loss: float
    encoder_call: timedelta


@dataclass(frozen=True)
class EncoderCall:
    """A call outside training."""

    took: timedelta


@dataclass(frozen=True)
class WrongRows:
    """Rows of a rank's positional encoding that differ from a fresh one of the same length."""

    wrong: int
    total: int


@dataclass(frozen=True)
class Failed:
    error: str  # short


Event = Notice | TrainingStep | EncoderCall | WrongRows | Failed


@dataclass(frozen=True)
class RankOutcome:
    """How far one rank came, and how it ended."""

    job: RankJob
    losses: tuple[float, ...] = ()
    longest_encoder_call: timedelta = timedelta(0)  # of those that returned; in training, only of training steps
    validation_batches: int = 0
    rows: WrongRows | None = None
    is_away: bool = False
    now: str = "starts"
    completed: bool = False
    ended: str = ""  # "" while it runs

    def after(self, event: Event) -> RankOutcome:
        match event:
            case TrainingStep(loss, encoder_call):
                return replace(
                    self,
                    losses=(*self.losses, loss),
                    longest_encoder_call=max(self.longest_encoder_call, encoder_call),
                    now=f"step {len(self.losses) + 1}/{TRAINING_STEPS}",
                )
            case Notice.VALIDATED:
                count = self.validation_batches + 1
                return replace(self, validation_batches=count, now=f"validation batch {count}")
            case Notice.STALLS:
                return replace(self, now=f"stalls for {self.job.stall.total_seconds():g} s")
            case Notice.STAYS_AWAY:
                return replace(self, is_away=True, now="stays away")
            case EncoderCall(took):
                return replace(self, longest_encoder_call=max(self.longest_encoder_call, took))
            case WrongRows():
                return replace(self, rows=event)
            case Failed(error):
                return replace(self, ended=f"died: {error}", now="died")
            case Notice.FINISHED:
                return replace(self, completed=True, now="completed")


@dataclass(frozen=True)
class RunOutcome:
    """One run: every rank's outcome, and how long it took."""

    ranks: tuple[RankOutcome, ...]
    took: timedelta
    verdict: tuple[str, ...] = ()  # what diagnose said while it hung

    @property
    def completed(self) -> bool:
        return all(rank.completed for rank in self.ranks)

    @property
    def fewest_steps(self) -> int:
        return min(len(rank.losses) for rank in self.ranks)

    @property
    def worst_rows(self) -> WrongRows | None:
        rows = [rank.rows for rank in self.ranks if rank.rows]
        return max(rows, key=lambda rows: (rows.wrong, rows.total), default=None)
