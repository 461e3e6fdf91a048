"""StopTogether on real NeMo, Lightning and ranks: where stock hangs, all ranks end their passes
together.

One spawn of ranks has many short trainings, since importing NeMo and connecting the ranks takes
longer than they do.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import asr_models
import lightning.pytorch as pl
import pytest
import soundfile
import torch
from asr_models import Batches, Stream, TarredStream, loader
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from ranks import Result, Said, all_have_come, run_ranks, wait_until
from torch.utils.data import DataLoader, IterableDataset

import nemo_patches
from nemo_patches.lightning import StopTogether

pytestmark = [pytest.mark.alone, pytest.mark.one_nemo]
# Whether Lightning can validate so.
BY_THE_CLOCK = tuple(map(int, pl.__version__.split(".")[:2])) >= (2, 6)


class Progress(pl.Callback):  # type: ignore[misc]
    """What Lightning has done on this rank."""

    def __init__(self) -> None:
        self.epochs: list[int] = []  # training batches of each
        self.validations: list[int] = []
        # Training batches of the epoch, before each validation.
        self.at_validation: list[int] = []
        self.steps, self.totals, self.intervals = 0, set[float](), set[float]()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.epochs.append(0)

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, index: int
    ) -> None:
        self.totals.add(trainer.num_training_batches)
        self.intervals.add(trainer.val_check_interval)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        # From Lightning 2.5 on, none begins where one is resumed.
        self.epochs = self.epochs or [0]
        self.epochs[-1] += 1
        print("training batch", index, file=sys.stderr, flush=True)

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self.validations.append(0)
        self.at_validation.append(self.epochs[-1] if self.epochs else 0)

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int, *_: Any
    ) -> None:
        self.validations[-1] += 1
        print("validation batch", index, file=sys.stderr, flush=True)

    on_test_epoch_start, on_test_batch_end = (
        on_validation_epoch_start,
        on_validation_batch_end,
    )


def fit(
    train: Any, val: Any = None, ckpt: Any = None, callbacks: Any = (), **settings: Any
) -> tuple[Progress, Any]:
    """One training under DDP."""
    progress = Progress()
    trainer = asr_models.trainer_of(
        [*callbacks, progress], **{"num_sanity_val_steps": 0, **settings}
    )
    model = asr_models.ctc(trainer)
    asr_models.name_loaders(model, val)
    trainer.fit(model, train, val, ckpt_path=ckpt)
    progress.steps = trainer.global_step
    return progress, model


def parameters(model: Any) -> str:
    content = b"".join(
        parameter.detach().numpy().tobytes() for parameter in model.parameters()
    )
    return hashlib.sha256(content).hexdigest()


def stream(count: int, seed: int = 0) -> Any:
    return loader(Stream(range(seed, seed + count)))


def sized(count: int, seed: int = 0) -> Any:
    return loader(Batches(range(seed, seed + count)))


def scenarios(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Each entry: what Progress has seen."""
    asr_models.prepare()
    nemo_patches.apply(timeout=60)
    more, seen = int(rank == 0), dict[str, Any]()

    def tarred(announced: int) -> Any:
        return loader(TarredStream(range(4 + 2 * more), announced))

    def note(name: str, *args: Any, **settings: Any) -> tuple[Progress, Any]:
        progress, model = fit(*args, **{"callbacks": [StopTogether()], **settings})
        seen[name] = (progress.epochs, progress.validations, progress.steps)
        return progress, model

    for name, make in (("stream", stream), ("sized", sized)):
        for callbacks in ((), (StopTogether(True, True),)):
            _, model = note(
                f"even {name}", make(4), make(3), callbacks=callbacks, max_epochs=2
            )
            seen[f"even {name} {len(callbacks)}"] = (
                seen.pop(f"even {name}"),
                parameters(model),
            )
    note("training", stream(4 + more), stream(4), max_epochs=2)
    note(
        "validation",
        stream(3),
        stream(4 + 2 * more),
        callbacks=[StopTogether(False, True)],
    )
    note(
        "sized",
        sized(4 + more),
        sized(2 + more),
        callbacks=[StopTogether(True, True)],
        max_epochs=2,
    )
    note("sized, half", sized(4 + 2 * more), stream(1), limit_train_batches=0.5)
    note("accumulated", stream(3 + more), accumulate_grad_batches=2)
    note(
        "two validations",
        stream(1),
        [stream(2 + more), stream(3 - more, 9)],
        callbacks=[StopTogether(False, True)],
    )
    note(
        "sanity",
        stream(2),
        stream(3 + more),
        callbacks=[StopTogether(True, True)],
        num_sanity_val_steps=2,
    )
    note(
        "mid-epoch",
        stream(4 + more),
        stream(2 + more),
        callbacks=[StopTogether(True, True)],
        val_check_interval=2,
    )
    workers = {
        "num_workers": 1,
        "persistent_workers": True,
        "multiprocessing_context": "fork",
    }
    note("workers", loader(Stream(range(3 + more)), **workers), max_epochs=2)
    note(
        "reloaded",
        stream(3 + more),
        stream(1),
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
    )
    note("max_steps", stream(3 + more), max_steps=5, max_epochs=-1)
    note("several", {"a": stream(3 + more), "b": stream(2, 9)})
    note(
        "the longest",
        CombinedLoader({"a": stream(3 + more), "b": stream(2, 9)}, "max_size"),
    )
    note(
        "the shortest",
        CombinedLoader({"a": stream(3 + more), "b": stream(2 + 3 * more)}, "min_size"),
    )
    for name, val, setting in (
        ("half, validated", sized(4 + 2 * more), {"limit_val_batches": 0.5}),
        ("none validated", stream(1 + more), {"limit_val_batches": 0}),
        ("all for sanity", stream(2 + more), {"num_sanity_val_steps": -1}),
    ):
        note(name, stream(1), val, callbacks=[StopTogether(True, True)], **setting)
    progress, _ = note("limited", tarred(9), stream(1), limit_train_batches=6)
    seen["total"] = progress.totals
    note("at its limit", tarred(9), stream(1), limit_train_batches=3)
    note("announced", tarred(3), stream(1))
    progress, _ = note(
        "half an epoch",
        tarred(6),
        stream(1),
        val_check_interval=0.5,
        limit_train_batches=6,
    )
    seen["at"], seen["interval"] = progress.at_validation, progress.intervals
    if BY_THE_CLOCK:
        both_stages = [StopTogether(True, True)]
        note(
            "by the clock",
            stream(2 + more),
            stream(2),
            callbacks=both_stages,
            val_check_interval=timedelta(0),
        )
    for name, val, limit in (
        ("none has one to validate", stream(0), 1.0),
        ("half of none", sized(0), 0.5),
    ):
        note(
            name,
            stream(1),
            val,
            callbacks=[StopTogether(False, True)],
            limit_val_batches=limit,
        )

    class Save(pl.Callback):  # type: ignore[misc]
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(f"{folder}/middle.ckpt")

    limits = {"limit_train_batches": 5, "val_check_interval": 2, "limit_val_batches": 1}
    enough = loader(TarredStream(range(9), 9))
    note(
        "saved",
        tarred(9),
        stream(1),
        callbacks=[StopTogether(), Save()],
        max_steps=2,
        **limits,
    )
    note("resumed", enough, stream(1), ckpt=f"{folder}/middle.ckpt", **limits)
    note(
        "resumed by stock",
        enough,
        stream(1),
        callbacks=[],
        ckpt=f"{folder}/middle.ckpt",
        **limits,
    )
    nemo_patches.apply(timeout=60, stop_together="training")
    note("by a setting", stream(3 + more), callbacks=[])
    note(
        "beside a setting", stream(1), stream(1), callbacks=[StopTogether(False, True)]
    )
    nemo_patches.apply(timeout=60)
    trainer = asr_models.trainer_of([StopTogether(False, True), progress := Progress()])
    trainer.validate(asr_models.ctc(trainer), stream(2 + more), verbose=False)
    trainer.test(asr_models.ctc(trainer), stream(3 + more), verbose=False)
    seen["validate"] = progress.validations
    seen["plain loops"] = plain_loops(rank)
    os.environ["NEMO_PATCHES_DISABLE"] = "1"
    note("disabled", stream(2))
    assert nemo_patches.stop_together([1, 2]) == [1, 2]
    del os.environ["NEMO_PATCHES_DISABLE"]
    never = {"val_check_interval": 7, "limit_train_batches": 6}
    seen["never validated"] = raised(
        lambda: fit(tarred(9), stream(1), callbacks=[StopTogether()], **never)
    )
    again = CombinedLoader({"a": stream(3 + more), "b": stream(3)})
    note("limited once", again, limit_train_batches=1)
    note("then without", again, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    both = {"a": tarred(1), "b": tarred(8)}, {"a": stream(3), "b": tarred(8)}
    half = {"val_check_interval": 0.5, "callbacks": [StopTogether()]}
    seen["half of one"] = raised(
        lambda: fit(both[0], stream(1), limit_train_batches=0.5, **half)
    )
    seen["half of unknown"] = raised(lambda: fit(both[1], stream(1), **half))
    seen["no batch"] = raised(
        lambda: fit(stream(3 * (1 - more)), callbacks=[StopTogether()])
    )
    seen["no batch, sized"] = raised(
        lambda: nemo_patches.stop_together(sized(3 * more))
    )
    seen["out of step"] = raised(lambda: leave_early(rank))
    nemo_patches.apply(sync="local")
    seen["joined"] = joined(5 - 2 * more)
    return seen


def joined(count: int) -> str:
    """The parameters after so many batches, other ranks may have other numbers, under torch's own
    DDP.join().
    """
    model = asr_models.ctc(None)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel.join():
        for signals, lengths, tokens, token_lengths in stream(
            count, seed=torch.distributed.get_rank()
        ):
            log_probs, encoded, _ = parallel(
                input_signal=signals, input_signal_length=lengths
            )
            optimizer.zero_grad()
            model.loss(
                log_probs=log_probs,
                targets=tokens,
                input_lengths=encoded,
                target_lengths=token_lengths,
            ).backward()
            optimizer.step()
    return parameters(model)


def plain_loops(rank: int) -> list[int]:
    given = []
    together = nemo_patches.stop_together(range_stream(3 + 2 * rank))
    for _ in range(2):
        given.append(sum(1 for _ in together))
    # All leave it at the same batch.
    for batch in nemo_patches.stop_together(range_stream(9)):
        if batch == 2:
            break
    for _ in range(2):  # a loader of each epoch's own
        given.append(sum(1 for _ in nemo_patches.stop_together(range_stream(2 + rank))))
    return given


def range_stream(count: int) -> Any:
    return iter_again(lambda: iter(range(count)))


class iter_again:
    """A loader that is not torch's."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Any:
        return self._make()


def leave_early(rank: int) -> None:
    together = nemo_patches.stop_together(range_stream(9))
    for _ in range(2):
        for batch in together:
            if batch == 2 + rank:
                break


def raised(function: Any) -> str:
    try:
        function()
    except (nemo_patches.StopTogetherError, MisconfigurationException) as error:
        return str(error)
    return "nothing was raised"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def results(checkpoints: Path) -> list[Result]:
    return run_ranks(scenarios, 2, str(checkpoints), limit=600)


@pytest.fixture(scope="module")
def seen(results: list[Result]) -> dict[str, Any]:
    """What both ranks have seen, where that is the same."""
    first, second = (result.value for result in results)
    assert first == second
    return dict(first)


@pytest.mark.parametrize("kind", ["stream", "sized"])
def test_an_even_run_is_stocks_to_the_last_bit(kind: str, seen: dict[str, Any]) -> None:
    assert seen[f"even {kind} 0"] == seen[f"even {kind} 1"]
    assert seen[f"even {kind} 0"][0] == ([4, 4], [3, 3], 8)


@pytest.mark.parametrize(
    ("name", "epochs", "validations", "steps"),
    [
        ("training", [4, 4], [4, 4], 8),
        ("validation", [3], [4], 3),
        ("sized", [4, 4], [2, 2], 8),
        ("sized, half", [2], [1], 2),  # half of the least: 2 of 4, and of 3 of 6
        (
            "accumulated",
            [3],
            [],
            2,
        ),  # the last step, too, which takes knowing of the last batch
        ("two validations", [1], [4], 1),
        ("sanity", [2], [2, 3], 2),
        ("mid-epoch", [4], [2, 2], 4),
        ("workers", [3, 3], [], 6),
        ("reloaded", [3, 3], [1, 1], 6),
        ("max_steps", [3, 2], [], 5),
        ("several", [3], [], 3),
        ("the longest", [3], [], 3),
        ("the shortest", [2], [], 2),
        ("half, validated", [1], [2], 1),  # half of 4
        ("none validated", [1], [], 1),
        ("all for sanity", [1], [2, 2], 1),
        ("none has one to validate", [1], [0], 1),
        ("half of none", [1], [], 1),  # as stock, which skips it
        ("limited once", [1], [], 1),
        ("then without", [3, 3], [], 6),
        ("by a setting", [3], [], 3),
        (
            "limited",
            [4],
            [1],
            4,
        ),  # it is validated after a pass that ends before its limit
        ("at its limit", [3], [1], 3),
        ("announced", [4], [1], 4),  # an announced length is a guess
        ("half an epoch", [4], [1], 4),
        ("saved", [2], [1], 2),
        pytest.param(
            "by the clock",
            [2],
            [2, 2],
            2,
            marks=pytest.mark.skipif(not BY_THE_CLOCK, reason="Lightning before 2.6"),
        ),
    ],
)
def test_all_ranks_do_the_same(
    name: str,
    epochs: list[int],
    validations: list[int],
    steps: int,
    seen: dict[str, Any],
) -> None:
    assert seen[name] == (epochs, validations, steps)


def test_lightning_knows_the_limit_and_where_half_of_it_is(
    seen: dict[str, Any],
) -> None:
    assert seen["total"] == {6}
    assert seen["at"] == [3]
    # NeMo's checkpoint callback names and saves the last one by it.
    assert seen["interval"] == {0.5}
    allowed = "time based, `1.0` or an int" if BY_THE_CLOCK else "`1.0` or an int"
    assert (
        "`Trainer(limit_train_batches)` must be `1.0` or an int" in seen["half of one"]
    )  # Lightning's own
    # Lightning's own.
    assert f"Trainer(val_check_interval)` must be {allowed}" in seen["half of unknown"]
    assert (
        "val_check_interval=7 would never validate: no training pass has more than 6"
        in seen["never validated"]
    )


def test_a_resumed_pass_is_as_long_as_stocks(seen: dict[str, Any]) -> None:
    assert seen["resumed"] == seen["resumed by stock"]
    assert seen["resumed"][0] == [3]


def test_switched_off_it_does_nothing_and_says_so(
    seen: dict[str, Any], results: list[Result]
) -> None:
    assert seen["disabled"] == ([2], [], 2)
    for result in results:
        assert (
            len(
                result.lines(
                    "ranks do not end their passes together: NEMO_PATCHES_DISABLE=1"
                )
            )
            == 1
        )


def test_it_works_outside_lightning(seen: dict[str, Any]) -> None:
    assert seen["validate"] == [2, 3]
    assert seen["plain loops"] == [3, 3, 2, 2]


def test_it_says_once_a_pass_who_ran_out_and_what_was_left_out(
    results: list[Result],
) -> None:
    title = (
        "training loader 22 (TarredStream): pass 1 ends on every rank after 4 batches: "
    )
    assert (
        len(
            results[0].lines(
                title + "rank 1 has no more; this rank's others are left out"
            )
        )
        == 1
    )
    assert len(results[1].lines(title + "this rank has no more, others have")) == 1
    assert (
        len(
            results[0].lines(
                "training loader 4 (Batches): rank 1 has 4 batches", "this rank has 5"
            )
        )
        == 1
    )
    assert not results[0].lines("validation loader 1 (")  # even
    assert (
        len(
            results[0].lines(
                "StopTogether(training=True, evaluation=False) has no effect"
            )
        )
        == 1
    )


def test_a_rank_without_any_batch_raises_on_all_with_the_loaders_name(
    seen: dict[str, Any],
) -> None:
    assert seen["no batch"].startswith("training loader ")
    assert "(Stream): rank 0 has no batch at all" in seen["no batch"]
    assert "(Batches): rank 1 has no batch at all" in seen["no batch, sized"]


def test_ranks_that_left_a_pass_at_different_batches_are_told_on_all(
    seen: dict[str, Any],
) -> None:
    places = "rank 1 is at batch 5 of pass 1, rank 0 is at batch 1 of pass 2"
    assert (
        f"the ranks are out of step: {places}; some rank has left a pass early"
        in seen["out of step"]
    )


def test_torchs_own_join_works_beside_a_length_sync_that_does_not_wait(
    seen: dict[str, Any],
) -> None:
    # And the same on both ranks, as all that they have seen.
    assert len(seen["joined"]) == 64


def one_that_hangs(rank: int, size: int, train: int, val: int) -> None:
    asr_models.prepare()
    more = int(rank == 0)
    fit(
        stream(4 + train * more),
        stream(4 + val * more),
        callbacks=[asr_models.hang_watch()],
    )
    print("the fit has ended", file=sys.stderr, flush=True)
    torch.distributed.barrier()


def tarred_alone(rank: int, size: int, folder: str) -> None:
    asr_models.prepare()
    tarred_fit(rank, size, Path(folder), [asr_models.hang_watch()])
    print("the fit has ended", file=sys.stderr, flush=True)
    torch.distributed.barrier()


def test_stock_hangs_or_dies_in_the_reproductions(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(run_ranks, one_that_hangs, 2, *more, dies=(0, 1))
            for more in ((1, 0), (0, 2))
        ]
        of_shards = pool.submit(
            run_ranks, tarred_alone, 2, str(tmp_path), dies=(0, 1)
        ).result()
        for run in runs:
            results = run.result()
            # All have had what is even.
            assert all(" batch 3" in result.stderr for result in results)
            assert "the fit has ended" not in results[0].stderr
    assert "training batch 0" in of_shards[0].stderr
    # Rank 1 ends its own, and waits after it.
    assert "the fit has ended" not in of_shards[0].stderr


WORDS = ("ab", "cd", "abc", "dab")


def nemos_loaders(
    rank: int, size: int, folder: str
) -> tuple[list[int], list[int], Any]:
    """Lhotse's, whose ranks by default shuffle each on its own, alone and together; and tarred
    data, together.
    """
    asr_models.prepare()
    nemo_patches.apply(timeout=60)
    shards = tarred_fit(rank, size, Path(folder), [StopTogether()])
    if rank == 0:
        chance = random.Random(0)
        write_audio(
            Path(folder),
            "train",
            [round(chance.uniform(0.4, 2.9), 2) for _ in range(50)],
        )
    torch.distributed.barrier()
    trainer = asr_models.trainer_of(
        [StopTogether(), progress := Progress()], max_epochs=2
    )
    model = asr_models.ctc(trainer)
    config = {
        "manifest_filepath": f"{folder}/train.json",
        "sample_rate": 16000,
        "labels": asr_models.LABELS,
        "use_lhotse": True,
        "batch_size": None,
        "batch_duration": 3,  # one to six cuts: hardly an epoch is even
        "shuffle": True,
        "num_workers": 0,
        "shuffle_buffer_size": 50,
    }
    model.setup_training_data(OmegaConf.create(config))
    # Without the audio.
    alone = [sum(1 for _ in model._train_dl.sampler) for _ in range(10)]
    trainer.fit(model)
    return alone, progress.epochs, shards


def tarred_fit(
    rank: int, size: int, folder: Path, callbacks: Any
) -> tuple[int, list[int], list[int]]:
    """The limit that NeMo itself sets, two batches; the batches of each epoch, and of each
    validation.

    A shard for each rank, of six cuts: filters leave rank 0 all of them, which is three batches,
    and the others two.
    """
    if rank == 0:
        lengths = [0.5] * 6 + [0.5, 0.5, 1.5, 1.5, 0.1, 0.1] * (size - 1)
        files = write_audio(folder, "tarred", lengths)
        for number in range(size):
            with tarfile.open(folder / f"shard_{number}.tar", "w") as shard:
                for file in files[6 * number : 6 * number + 6]:
                    shard.add(file, file.name)
    torch.distributed.barrier()
    trainer = asr_models.trainer_of(
        [*callbacks, progress := Progress()], num_sanity_val_steps=0
    )
    model = asr_models.ctc(trainer)
    config = {
        "manifest_filepath": f"{folder}/tarred.json",
        "sample_rate": 16000,
        "labels": asr_models.LABELS,
        "is_tarred": True,
        "tarred_audio_filepaths": f"{folder}/shard__OP_0..{size - 1}_CL_.tar",
        "batch_size": 2,
        "min_duration": 0.2,
        "max_duration": 1.0,
        "num_workers": 0,
    }
    model.setup_training_data(OmegaConf.create(config))
    limit = trainer.limit_train_batches
    trainer.fit(model, val_dataloaders=stream(1))
    return limit, progress.epochs, progress.validations


def write_audio(folder: Path, name: str, lengths_s: list[float]) -> list[Path]:
    """Noise of these lengths, and its manifest."""
    files = [folder / f"{name}_{number}.wav" for number in range(len(lengths_s))]
    with (folder / f"{name}.json").open("w") as manifest:
        for number, (file, seconds) in enumerate(zip(files, lengths_s, strict=True)):
            soundfile.write(
                file, 0.01 * torch.randn(int(seconds * 16000)).numpy(), 16000
            )
            text = " ".join(WORDS[number % 4 :])
            manifest.write(
                json.dumps(
                    {"audio_filepath": str(file), "duration": seconds, "text": text}
                )
                + "\n"
            )
    return files


def test_lhotses_default_shuffling_and_filtered_shards_end_together(
    tmp_path: Path,
) -> None:
    results = run_ranks(nemos_loaders, 3, str(tmp_path))
    own, together, shards = results[0].value
    # So that there was something to do.
    assert any(result.value[0] != own for result in results)
    assert all(result.value[1:] == (together, shards) for result in results)
    assert len(together) == 2 and min(together) > 0
    # It is validated, although the pass ended before the limit.
    assert shards == (2, [1], [1])
    assert (
        len(
            results[0].lines(
                "(TarredAudioToCharDataset): pass 1 ends on every rank after 1 batches"
            )
        )
        == 1
    )


class Late(IterableDataset[Any]):
    """Rank 1 is late with its third batch, until rank 0 has said so."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank, self.store = rank, store

    def __iter__(self) -> Iterator[Any]:
        for number in range(5):
            if number == 2 and self.rank == 1:
                wait_for_the_report(self.store)
            yield asr_models.batch(number)


def wait_for_the_report(store: Any) -> None:
    store.wait(["said"], timedelta(seconds=120))


def late_and_dead(rank: int, size: int) -> Any:
    asr_models.prepare()
    nemo_patches.apply(timeout=60)
    progress, _ = fit(stream(2 + rank), callbacks=[StopTogether()])
    assert progress.epochs == [2]
    wait_until(all_have_come)
    torch.distributed.barrier()
    nemo_patches.apply(timeout=2)
    store = torch.distributed.distributed_c10d._get_default_store()
    said = Said()
    if rank == 0:
        tell = threading.Thread(
            target=lambda: (
                wait_until(lambda: missing(said), 120),
                store.set("said", ""),
            )
        )
        tell.start()
    progress, _ = fit(
        DataLoader(Late(rank, store), batch_size=None), callbacks=[StopTogether()]
    )
    wait_until(lambda: rank != 0 or any("recovered" in line for line in said.lines))
    assert progress.epochs == [5]
    return raised(lambda: die_in_a_loop(rank)), said.lines


def die_in_a_loop(rank: int) -> None:
    """Without DDP, which may see it first."""
    for number in nemo_patches.stop_together(range_stream(5)):
        if number == 2 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def missing(said: Said) -> bool:
    return any(
        "training loader 2 (Late): batch 3: not every rank" in line
        for line in said.lines
    )


def test_a_late_rank_is_waited_for_and_named_and_a_dead_one_raises() -> None:
    results = run_ranks(late_and_dead, 4, dies=(2,))
    for result in (*results[:2], results[3]):
        text, _ = result.value
        assert (
            "data loader 1 (iter_again): the ranks cannot end together any more: rank 2"
            " has ended" in text
        )
        assert re.search(
            r"closed; seen at batch [3-5] of pass 1, \d\d:\d\d:\d\d\. .*go on from the"
            r" last checkpoint",
            text,
        )
    lines = results[0].value[1]
    (line,) = (line for line in lines if "batch 3: not every rank" in line)
    assert "Missing: rank 1 of 4" in line
    assert "wait_for_the_report (tests/test_stop_together.py" in line
    assert any(
        "training loader 2 (Late): recovered: rank 1 came" in line for line in lines
    )
