"""Nothing of tracing/ is imported where there is no trace; and where it cannot be imported, nothing
has changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from interpreters import CHECKOUT, environment, run

pytestmark = pytest.mark.one_nemo

CHOSEN = """
import pathlib, sys
import nemo_patches
import encoders
from lightning.pytorch import Trainer

def tracing():
    return [name for name in sys.modules if name.startswith("nemo_patches.tracing")]

def callbacks():
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return [type(one).__name__ for one in Trainer(accelerator="cpu", **dict.fromkeys(off, False)).callbacks]

def step():
    encoders.run(encoder, 80).sum().backward()

nemo_patches.apply()
encoder = encoders.conformer()
for _ in range(20):
    step()
assert "TrainerExceptions" not in callbacks()
assert "trace: " not in str(nemo_patches.status())
assert nemo_patches.status().trace_file == ""
nemo_patches.apply(timeout=7)
nemo_patches.revert()
nemo_patches.apply(timeout=7)
assert not tracing(), tracing()

folder = pathlib.Path(sys.argv[1])
before = nemo_patches.status()
forward = vars(type(encoder))["forward"]
sys.modules["nemo_patches.tracing.checks"] = None  # an import of it fails
try:
    nemo_patches.apply(timeout=3, trace=folder)
except ImportError as error:
    print("refused:", error)
after = nemo_patches.status()
assert after == before, (after, before)
assert vars(type(encoder))["forward"] is forward
step()
for name in tracing():
    del sys.modules[name]

nemo_patches.apply(timeout=3, trace=folder)
assert "TrainerExceptions" in callbacks()
step()
nemo_patches.apply(trace="")
assert nemo_patches.status().trace_file == ""
print("traced:", len(list(folder.iterdir())))
"""

BY_ITSELF = """
import sys
sys.modules["nemo_patches.tracing.checks"] = None
from nemo.collections.asr.modules import ConformerEncoder
import nemo_patches
print(nemo_patches.status().state)
"""


def test_what_a_trace_needs_is_imported_with_it_and_before_anything_changes(
    tmp_path: Path,
) -> None:
    variables = environment(CHECKOUT, CHECKOUT / "tests")
    done = run([sys.executable, "-c", CHOSEN, str(tmp_path)], variables)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-2:] == [
        "refused: import of nemo_patches.tracing.checks halted; None in sys.modules",
        "traced: 1",
    ]


def test_with_auto_apply_nemo_stays_as_stock_and_that_is_said(tmp_path: Path) -> None:
    variables = environment(CHECKOUT, NEMO_PATCHES_TRACE=str(tmp_path))
    done = run([sys.executable, "-c", BY_ITSELF], variables)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "cannot be"
    errors = [
        line for line in done.stderr.splitlines() if " nemo_patches ERROR " in line
    ]
    assert (
        len(errors) == 1
        and " runs as stock: import of nemo_patches.tracing.checks halted" in errors[0]
    )
