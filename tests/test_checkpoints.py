"""NeMo's checkpoint callback on real ranks: where stock hangs, all take rank 0's decisions, and
end; else as stock.

One spawn of ranks has many short trainings, since importing NeMo and connecting the ranks takes
longer than they do.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import asr_models
import lightning.pytorch as pl
import pytest
import torch
from asr_models import Batches, loader
from ranks import Result, Said, all_have_come, run_ranks, wait_until
from torch.utils.data import DataLoader, Dataset

import nemo_patches

pytestmark = pytest.mark.alone
# NeMo before 3.0 loads its own best model so that torch from 2.6 on refuses it.
NEMOS_OWN = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


class Scores(pl.Callback):  # type: ignore[misc]
    """Logs a metric of each rank's own at each validation, as NeMo logs the loss."""

    def __init__(self, *scores: float | None) -> None:
        self.scores = iter(scores)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if (score := next(self.scores)) is not None:
            module.log("score", torch.tensor(score))


def callback(folder: Path, **settings: Any) -> Any:
    """As exp_manager makes it."""
    from nemo.utils.callbacks.nemo_model_checkpoint import NeMoModelCheckpoint

    settings = {
        "monitor": "score",
        "save_last": True,
        "save_top_k": 2,
        "filename": "{score:.4f}-{epoch}",
        **settings,
    }
    NeMoModelCheckpoint.CHECKPOINT_NAME_LAST = settings["filename"] + "-last"
    return NeMoModelCheckpoint(dirpath=folder, prefix="model", **settings)


def fit(
    folder: Path,
    scores: tuple[float | None, ...],
    more: Any = (),
    ckpt: Any = None,
    together: bool = False,
    **settings: Any,
) -> Any:
    """One training with a validation, and a checkpoint, each epoch. It returns the checkpoint
    callback.
    """
    checkpoint = callback(folder, **settings)
    given = {
        "max_epochs": len(scores),
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
    }
    trainer = asr_models.trainer_of([*more, Scores(*scores), checkpoint], **given)
    model = asr_models.ctc(trainer)
    # Else stock may hang: rank 0 may have written the file before another rank looks for it
    if together:
        model.on_save_checkpoint = lambda checkpoint: torch.distributed.barrier()
    trainer.fit(
        model, loader(Batches(range(1))), loader(Batches(range(1))), ckpt_path=ckpt
    )
    checkpoint.weights = model.state_dict()
    return checkpoint


def tree(folder: Path) -> dict[str, str]:
    """Each file's name and content; of a .nemo, which has the time in it, its members'."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".nemo":
            with tarfile.open(file) as archive:
                parts = [
                    (part.name, archive.extractfile(part))
                    for part in archive.getmembers()
                    if part.isfile()
                ]
                content = b"".join(
                    name.encode() + part.read()
                    for name, part in sorted(parts, key=lambda one: one[0])
                )
        elif file.is_file():
            content = file.read_bytes()
        else:
            continue
        found[str(file.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


class LooksLate(pl.Callback):  # type: ignore[misc]
    """Rank 1 looks for the best model only when rank 0 has written it; with ours it waits for that
    in vain.
    """

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        deadline = time.monotonic() + trainer.global_rank * 1.0
        while time.monotonic() < deadline and not os.path.exists(
            trainer.checkpoint_callback.best_model_path
        ):
            time.sleep(0.01)


def nest(folder: Path, more: Any = ()) -> Any:
    """Through exp_manager, with the settings of the public reports."""
    from nemo.utils.exp_manager import exp_manager
    from omegaconf import OmegaConf

    trainer = asr_models.trainer_of(more, max_epochs=2, num_sanity_val_steps=0)
    params = {
        "monitor": "val_loss",
        "mode": "min",
        "always_save_nemo": True,
        "save_best_model": True,
        "save_top_k": 1,
    }
    config = {
        "explicit_log_dir": str(folder),
        "create_tensorboard_logger": False,
        "log_step_timing": False,
        "checkpoint_callback_params": params,
    }
    exp_manager(trainer, OmegaConf.create(config))
    trainer.fit(
        asr_models.nest(trainer),
        nests(range(1)),
        nests(range(trainer.global_rank, trainer.global_rank + 1)),
    )
    return trainer.checkpoint_callback


class Nests(Dataset[Any]):
    def __init__(self, seeds: range) -> None:
        self.seeds = seeds

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: int) -> Any:
        return asr_models.nest_batch(self.seeds[index])


def nests(seeds: range) -> Any:
    return DataLoader(Nests(seeds), batch_size=None)


SAVE_BEST = {"always_save_nemo": True, "save_best_model": True}
# Of two ranks, whose worst is not of the same validation.
RISING = ((3.0, 0.5), (2.0, 1.0), (1.0, 0.2))
OTHER_BEST = ((1.0, 2.0), (2.0, 1.0))  # the best is rank 0's first, and rank 1's second
# Each hangs in stock, or ends with an exception on one rank, in another place of the callback.
CASES: dict[str, Any] = {
    "nest": lambda folder, rank, more=(): nest(folder, more),
    "same names": lambda folder, rank, more=(): fit(
        folder, of_rank(rank, *RISING), more, filename="a"
    ),
    "looks late": lambda folder, rank, more=(): fit(
        folder, (1.0,), (*more, LooksLate()), **SAVE_BEST
    ),
    "no score": lambda folder, rank, more=(): fit(
        folder, of_rank(rank, (2.0, None), (1.0, 1.0)), more
    ),
    # NeMo before 3.0 loads the best model after it has looked for it.
    "another best": lambda folder, rank, more=(): fit(
        folder, of_rank(rank, *OTHER_BEST), more, save_last=False, **SAVE_BEST
    ),
}
# In none of these does stock hang.
STOCKS: dict[str, Any] = {
    "alike": lambda folder, rank: fit(
        folder, (3.0, float("nan"), 1.0), save_top_k=1, together=True, **SAVE_BEST
    ),
    "no monitor": lambda folder, rank: fit(
        folder,
        (1.0, 1.0),
        monitor=None,
        filename="{epoch}",
        save_top_k=1,
        always_save_nemo=True,
    ),
}


def best_not_seen(folder: Path, rank: int) -> bool:
    """Resumed for an epoch, whose end loads the best model; rank 0 alone sees that file when it is
    looked for.
    """
    first = fit(folder, (1.0, 2.0), save_top_k=1)
    isfile, best = os.path.isfile, first.best_model_path
    if rank == 1:
        os.path.isfile = lambda path: path != best and isfile(path)
    try:
        last = fit(
            folder,
            (9.0,) * 3,
            ckpt=first.last_model_path,
            save_top_k=1,
            save_last=False,
            save_best_model=True,
        )
    finally:
        os.path.isfile = isfile
    saved = torch.load(best, weights_only=False)["state_dict"]
    alike = [torch.equal(saved[name], last.weights[name]) for name in saved]
    return all(alike) and not all(
        torch.equal(saved[name], first.weights[name]) for name in saved
    )


def scenarios(rank: int, size: int, folder: str) -> dict[str, Any]:
    asr_models.prepare()
    os.environ.update(NEMOS_OWN)
    root, seen = Path(folder), dict[str, Any]()
    own = vars(nemos_callback())["on_save_checkpoint"]
    for name, run in STOCKS.items():
        run(root / name, rank)
        moved(root / name)
    nemo_patches.apply(timeout=60, checkpoints="stock")
    seen["stock leaves NeMo's"] = vars(nemos_callback())["on_save_checkpoint"] is own
    seen["stock's status"] = str(nemo_patches.status())
    nemo_patches.apply(timeout=60, checkpoints="agreed")
    for name, run in STOCKS.items():
        run(root / name, rank)
        torch.distributed.barrier()
        seen[name] = (tree(root / f"{name} as stock"), tree(root / name))
    kept = fit(
        root / "rank 0 decides", of_rank(rank, *RISING, (9.0, 0.1)), filename="{epoch}"
    )
    seen["rank 0 decides"] = {
        Path(path).name: float(score) for path, score in kept.best_k_models.items()
    }
    for name, run in CASES.items():
        torch.manual_seed(rank)
        checkpoint = run(root / name, rank)
        torch.distributed.barrier()
        paths = (checkpoint.best_model_path, *checkpoint.best_k_models)
        seen[name] = (paths, all(map(os.path.exists, paths)), sorted(tree(root / name)))
    seen["best not seen"] = best_not_seen(root / "best not seen", rank)
    seen["status"] = str(nemo_patches.status())
    nemo_patches.revert()
    seen["reverted"] = vars(nemos_callback())["on_save_checkpoint"] is own
    return seen


def nemos_callback() -> Any:
    from nemo.utils.callbacks.nemo_model_checkpoint import NeMoModelCheckpoint

    return NeMoModelCheckpoint


def moved(folder: Path) -> None:
    """Out of the way of a second run, in which the same names are to be found in the files."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        folder.rename(folder.with_name(f"{folder.name} as stock"))
    torch.distributed.barrier()


def of_rank(
    rank: int, *scores: tuple[float | None, float | None]
) -> tuple[float | None, ...]:
    """Of each validation's scores, one for each rank, this rank's."""
    return tuple(both[rank] for both in scores)


def stock_hangs(rank: int, size: int, folder: str, case: str) -> None:
    asr_models.prepare()
    os.environ.update(NEMOS_OWN)
    torch.manual_seed(rank)
    CASES[case](Path(folder, case), rank, [asr_models.hang_watch()])
    print("the fit has ended", file=sys.stderr, flush=True)
    torch.distributed.barrier()


@pytest.mark.one_nemo
def test_stock_hangs(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        runs = {
            case: pool.submit(
                run_ranks, stock_hangs, 2, str(tmp_path), case, dies=(0, 1)
            )
            for case in CASES
        }
    for case, run in runs.items():
        first, second = run.result()
        assert "the fit has ended" not in first.stderr + second.stderr, case
        # There rank 1 raises, and its end is seen.
        assert "no progress" in first.stderr or case == "no score"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return run_ranks(
        scenarios, 2, str(tmp_path_factory.mktemp("checkpoints")), limit=300
    )


@pytest.mark.matrix
@pytest.mark.parametrize("name", STOCKS)
def test_where_stock_does_not_hang_the_files_are_its_own_to_the_last_bit(
    name: str, results: list[Result]
) -> None:
    for result in results:
        stock, ours = result.value[name]
        assert stock == ours
        assert any(file.endswith(".ckpt") for file in ours)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_with_rank_0s_names(name: str, results: list[Result]) -> None:
    first, second = (result.value[name] for result in results)
    assert first == second
    paths, all_exist, files = first
    assert all_exist, (paths, files)


def test_ranks_that_find_other_files_take_rank_0s(results: list[Result]) -> None:
    for result in results:
        assert result.value["best not seen"]


def test_rank_0_decides_which_checkpoints_are_kept(results: list[Result]) -> None:
    """In stock a model is among the best where it is so on all ranks, each by its own score."""
    for result in results:
        assert result.value["rank 0 decides"] == {
            "epoch=1.ckpt": 2.0,
            "epoch=2.ckpt": 1.0,
        }


def test_the_status_tells_and_stock_leaves_nemos_function(
    results: list[Result],
) -> None:
    for result in results:
        assert result.value["stock leaves NeMo's"] and result.value["reverted"]
        text = result.value["stock's status"]
        assert "checkpoints=stock" in text and "NeMoModelCheckpoint" not in text
        assert "NeMoModelCheckpoint.on_save_checkpoint" in result.value["status"]


class Late(pl.Callback):  # type: ignore[misc]
    """Rank 1 comes late to the second checkpoint, until rank 0 has said so."""

    def __init__(self, store: Any) -> None:
        self.store, self.calls = store, 0

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.calls += 1
        if self.calls == 2 and trainer.global_rank == 1:
            wait_for_the_report(self.store)


def wait_for_the_report(store: Any) -> None:
    store.wait(["said"], timedelta(seconds=120))


class Dies(pl.Callback):  # type: ignore[misc]
    """A rank is gone where the others come to a checkpoint, without a collective between."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def late_and_dead(rank: int, size: int, folder: str) -> Any:
    asr_models.prepare()
    nemo_patches.apply(timeout=60)
    fit(Path(folder, "first"), (1.0,))
    wait_until(all_have_come)
    torch.distributed.barrier()
    nemo_patches.apply(timeout=2)
    store = torch.distributed.distributed_c10d._get_default_store()
    said = Said()
    if rank == 0:
        tell = threading.Thread(
            target=lambda: (wait_until(lambda: named(said), 120), store.set("said", ""))
        )
        tell.start()
    fit(Path(folder, "late"), (1.0, 1.0), [Late(store)], save_on_train_epoch_end=False)
    wait_until(
        lambda: (
            rank != 0 or any("checkpoints: recovered" in line for line in said.lines)
        )
    )
    try:
        fit(Path(folder, "dead"), (1.0,), [Dies()])
    except nemo_patches.CheckpointError as error:
        return str(error), said.lines
    return "nothing was raised", said.lines


def named(said: Said) -> bool:
    return any("checkpoints: step 2: not every rank" in line for line in said.lines)


@pytest.mark.one_nemo
def test_a_late_rank_is_waited_for_and_named_and_a_dead_one_raises(
    tmp_path: Path,
) -> None:
    results = run_ranks(late_and_dead, 3, str(tmp_path), dies=(1,))
    for result in (results[0], results[2]):
        text, _ = result.value
        assert text.startswith(
            "checkpoints: step 1: the ranks cannot agree any more: rank 1 has ended"
        ), text
        assert text.endswith("Go on from the last checkpoint")
    (line,) = (
        line
        for line in results[0].value[1]
        if "checkpoints: step 2: not every rank" in line
    )
    assert "Missing: rank 1 of 3" in line
    assert "wait_for_the_report (tests/test_checkpoints.py" in line


def only_one_agrees(rank: int, size: int, folder: str) -> None:
    """Rank 1 is as stock: nobody waits for it but once, and not without limit."""
    asr_models.prepare()
    nemo_patches.apply(timeout=1, checkpoints="stock" if rank else "agreed")
    fit(Path(folder), (1.0, 2.0), always_save_nemo=True)


@pytest.mark.one_nemo
def test_beside_a_rank_that_takes_no_part_all_is_as_stock_and_says_so(
    tmp_path: Path,
) -> None:
    first, _ = run_ranks(only_one_agrees, 2, str(tmp_path))
    assert (
        len(
            first.lines(
                "each rank decides for itself, as in stock NeMo: not every rank takes"
                " part"
            )
        )
        == 1
    )


def one_cannot_import(rank: int, size: int, folder: str) -> None:
    asr_models.prepare()
    nemo_patches.apply(timeout=1)
    if rank == 1:
        sys.modules["nemo_patches.options.checkpoints"] = None  # type: ignore[assignment]  # as a broken file would be
    fit(Path(folder), (1.0, 2.0), always_save_nemo=True)


@pytest.mark.one_nemo
def test_where_our_part_cannot_be_imported_all_is_as_stock_and_that_is_said_once(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(one_cannot_import, 2, str(tmp_path))
    (line,) = second.lines(
        "each rank decides about checkpoints, as in stock", "cannot import its part"
    )
    assert "nemo_patches.options.checkpoints" in line
    assert len(first.lines("not every rank takes part")) == 1


def drifted(rank: int, size: int) -> tuple[str, bool]:
    from nemo_patches.patching.monkeypatch import this_process
    from nemo_patches.patching.targets import TARGETS

    def on_save_checkpoint(
        self: Any, trainer: Any, pl_module: Any, checkpoint: Any
    ) -> Any:
        return self.another(trainer)

    nemos_callback().on_save_checkpoint = on_save_checkpoint
    for name in (
        *(target.module for target in TARGETS if target.module in sys.modules),
        "nemo.collections.asr",
    ):
        this_process.on_import(name)  # as auto-apply has it
    assert "NeMoModelCheckpoint" not in "".join(nemo_patches.status().patched)
    assert len(nemo_patches.status().patched) == 3  # the encoders
    nemo_patches.revert()
    with pytest.raises(nemo_patches.DriftError) as refused:
        nemo_patches.apply()
    assert not nemo_patches.status().patched
    nemo_patches.apply(checkpoints="stock")
    return (
        str(refused.value),
        vars(nemos_callback())["on_save_checkpoint"] is on_save_checkpoint,
    )


def test_a_callback_that_has_drifted_is_refused_and_said() -> None:
    (result,) = run_ranks(drifted, 1, group=False)
    problem = "NeMoModelCheckpoint.on_save_checkpoint: expected code that reads"
    text, is_left = result.value
    assert is_left
    assert (
        "the ranks cannot agree on checkpoints (checkpoints=stock leaves NeMo's):"
        " NeMoModelCheckpoint" in text
    )
    assert problem in text
    assert (
        len(result.lines("each rank decides about checkpoints, as in stock", problem))
        == 1
    )
