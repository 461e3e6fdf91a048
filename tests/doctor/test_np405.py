"""NP405: an early exit before collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import found

from nemo_patches.tools.doctor.finding import Severity

pytestmark = pytest.mark.one_nemo


def method(
    *lines: str, name: str = "training_step", base: str = "LightningModule"
) -> str:
    head = f"class Mine({base}):\n    def {name}(self, batch, rank):\n"
    return head + "".join(f"        {line}\n" for line in lines)


BACKWARD = "leaves out the backward pass (in which the gradients are reduced)"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["loss = self.net(batch)", "if torch.isnan(loss).any():", "    return", "return loss"], BACKWARD),
        (["if len(batch) == 0:", "    return None", "return self.net(batch)"], BACKWARD),
        (["if not batch:", "    return {'loss': None}", "return self.net(batch)"], BACKWARD),
        (["if batch.numel() < 1:", "    return torch.tensor(0.0, requires_grad=True)", "return batch.sum()"], BACKWARD),
        (["while batch.sum() > 0:", "    return None", "return batch.sum()"], BACKWARD),
        (["if rank != 0:", "    return None", "return batch.sum()"], BACKWARD),
        (["if batch.isnan().any():", "    count = 0", "    return None", "return batch.sum()"], "`return` in line 12"),
        (["if self.training:", "    if batch.isinf().any():", "        return", "return batch.sum()"], BACKWARD),
        (["if rank:", "    return", "dist.barrier()", "return None"], "leaves out dist.barrier: the other ranks wait"),
        (["for x in self.parts:", "    if x is None:", "        continue",
          "    if batch.sum() > 0:", "        continue", "    dist.barrier()"], "`continue` in line 14"),
        (["for x in self.parts:", "    dist.barrier()", "    if batch.sum() > 0:", "        break"],
         "`break` in line 13"),
    ],
)  # fmt: skip
def test_an_exit_that_some_ranks_take(
    tmp_path: Path, lines: list[str], said: str
) -> None:
    (finding,) = found(tmp_path, "NP405", method(*lines))
    assert finding.what.startswith("Mine.training_step: `")
    assert said in finding.what
    assert finding.severity is Severity.WARNING
    assert "A guess" not in finding.what


@pytest.mark.parametrize(
    "lines",
    [
        ["if self.skip:", "    return None", "return batch.sum()"],
        ["if self.global_step > 100:", "    return None", "return batch.sum()"],
        ["if lengths is None:", "    return None", "return batch.sum()"],
        ["if 'text' in batch:", "    return None", "return batch['audio'].sum()"],
        ["if len(batch) > 4:", "    return batch[4]", "return batch[0]"],  # so many tensors
        ["if batch.sum() > 0:", "    return batch.sum()", "return batch.mean()"],
        ["if batch.sum() > 0:", "    raise ValueError", "return batch.mean()"],  # this rank ends
        # And here, in backward
        ["if batch is None:", "    return torch.tensor([0.0])", "return batch.mean()"],
        ["if batch.sum() > 0:", "    dist.barrier()", "    return", "dist.barrier()"],
        ["bad = batch.isnan().any()", "dist.all_reduce(bad)", "if bad:", "    return None", "return batch.sum()"],
        ["if self.all_gather(batch.isnan().any()).any():", "    return None", "return batch.sum()"],
        ["if self.trainer.strategy.reduce_boolean_decision(batch.isnan().any()):", "    return", "return batch.sum()"],
        ["if dist.is_initialized():", "    return", "return batch.sum()"],
        ["if self.checks:", "    if batch.isnan().any():", "        raise ValueError", "    dist.barrier()",
         "return batch.sum()"],
    ],
)  # fmt: skip
def test_none_where_all_ranks_decide_alike(tmp_path: Path, lines: list[str]) -> None:
    assert found(tmp_path, "NP405", method(*lines)) == []


def test_each_cause_is_said(tmp_path: Path) -> None:
    """One who has mended the first would otherwise meet the second at the next hang."""
    text = method(
        "if len(batch) == 0:", "    return None", "try:", "    loss = self.net(batch)", "except RuntimeError:",
        "    return None", "if loss.isnan():", "    return None", "if rank == 0:", "    dist.barrier()",
        "for part in batch.split(8):", "    self.encoder(part)", "return loss",
    )  # fmt: skip
    assert len(found(tmp_path, "NP405", text)) == 2
    for rule in ("NP401", "NP406", "NP407"):
        assert len(found(tmp_path, rule, text)) == 1


def test_a_backward_of_ones_own(tmp_path: Path) -> None:
    manual = (
        "class Mine(LightningModule):\n    def __init__(self):\n       "
        " self.automatic_optimization = False\n"
    )
    step = method(
        "loss = self.net(batch)",
        "if loss.isnan():",
        "    return",
        "self.manual_backward(loss)",
    )
    (finding,) = found(tmp_path, "NP405", manual + step.partition("\n")[2])
    assert "self.manual_backward" in finding.what
    nothing = method("if batch.sum() > 0:", "    return None", "return batch.sum()")
    assert found(tmp_path, "NP405", manual + nothing.partition("\n")[2]) == []
    loop = (
        "def train(net, loader):\n    for batch in loader:\n        loss = net(batch)\n"
        "        if loss > 100:\n"
    )
    loop += "            continue\n        loss.backward()\n"
    assert found(tmp_path, "NP405", loop) == []  # on one rank
    (finding,) = found(
        tmp_path,
        "NP405",
        f"{loop}\nnet = torch.nn.parallel.DistributedDataParallel(net)\n",
    )
    assert "`continue` in line 12, by" in finding.what


def test_at_the_end_of_an_evaluation_it_is_a_note(tmp_path: Path) -> None:
    """Only a rank without any batch leaves there."""
    text = method(
        "if not batch:", "    return", "dist.barrier()", name="on_validation_epoch_end"
    )
    (finding,) = found(tmp_path, "NP405", text)
    assert finding.severity is Severity.NOTE


@pytest.mark.parametrize(
    ("test", "guess"),
    [
        ("batch is None", "wait in it"),
        (
            "random.random() < 0.1",
            "A guess: the ranks draw other random numbers, as they do without a seed",
        ),
        ("self.empty(batch)", "wait in it"),
        ("self.looks_odd(batch)", "wait in it"),
        ("batch != batch", "wait in it"),
        ("time.time() > self.end", "wait in it"),
    ],
)
def test_what_ranks_may_differ_in(tmp_path: Path, test: str, guess: str) -> None:
    text = method(f"if {test}:", "    return None", "return batch.sum()")
    helper = (
        "\n    def looks_odd(self, batch):\n        return batch.max() > self.most\n"
    )
    (finding,) = found(tmp_path, "NP405", text + helper)
    assert finding.what.endswith(guess)
    assert (finding.severity is Severity.NOTE) is guess.startswith("A guess")
    assert (
        found(
            tmp_path,
            "NP405",
            text.replace(test, "self.looks_odd(self.config)") + helper,
        )
        == []
    )


def test_whether_there_is_a_batch_is_a_guess_elsewhere(tmp_path: Path) -> None:
    text = method(
        "if batch is None:",
        "    return 0",
        "return self.encoder(batch)",
        name="compute_loss",
    )
    (finding,) = found(tmp_path, "NP405", text)
    assert "A guess: " in finding.what
    assert finding.severity is Severity.NOTE


def test_a_loss_that_is_set_to_none(tmp_path: Path) -> None:
    text = method(
        "loss = self.net(batch)",
        "if torch.isnan(loss):",
        "    loss = None",
        "return loss",
    )
    (finding,) = found(tmp_path, "NP405", text)
    assert "by `torch.isnan(loss)`" in finding.what
    assert (
        found(tmp_path, "NP405", text.replace("loss = None", "loss = batch.sum()"))
        == []
    )


def test_files_may_differ_between_hosts(tmp_path: Path) -> None:
    text = (
        "def load(path):\n    if not path.exists():\n        return None\n   "
        " dist.barrier()\n"
    )
    (finding,) = found(tmp_path, "NP405", text)
    assert "by `not path.exists()`" in finding.what
    assert "A guess: " in finding.what
    assert finding.severity is Severity.NOTE
