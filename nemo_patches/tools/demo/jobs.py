"""The sizes of the demo's runs, what each rank is to do, and how far it came."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

BATCH_SIZE = 2
TRAINING_STEPS = 6
STALL_AFTER_STEPS = 1
VALIDATE_EVERY = 3
VALIDATION_BATCHES = 2  # in each evaluation; UNEVEN_RANK has one more
UNEVEN_RANK = 0
EVALUATION_BATCHES = 6  # where a rank stays away
LENGTH_SYNC_TIMEOUT_S = 2.0
LIMIT_PER_RANK_S = 30.0  # for what takes 2 to 4 s; twice the stall is added
COMPLETED = "completed"

Task = Literal["evaluation", "training", "positions"]


class DemoError(Exception):
    """The demo cannot start. The text names the setting, its value and what is allowed, or a
    log.
    """


@dataclass(frozen=True)
class RankProgress:
    """How far one rank has come.

    longest_call_s: of the encoder calls that returned. wrong_rows, rows: of its positional
    encoding, those that differ from a fresh one of the same length, and all.
    """

    losses: list[float] = field(default_factory=list)
    validation_batches: int = 0
    longest_call_s: float = 0.0
    wrong_rows: int = 0
    rows: int = 0
    is_away: bool = False


@dataclass(frozen=True)
class RankJob:
    """What one rank is to do. folder: with the manifests; its log and its progress go there, too.
    stall_s: 0: none.
    """

    task: Task
    patched: bool
    rank: int
    world_size: int
    port: int
    folder: Path
    stall_s: float

    @property
    def slow_rank(self) -> int:
        """The rank that stalls, stays away, or has the long batch. Never 0, whose buffers DDP gives
        to the others.
        """
        return self.world_size - 1

    @property
    def stays_away(self) -> bool:
        return self.task == "evaluation" and self.rank == self.slow_rank

    @property
    def limit_s(self) -> float:
        return LIMIT_PER_RANK_S * self.world_size + 2 * self.stall_s

    @property
    def version(self) -> str:
        return "nemo_patches" if self.patched else "stock"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.task}-{self.version}-rank{self.rank}.log"

    def save(self, progress: RankProgress) -> None:
        part = self.log.with_suffix(".part")
        part.write_text(json.dumps(asdict(progress)))
        part.replace(self.log.with_suffix(".json"))

    def progress(self) -> RankProgress:
        file = self.log.with_suffix(".json")
        return (
            RankProgress(**json.loads(file.read_text()))
            if file.exists()
            else RankProgress()
        )


@dataclass(frozen=True)
class RunOutcome:
    """One run: how it ended, and how far each rank came. verdict: what `nemo-patches diagnose` said
    while it hung.
    """

    jobs: tuple[RankJob, ...]
    ranks: tuple[RankProgress, ...]
    ended: str
    took_s: float
    verdict: str

    @property
    def completed(self) -> bool:
        return self.ended == COMPLETED

    @property
    def fewest_steps(self) -> int:
        return min(len(rank.losses) for rank in self.ranks)

    @property
    def wrong_rows(self) -> int:
        return max(rank.wrong_rows for rank in self.ranks)

    def __str__(self) -> str:
        batches = min(
            rank.validation_batches for rank in self.ranks if not rank.is_away
        )
        done = {
            "evaluation": f"{batches} of {EVALUATION_BATCHES} batches",
            "training": f"{self.fewest_steps} of {TRAINING_STEPS} steps",
            "positions": (
                f"{self.wrong_rows} of {max(rank.rows for rank in self.ranks)}"
                " positional rows wrong"
            ),
        }
        longest_call_s = max(rank.longest_call_s for rank in self.ranks)
        return (
            f"{done[self.jobs[0].task]}; longest encoder call {longest_call_s:.1f} s;"
            f" {self.ended}"
        )
