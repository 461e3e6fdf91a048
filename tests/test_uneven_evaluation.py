"""Uneven evaluation under Lightning's DDP: patched trains as if the evaluation were even. That stock
dies is in tests/test_demo.py.

Real NEST pre-training on two CPU ranks, as `nemo-patches demo` runs it, without its stall. Run as a
script, this file is the runs; they have a process of their own, from which the ranks are forked. On
a NeMo with its diff there is no stock to compare with, and the even evaluation of that NeMo is what
the uneven one must equal.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_patches.tools.demo import data, processes
from nemo_patches.tools.demo.jobs import (
    TRAINING_STEPS,
    UNEVEN_RANK,
    VALIDATE_EVERY,
    VALIDATION_BATCHES,
    RunOutcome,
)

pytestmark = pytest.mark.one_nemo
LIMIT = 800  # seconds, for what takes 15 to 30 and an import of NeMo
DEVICES = 2
EVALUATIONS = TRAINING_STEPS // VALIDATE_EVERY
# The diff cannot be taken out of a NeMo.
HAS_STOCK = importlib.util.find_spec("nemo_patches.patching") is not None


def run_all(folder: Path) -> None:
    """Train on the same data with the same seeds, evenly and unevenly evaluated, and leave the
    outcomes in the folder.

    NEST draws random numbers in an evaluation (noise, masks), so that a batch more would change
    what that rank trains on afterwards, which has nothing to do with the length sync. The demo's
    training, which is what runs here, therefore restores the random state after every evaluation,
    in all runs alike.
    """
    processes.prepare()
    processes.import_nemo(folder / "import.log")
    entries = data.make_audio(folder)
    for evaluation in ("even", "uneven"):
        (folder / evaluation).mkdir()
        data.write_shards(
            entries, DEVICES, folder / evaluation, uneven=evaluation == "uneven"
        )
    outcomes = {}
    for version in ("stock", "patched") if HAS_STOCK else ("patched",):
        for evaluation in ("even", "uneven") if version == "patched" else ("even",):
            outcome = processes.run(
                "training",
                version == "patched",
                DEVICES,
                folder / evaluation,
                stall_s=0,
            )
            outcomes[f"{version}, {evaluation}"] = outcome
            print(version, evaluation, outcome)
    (folder / "outcomes").write_bytes(pickle.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, RunOutcome]]:
    folder = tmp_path_factory.mktemp("uneven")
    runs = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its ranks can be ended with it
    )
    try:
        printed, _ = runs.communicate(timeout=LIMIT)
        assert runs.returncode == 0, printed
        print(printed)
        yield pickle.loads((folder / "outcomes").read_bytes())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(runs.pid, signal.SIGKILL)
        runs.wait(timeout=60)


def losses(run: RunOutcome) -> list[list[str]]:
    """Every rank's training losses, to the last bit."""
    return [[loss.hex() for loss in rank.losses] for rank in run.ranks]


def test_the_runs_differ_only_in_the_extra_batch(
    outcomes: dict[str, RunOutcome],
) -> None:
    even, uneven = (
        outcomes[f"patched, {kind}"].jobs[0].folder for kind in ("even", "uneven")
    )
    if HAS_STOCK:
        assert outcomes["stock, even"].jobs[0].folder == even
    for rank in range(DEVICES):
        train, validation = f"train-{rank}.json", f"validation-{rank}.json"
        assert (even / train).read_text() == (uneven / train).read_text()
        without, with_extra = (
            (folder / validation).read_text().splitlines() for folder in (even, uneven)
        )
        assert with_extra[: len(without)] == without
        assert (len(with_extra) > len(without)) == (rank == UNEVEN_RANK)


@pytest.mark.parametrize("version", ["stock", "patched"])
def test_it_completes_where_the_evaluation_is_even(
    outcomes: dict[str, RunOutcome], version: str
) -> None:
    run = outcomes[f"{version}, even"]
    assert run.completed, run
    assert [rank.validation_batches for rank in run.ranks] == [
        VALIDATION_BATCHES * EVALUATIONS
    ] * DEVICES


def test_where_it_is_even_the_losses_are_stocks(
    outcomes: dict[str, RunOutcome],
) -> None:
    assert losses(outcomes["patched, even"]) == losses(outcomes["stock, even"])


def test_patched_completes_with_the_losses_of_the_even_run(
    outcomes: dict[str, RunOutcome],
) -> None:
    run = outcomes["patched, uneven"]
    assert run.completed, run
    assert [rank.validation_batches for rank in run.ranks] == [
        (VALIDATION_BATCHES + (rank == UNEVEN_RANK)) * EVALUATIONS
        for rank in range(DEVICES)
    ]
    assert losses(run) == losses(outcomes["patched, even"])
    everything = [loss for rank in losses(run) for loss in rank]
    # So that equality says something.
    assert len(set(everything)) == len(everything) == TRAINING_STEPS * DEVICES


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
