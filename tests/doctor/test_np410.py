"""NP410: a step of the optimizer before the gradients are reduced."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import found

pytestmark = pytest.mark.one_nemo


def train(sync: str, step: str = "(i + 1) % every == 0") -> str:
    text = (
        "def train(model, batches, optimizer, every):\n    for i, batch in"
        " enumerate(batches):\n"
    )
    body = "".join(f"        {line}\n" for line in sync.splitlines())
    return f"{text}{body}        if {step}:\n            optimizer.step()\n"


CONTEXT = "with {}:\n    model(batch).backward()"
OFF = [
    CONTEXT.format("model.no_sync() if i % every != 0 else nullcontext()"),
    CONTEXT.format("nullcontext() if i % every == 0 else model.no_sync()"),
    (
        "context = model.no_sync if i % every else"
        f" nullcontext\n{CONTEXT.format('context()')}"
    ),
    (
        "if i % every != 0:\n    with model.no_sync():\n       "
        " model(batch).backward()\nelse:\n    step(batch)"
    ),
    "model.require_backward_grad_sync = i % every == 0\nmodel(batch).backward()",
    (
        "last = i % every =="
        " 0\nmodel.set_requires_gradient_sync(last)\nmodel(batch).backward()"
    ),
    CONTEXT.format("fabric.no_backward_sync(model, enabled=i % every != 0)"),
]


@pytest.mark.parametrize("sync", OFF)
def test_one_batch_off(tmp_path: Path, sync: str) -> None:
    (finding,) = found(tmp_path, "NP410", train(sync))
    assert "parameters part" in finding.what
    assert (
        found(tmp_path, "NP410", train(sync.replace("i % every", "(i + 1) % every")))
        == []
    )


def test_other_steps(tmp_path: Path) -> None:
    off, right = OFF[0], OFF[0].replace("i % every", "(i + 1) % every")
    assert (
        len(
            found(
                tmp_path,
                "NP410",
                train(off, "(i + 1) % every == 0 or i + 1 == len(batches)"),
            )
        )
        == 1
    )
    assert len(found(tmp_path, "NP410", train(right, "i % every == 0"))) == 1
    assert found(tmp_path, "NP410", train(off, "i % every == 0")) == []
    # Another counter.
    assert found(tmp_path, "NP410", train(off, "self.count % every == 0")) == []
    assert found(tmp_path, "NP410", train(off, "i % every == 0 and self.ready")) == []
