"""StopTogether on every kind of NeMo's loaders: each epoch is a whole new pass on each rank, also
after one cut short.

One spawn of ranks has many short trainings. Each rank has its own data, and each cut its own
length, by which it is known again in a batch.
"""

from __future__ import annotations

import json
import multiprocessing
import tarfile
from pathlib import Path
from typing import Any

import asr_models
import lightning.pytorch as pl
import pytest
import soundfile
import torch
from omegaconf import OmegaConf
from ranks import Result, run_ranks

import nemo_patches
from nemo_patches.lightning import StopTogether
from nemo_patches.options import cut_pass

pytestmark = [pytest.mark.one_nemo, pytest.mark.alone]
EPOCHS = 2
CUTS = (14, 8)  # of each rank; 7 batches and 4
SHARDS = 4
FIXED = {"shuffle": True, "shard_seed": 7, "seed": 3}  # Lhotse's order
Batch = tuple[int, ...]  # its cuts


class Recorded(pl.Callback):  # type: ignore[misc]
    """The batches of each epoch, and of each validation."""

    def __init__(self) -> None:
        self.epochs: list[list[Batch]] = []
        self.validations: list[list[Batch]] = []
        self.model: Any = None

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.epochs.append([])

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, index: int
    ) -> None:
        self.epochs = self.epochs or [[]]
        self.epochs[-1].append(cuts_of(batch))

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self.validations.append([])

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, *_: Any
    ) -> None:
        self.validations[-1].append(cuts_of(batch))


def cuts_of(batch: Any) -> Batch:
    return tuple((length - 4800) // 16 for length in batch[1].tolist())


def write_cuts(folder: Path, count: int, longer: int = 0) -> None:
    """As single files, and as shards of Lhotse's and of NeMo's own naming. longer: so many more, of
    a second.
    """
    folder.mkdir(parents=True)
    lines, files = [], []
    for number in range(count + longer):
        samples = 4800 + 16 * number + (16000 if number >= count else 0)
        files.append(folder / f"{number:03}.wav")
        soundfile.write(files[-1], 0.01 * torch.randn(samples).numpy(), 16000)
        lines.append(
            {
                "audio_filepath": files[-1].name,
                "duration": samples / 16000,
                "text": "ab cd",
            }
        )
    whole = [
        {**line, "audio_filepath": str(folder / line["audio_filepath"])}
        for line in lines
    ]
    (folder / "whole.json").write_text(
        "".join(json.dumps(line) + "\n" for line in whole)
    )
    for shard in range(SHARDS):
        part = slice(shard * len(files) // SHARDS, (shard + 1) * len(files) // SHARDS)
        (folder / f"manifest_{shard}.json").write_text(
            "".join(json.dumps(line) + "\n" for line in lines[part])
        )
        with tarfile.open(folder / f"audio_{shard}.tar", "w") as tar:
            for file in files[part]:
                tar.add(file, file.name)


def config(folder: Path, kind: str, workers: int, **more: Any) -> Any:
    """For NeMo's setup_training_data."""
    common = {
        "sample_rate": 16000,
        "labels": asr_models.LABELS,
        "batch_size": 2,
        "num_workers": workers,
    }
    if kind == "native":
        kinds: dict[str, Any] = {
            "manifest_filepath": f"{folder}/whole.json",
            "shuffle": False,
        }
    elif kind == "lhotse":
        kinds = {"manifest_filepath": f"{folder}/whole.json", "use_lhotse": True}
    else:
        kinds = {
            "manifest_filepath": f"{folder}/manifest__OP_0..{SHARDS - 1}_CL_.json",
            "tarred_audio_filepaths": f"{folder}/audio__OP_0..{SHARDS - 1}_CL_.tar",
            "use_lhotse": True,
            "force_finite": True,
        }
    return OmegaConf.create({**common, **kinds, **more})


def native_tarred(folder: Path, size: int, workers: int) -> Any:
    """All ranks' shards, one for each: after filters rank 0 has 14 cuts, and the others 8."""
    return OmegaConf.create(
        {
            "manifest_filepath": f"{folder}/tarred.json",
            "tarred_audio_filepaths": f"{folder}/shard__OP_0..{size - 1}_CL_.tar",
            "is_tarred": True,
            "max_duration": 1.0,
            "sample_rate": 16000,
            "labels": asr_models.LABELS,
            "batch_size": 2,
            "num_workers": workers,
            "shuffle_n": 0,
        }
    )


def write_native_tarred(folder: Path, size: int) -> None:
    manifest = []
    for rank in range(size):
        of_rank = folder / f"of {rank}"
        write_cuts(of_rank, CUTS[min(rank, 1)], longer=6 * min(rank, 1))
        with tarfile.open(folder / f"shard_{rank}.tar", "w") as tar:
            for line in map(
                json.loads, (of_rank / "whole.json").read_text().splitlines()
            ):
                name = f"{rank}_{Path(line['audio_filepath']).name}"
                tar.add(line["audio_filepath"], name)
                manifest.append(json.dumps({**line, "audio_filepath": name}) + "\n")
    (folder / "tarred.json").write_text("".join(manifest))


def trained(
    train: Any,
    callbacks: Any = None,
    change: Any = None,
    val: Any = None,
    times: int = 1,
    **settings: Any,
) -> Recorded:
    """Trainings under DDP, one after the other. change: what is done to the loader."""
    recorded = Recorded()
    callbacks = [StopTogether(True, True)] if callbacks is None else callbacks
    settings = {"num_sanity_val_steps": 0, "max_epochs": EPOCHS, **settings}
    if "tarred_audio_filepaths" in train and "use_lhotse" in train:
        settings.setdefault(
            "limit_train_batches", 50
        )  # NeMo takes the length of such data for it otherwise, of which there is none
    trainer = asr_models.trainer_of([*callbacks, recorded], **settings)
    model = asr_models.ctc(trainer)
    model.setup_training_data(train)
    if val is not None:
        model.setup_validation_data(val)
    if change is not None:
        change(model._train_dl)
    trainer.fit(model)
    recorded.model = model
    for _ in range(times - 1):
        model.trainer = trainer = asr_models.trainer_of(
            [*callbacks, recorded], **settings
        )
        trainer.fit(model)
    return recorded


def passes(train: Any, number: int) -> list[list[Batch]]:
    """Of a loader that nobody else has: each read to its end."""
    model = asr_models.ctc(asr_models.trainer_of(limit_train_batches=50))
    model.setup_training_data(train)
    return [[cuts_of(batch) for batch in model._train_dl] for _ in range(number)]


def persistent(loader: Any) -> None:
    vars(loader)["persistent_workers"] = True


def scenarios(rank: int, size: int, folder: str) -> dict[str, Any]:
    asr_models.prepare()
    # The default, but in ranks of tests.
    multiprocessing.set_start_method("fork", force=True)
    nemo_patches.apply(timeout=60)
    own, all_ranks, even = (
        Path(folder, f"rank {rank}"),
        Path(folder, "all"),
        Path(folder, "even"),
    )
    seen = dict[str, Any]()
    write_cuts(own, CUTS[min(rank, 1)])
    if rank == 0:
        write_native_tarred(all_ranks, size)
        write_cuts(even, 10)
    torch.distributed.barrier()
    seen["native 0"] = trained(config(own, "native", 0)).epochs
    seen["native tarred 1"] = trained(native_tarred(all_ranks, size, 1)).epochs
    for workers in (0, 1):
        seen[f"lhotse {workers}"] = trained(config(own, "lhotse", workers)).epochs
    seen["native persistent"] = trained(
        config(own, "native", 1), change=persistent
    ).epochs
    seen["native tarred persistent"] = trained(
        native_tarred(all_ranks, size, 1), change=persistent
    ).epochs
    seen["two workers"] = trained(config(own, "lhotse tarred", 2)).epochs
    for workers in (0, 1):
        shards = config(own, "lhotse tarred", workers, **FIXED)
        seen[f"passes {workers}"], seen[f"lhotse tarred {workers}"] = (
            passes(shards, 3),
            trained(shards).epochs,
        )
        for limit in (3, 4, 6)[: 3 - 2 * workers]:
            seen[f"limit {limit}, {workers}"] = trained(
                shards, limit_train_batches=limit, max_epochs=3
            ).epochs
        seen[f"counted {workers}"] = counted(shards)
    recorded = trained(shards, val=shards, val_check_interval=2)
    seen["validated"] = (recorded.epochs, recorded.validations)
    seen["again"] = trained(shards, max_epochs=1, times=2).epochs
    seen["plain loops"] = plain_loops(config(own, "lhotse tarred", 1, **FIXED))
    seen["broken"] = broken_loops(config(own, "lhotse tarred", 0, **FIXED))
    seen["stock"], seen["even"] = (
        evens(even, callbacks) for callbacks in ([], [StopTogether(True, True)])
    )
    return seen


def evens(folder: Path, callbacks: Any) -> dict[str, Any]:
    """Trainings in which all ranks have as many batches."""

    native = config(folder, "native", 0)
    seen: dict[str, Any] = {
        "native": trained(native, callbacks, limit_train_batches=3).epochs,
        "lhotse": trained(config(folder, "lhotse", 1, **FIXED), callbacks).epochs,
    }
    for workers, limit in ((0, 2), (1, 4)):
        shards = config(folder, "lhotse tarred", workers, **FIXED)
        seen[f"limit {limit}"] = trained(
            shards, callbacks, limit_train_batches=limit, max_epochs=4
        ).epochs
    shards = config(folder, "lhotse tarred", 0, **FIXED)
    limits = {"limit_val_batches": 2, "num_sanity_val_steps": 2}
    recorded = trained(shards, callbacks, val=shards, val_check_interval=2, **limits)
    seen["validated"] = (recorded.epochs, recorded.validations)
    # Not Lhotse's 10,000: it would read the 10 cuts a thousand times to fill it.
    buffer = {"shuffle_buffer_size": 20}
    endless = config(folder, "lhotse tarred", 1, **FIXED, **buffer, force_finite=False)
    seen["endless"] = trained(endless, callbacks, limit_train_batches=3).epochs
    return seen


def counted(train: Any) -> list[int]:
    """How many passes the sources of cuts have counted in this process: at first, after one read to
    its end, cut.
    """
    model = asr_models.ctc(asr_models.trainer_of(limit_train_batches=50))
    model.setup_training_data(train)
    ends = cut_pass.PassEnds(model._train_dl, "loader")
    parts = cut_pass._inner_parts(model._train_dl.dataset.sampler)
    (source,) = (
        part for part in parts if type(part).__name__ == "LazyNeMoTarredIterator"
    )
    seen = [source.epoch]
    for end in (ends.note_end, ends.cut):
        end()
        seen.append(source.epoch)
    return seen


def plain_loops(train: Any) -> list[list[Batch]]:
    """Over a loader whose workers are there already, made even for each epoch."""
    model = asr_models.ctc(asr_models.trainer_of(limit_train_batches=50))
    model.setup_training_data(train)
    for _ in model._train_dl:
        pass
    return [
        [cuts_of(batch) for batch in nemo_patches.stop_together(model._train_dl)]
        for _ in range(EPOCHS)
    ]


def broken_loops(train: Any) -> list[list[Batch]]:
    """Over Lhotse's tarred data, left after so many batches each, which such a loader goes on with."""
    model = asr_models.ctc(asr_models.trainer_of(limit_train_batches=50))
    model.setup_training_data(train)
    loops = list[list[Batch]]()
    together = nemo_patches.stop_together(model._train_dl)
    for most in (1, 1, 50):
        loops.append([])
        for batch in together:
            loops[-1].append(cuts_of(batch))
            if len(loops[-1]) == most:
                break
    return loops


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return run_ranks(scenarios, 2, str(tmp_path_factory.mktemp("data")), limit=900)


@pytest.fixture(scope="module")
def seen(results: list[Result]) -> tuple[dict[str, Any], dict[str, Any]]:
    return results[0].value, results[1].value


def sizes(epochs: list[list[Batch]]) -> list[int]:
    return [len(epoch) for epoch in epochs]


@pytest.mark.parametrize(
    "name",
    ["native 0", "native tarred 1", "native persistent", "native tarred persistent"],
)
def test_nemos_own_loaders_begin_anew(name: str, seen: Any) -> None:
    for rank in seen:
        assert rank[name] == [[(0, 1), (2, 3), (4, 5), (6, 7)]] * EPOCHS


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("lhotse 0", 2),
        ("lhotse 1", 2),
        ("lhotse tarred 0", 4),
        ("lhotse tarred 1", 4),
        ("two workers", 8),  # each has all of the data
        ("plain loops", 4),
    ],
)
def test_each_epoch_is_a_whole_pass_of_the_rank_with_the_fewest(
    name: str, batches: int, seen: Any
) -> None:
    for rank in seen:
        assert sizes(rank[name]) == [batches] * EPOCHS
        if name != "two workers":
            # No cut twice in a pass.
            assert all(len(set(sum(epoch, ()))) == 2 * batches for epoch in rank[name])


@pytest.mark.parametrize("limit", [4, 6])
def test_a_limit_that_no_rank_exceeds_changes_nothing(limit: int, seen: Any) -> None:
    for rank in seen:
        epochs = rank[f"limit {limit}, 0"]
        assert sizes(epochs) == [4] * 3
        assert all(len(set(sum(epoch, ()))) == 8 for epoch in epochs)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_begins_with_the_beginning_of_a_later_pass(
    workers: int, seen: Any
) -> None:
    for rank in seen:
        whole, epochs = rank[f"passes {workers}"], rank[f"lhotse tarred {workers}"]
        assert epochs[0] == whole[0][:4]
        # One that was left may have been read to its end by what shuffles: it counts for one more
        # then.
        assert epochs[1] in ([batches[:4] for batches in whole[1:]])
        if workers:
            assert rank["again"][0] == whole[0][:4]
            assert rank["again"][1] in ([batches[:4] for batches in whole])


def test_this_process_counts_what_persistent_workers_have_read(seen: Any) -> None:
    """New workers, after a cut, begin with this process's sources, by whose count the next pass is
    shuffled.
    """
    for rank in seen:
        # Without workers, its own sources count what they read.
        assert rank["counted 0"] == [0, 0, 1]
        assert rank["counted 1"] == [0, 1, 2]


def test_validation_in_mid_epoch_has_whole_passes_too(seen: Any) -> None:
    for rank in seen:
        epochs, validations = rank["validated"]
        assert sizes(epochs) == [4] * EPOCHS
        assert sizes(validations) == [4] * 2 * EPOCHS


@pytest.mark.parametrize(("limit", "workers"), [(3, 0), (4, 0), (3, 1)])
def test_a_pass_that_ends_at_a_limit_goes_on_as_without(
    limit: int, workers: int, seen: Any
) -> None:
    both = [sizes(rank[f"limit {limit}, {workers}"]) for rank in seen]
    assert (
        both[0] == both[1]
        and both[0][0] == limit
        and both[0][2] == limit
        and both[0][1] > 0
    )
    first, *_ = seen
    if (limit, workers) == (3, 0):
        assert first["limit 3, 0"][:2] == [
            first["passes 0"][0][:3],
            first["passes 0"][0][3:4],
        ]


def test_even_ranks_have_stocks_batches(seen: Any) -> None:
    for rank in seen:
        assert {
            name for name in rank["stock"] if rank["stock"][name] != rank["even"][name]
        } == set()


def test_a_loop_that_is_left_by_a_break_goes_on_and_no_rank_is_left_alone(
    seen: Any,
) -> None:
    first, second = (rank["broken"] for rank in seen)
    # Then rank 1 has nothing left, and all begin anew.
    assert sizes(first) == sizes(second) == [1, 1, 4]
    for loops in (first, second):
        assert len({*loops[0][0], *loops[1][0]}) == 4


def test_a_pass_that_was_cut_is_said_on_both_sides(results: list[Result]) -> None:
    title = "(IterableDatasetWrapper): pass 1 ends on every rank after 4 batches: "
    lines = results[0].lines(title)
    assert lines and all(
        line.endswith("rank 1 has no more; this rank's others are left out")
        for line in lines
    )
    lines = results[1].lines(title)
    assert lines and all(
        line.endswith("this rank has no more, others have") for line in lines
    )


def with_a_thread(rank: int, size: int, folder: str) -> list[int]:
    """Lhotse's bucketing sampler reads ahead in a thread, until its buffer is full."""
    asr_models.prepare()
    nemo_patches.apply(timeout=60)
    own = Path(folder, f"rank {rank}")
    write_cuts(own, (60, 8)[rank])
    buckets = {
        "use_bucketing": True,
        "num_buckets": 2,
        "bucket_duration_bins": [0.32],
        "bucket_buffer_size": 10,
        "shuffle_buffer_size": 1,
    }
    train = config(own, "lhotse", 0, batch_duration=0.7, shuffle=True, **buckets)
    kept.append(trained(train, max_epochs=2))
    return sizes(kept[0].epochs)


kept: list[Any] = []  # until the process ends


def test_a_process_ends_although_a_pass_was_left(tmp_path: Path) -> None:
    results = run_ranks(with_a_thread, 2, str(tmp_path))
    assert [result.exit_code for result in results] == [0, 0]
    assert results[0].value == results[1].value and min(results[0].value) > 0
    assert results[0].lines("pass 2 ends on every rank", "rank 1 has no more")
