"""Every Lightning trainer is given what records its exceptions, and by NEMO_PATCHES_STOP_TOGETHER a
StopTogether: by an entry point, or by the import hook."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from interpreters import CHECKOUT, environment, run

pytestmark = pytest.mark.one_nemo
RECORDERS = [0, 0, 0, 0, 1]  # of exceptions, into a trace: only where there will be one
PROGRAM = """
import json, os, sys
from lightning.pytorch import Trainer

def found(**variables):
    os.environ.update({f"NEMO_PATCHES_{name}": value for name, value in variables.items()})
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    callbacks = Trainer(accelerator="cpu", **dict.fromkeys(off, False)).callbacks
    recorders.append([type(one).__name__ for one in callbacks].count("TrainerExceptions"))
    return [[one._training, one._evaluation] for one in callbacks if type(one).__name__ == "StopTogether"]

recorders = []
without = found(STOP_TOGETHER="")
ours = [name for name in sys.modules if name.startswith("nemo_patches")]
settings = [found(STOP_TOGETHER=value) for value in ("training", "training, evaluation", "soon")]
traced = [name for name in sys.modules if name.startswith("nemo_patches.tracing")]
found(STOP_TOGETHER="", TRACE=sys.argv[1])
print(json.dumps([[without, ours], *settings, "nemo" in sys.modules, recorders, traced]))
"""


@pytest.fixture(scope="module")
def entry_point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which nemo_patches looks installed, with the entry point of this checkout's
    pyproject.toml.
    """
    found = re.findall(
        r'\[project.entry-points."(\S+_factory)"\]\nnemo_patches = "(.*)"\n',
        (CHECKOUT / "pyproject.toml").read_text(),
    )
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "nemo_patches-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nemo-patches\nVersion: 9\n"
    )
    (metadata / "entry_points.txt").write_text(
        "".join(f"[{group}]\nnemo_patches = {value}\n" for group, value in found)
    )
    return folder


def started(*path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(path[0] / "trace")]
    # A checkout may hold an egg-info.
    return run(command, environment(*path), cwd=path[0])


def seen(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if "nemo_patches " in line]
    assert len(errors) == 1
    assert (
        "NEMO_PATCHES_STOP_TOGETHER='soon' is not allowed; allowed: 'training',"
        " 'evaluation'" in errors[0]
    )
    return json.loads(done.stdout.splitlines()[-1])


OF_THE_HOOK = [
    "nemo_patches",
    *(
        f"nemo_patches.patching{name}"
        for name in ("", ".start_up", ".trainer_callbacks")
    ),
]
# A callback, which imports more where the trainer has several ranks
RUNNING = {
    f"nemo_patches.patching.{name}" for name in ("running_trainer", "trainer_begins")
}


def as_expected(done: subprocess.CompletedProcess[str], hooked: bool) -> None:
    """Nothing of ours is imported until a setting asks for it; then there is one of each."""
    (without, ours), *found, with_nemo, recorders, traced = seen(done)
    assert without == []
    assert set(ours) == (
        {*OF_THE_HOOK, *RUNNING}
        if hooked
        else {*OF_THE_HOOK} - {"nemo_patches.patching.start_up"}
    )
    assert found == [[[True, False]], [[True, True]], []]
    assert not with_nemo
    assert recorders == RECORDERS
    assert traced == []


@pytest.mark.parametrize("hooked", [True, False], ids=["both", "entry point"])
def test_a_trainer_gets_one_by_an_entry_point_and_not_two_with_the_hook(
    hooked: bool, entry_point: Path
) -> None:
    path = (entry_point, *([CHECKOUT] if hooked else []))
    as_expected(started(*path), hooked)


def test_a_checkout_that_is_not_installed_has_the_import_hook(tmp_path: Path) -> None:
    # First on the path: no entry points, whatever is installed.
    metadata = tmp_path / "nemo_patches-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nemo-patches\nVersion: 9\n"
    )
    as_expected(started(tmp_path, CHECKOUT), hooked=True)


ALONE = """
import sys, lightning.pytorch
print(*sorted(name for name in sys.modules if name.startswith("nemo_patches")))
"""


def test_a_process_that_imports_lightning_only_has_no_more_of_ours_than_the_hook() -> (
    None
):
    done = run([sys.executable, "-c", ALONE], environment(CHECKOUT))
    assert done.stdout.split() == OF_THE_HOOK, done.stderr


@pytest.mark.parametrize("hooked", [True, False], ids=["both", "entry point"])
def test_with_a_broken_wrapt_a_trainer_is_made_and_one_line_says_it(
    hooked: bool, entry_point: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrapt").mkdir()
    (tmp_path / "wrapt" / "__init__.py").write_text(
        "raise ImportError('a broken wrapt')"
    )
    done = started(tmp_path, entry_point, *([CHECKOUT] if hooked else []))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "nemo_patches " in line]
    assert line.endswith(
        "no callback is added to Lightning's trainers: ImportError: a broken wrapt"
    )
    assert json.loads(done.stdout.splitlines()[-1])[1:4] == [[], [], []]


OTHER_PACKAGE = """
import json, os, sys
from pytorch_lightning import LightningModule, Trainer
import torch

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        seen.append(subscriber.process._notes.batch() if "nemo_patches.watch.subscriber" in sys.modules else "")
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer():
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return Trainer(accelerator="cpu", max_steps=2, **dict.fromkeys(off, False))

seen = []
unasked = [type(one).__name__ for one in trainer().callbacks]
ours = [name for name in sys.modules if name.startswith("nemo_patches")]
os.environ.update(NEMO_PATCHES_STOP_TOGETHER="training", NEMO_PATCHES_TRACE=sys.argv[1])
for _ in range(2):
    one = trainer()
    asked = [type(callback).__name__ for callback in one.callbacks]
from nemo_patches.watch import subscriber
one.fit(Model(), torch.utils.data.DataLoader(torch.ones(2, 1)))
print(json.dumps([unasked, ours, asked, seen, "lightning.pytorch" in sys.modules]))
"""


@pytest.mark.parametrize("hooked", [True, False], ids=["hook", "entry point"])
def test_a_trainer_of_pytorch_lightning_knows_its_batch_and_says_once_what_it_lacks(
    hooked: bool, entry_point: Path
) -> None:
    pytest.importorskip("pytorch_lightning", reason="this package is not here")
    path = (entry_point, *([CHECKOUT] if hooked else []))
    command = [sys.executable, "-c", OTHER_PACKAGE, str(entry_point / "trace")]
    done = run(command, environment(*path, RANK="0"), cwd=entry_point)
    assert done.returncode == 0, done.stderr
    unasked, ours, asked, seen_batches, other_is_imported = json.loads(
        done.stdout.splitlines()[-1]
    )
    assert unasked == (["RunningTrainer"] if hooked else [])
    assert len(ours) <= len(OF_THE_HOOK) + 2
    assert asked == ["RunningTrainer"]
    assert seen_batches == [f"{batch} of epoch 0 (train)" for batch in (0, 1)]
    assert not other_is_imported
    (line,) = [one for one in done.stderr.splitlines() if "nemo_patches ERROR" in one]
    assert "[rank 0" in line
    assert line.endswith(
        "a trainer of pytorch_lightning takes no callback of ours. trace: a trainer's"
        " exceptions are not in the trace; stop_together: a pass ends as in stock;"
        " import lightning.pytorch in its place"
    )


OF_SLURM = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
from lightning.pytorch import Trainer
off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
for _ in range(2):
    Trainer(accelerator="cpu", **dict.fromkeys(off, False))
logging.getLogger("lightning.fabric.utilities.registry").info(
    "Adding 1 callbacks from entry point 'another': Theirs"
)
"""


def of_slurm(entry_point: Path, **variables: str) -> str:
    """What two trainers say on a task of two of a job in salloc."""
    tasks = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"}
    slurm = {**tasks, "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "interactive"}
    path = environment(CHECKOUT, entry_point)
    done = run(
        [sys.executable, "-c", OF_SLURM],
        {**path, **slurm, **variables},
        cwd=entry_point,
    )
    assert done.returncode == 0, done.stderr
    assert "entry point 'another'" in done.stderr
    return done.stderr


def test_where_lightning_takes_slurms_tasks_for_shells_one_of_them_says_it_once(
    entry_point: Path,
) -> None:
    told = (
        "the name 'interactive', so Lightning takes it for a shell: each of its 2 tasks"
    )
    added = "callbacks from entry point 'nemo_patches'"
    second = of_slurm(entry_point, SLURM_PROCID="1")
    assert second.count(told) == 1
    assert "WARNING [rank 1/2 " in second
    assert added not in second  # rank 0 has said it
    first = of_slurm(entry_point, SLURM_PROCID="0")
    assert told not in first
    assert added in first
    # A script that gives each task its place itself.
    placed = of_slurm(entry_point, SLURM_PROCID="1", NODE_RANK="1")
    assert told not in placed
