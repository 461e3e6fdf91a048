"""Nothing of tracing/ is imported where there is no trace; and where it cannot be imported, nothing
has changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import encoders
import pytest
from ranks import run_ranks

import nemo_patches
from nemo_patches.patching import COLLECTION, TARGET_MODULES, monkeypatch

pytestmark = pytest.mark.one_nemo


def tracing() -> list[str]:
    return [name for name in sys.modules if name.startswith("nemo_patches.tracing")]


def callbacks() -> list[str]:
    from lightning.pytorch import Trainer

    off = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
    )
    trainer: Any = Trainer(accelerator="cpu", **dict.fromkeys(off, False))
    return [type(one).__name__ for one in trainer.callbacks]


def chosen(rank: int, size: int, folder: Path) -> str:
    nemo_patches.apply()
    encoder = encoders.conformer()

    def step() -> None:
        encoders.run(encoder, 80).sum().backward()

    for _ in range(20):
        step()
    assert "TrainerExceptions" not in callbacks()
    assert "trace: " not in str(nemo_patches.status())
    assert nemo_patches.status().trace_file == ""
    nemo_patches.apply(timeout=7)
    nemo_patches.revert()
    nemo_patches.apply(timeout=7)
    assert not tracing(), tracing()

    before = nemo_patches.status()
    forward = vars(type(encoder))["forward"]
    refused = ""
    sys.modules["nemo_patches.tracing.checks"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        nemo_patches.apply(timeout=3, trace=folder)
    except ImportError as error:
        refused = str(error)
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
    assert len(list(folder.iterdir())) == 1
    return refused


def by_itself(rank: int, size: int, folder: Path) -> str:
    """As in a process that begins under auto-apply."""
    sys.modules["nemo_patches.tracing.checks"] = None  # type: ignore[assignment]
    os.environ["NEMO_PATCHES_TRACE"] = str(folder)
    monkeypatch.this_process = monkeypatch.Patching()
    for module in (*TARGET_MODULES, COLLECTION):
        if module in sys.modules:
            monkeypatch.this_process.on_import(module)
    return nemo_patches.status().state


def test_what_a_trace_needs_is_imported_with_it_and_before_anything_changes(
    tmp_path: Path,
) -> None:
    (result,) = run_ranks(chosen, 1, tmp_path, group=False)
    assert (
        result.value
        == "import of nemo_patches.tracing.checks halted; None in sys.modules"
    )


def test_with_auto_apply_nemo_stays_as_stock_and_that_is_said(tmp_path: Path) -> None:
    (result,) = run_ranks(by_itself, 1, tmp_path, group=False)
    assert result.value == "cannot be"
    (line,) = result.lines(" nemo_patches ERROR ")
    assert " runs as stock: import of nemo_patches.tracing.checks halted" in line
