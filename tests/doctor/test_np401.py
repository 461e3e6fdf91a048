"""NP401: collectives and encoder calls in a branch that not every rank may take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from codes import found

from nemo_patches.tools.doctor import code, examination
from nemo_patches.tools.doctor.finding import Severity
from nemo_patches.tools.doctor.refused import DoctorError

pytestmark = pytest.mark.one_nemo


def forward(*lines: str) -> str:
    return (
        "class Mine(torch.nn.Module):\n    def forward(self, x=None, rank=0):\n"
        + "".join(f"        {line}\n" for line in lines)
    )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["if x.sum() > 0:", "    dist.all_reduce(x)"],
            "dist.all_reduce depends on `x.sum() > 0`",
        ),
        (
            ["y = x.mean()", "while y > 1:", "    torch.distributed.barrier()"],
            "torch.distributed.barrier depends on `y > 1`",
        ),
        (
            ["if len(x):", "    return self.encoder(x)"],
            "self.encoder is called only if `len(x)`",
        ),
        (
            ["return self.encoder(x) if x.any() else x"],
            "self.encoder is called only if `x.any()`",
        ),
        (
            ["if dist.get_rank() == 0:", "    dist.barrier()"],
            "dist.barrier is made only where a test on",
        ),
        (
            ["if self.global_rank:", "    pass", "else:", "    dist.broadcast(x, 0)"],
            "dist.broadcast is made only where",
        ),
    ],
)
def test_what_not_every_rank_may_reach(
    tmp_path: Path, lines: list[str], said: str
) -> None:
    (finding,) = found(tmp_path, "NP401", forward(*lines))
    assert finding.what.startswith(f"Mine.forward: {said}")
    assert finding.line


@pytest.mark.parametrize(
    "lines",
    [
        ["dist.all_reduce(x)", "return self.encoder(x)"],
        ["if dist.is_available() and dist.is_initialized():", "    dist.all_reduce(x)"],
        [
            "dist = torch.distributed",
            "if dist.is_initialized():",
            "    dist.all_reduce(x)",
        ],
        ["if self.training:", "    dist.barrier()"],
        ["if x is not None:", "    x = self.encoder(x)"],
        ["if x.any():", "    x = x.gather(0, x)"],  # of a tensor
        [
            "if rank != 0:",
            "    dist.barrier()",
            "if rank == 0:",
            "    dist.barrier()",
        ],  # one rank first
        ["if rank < 2:", "    dist.all_reduce(x, group=self.group)"],
    ],
)
def test_none_for_what_all_ranks_share(tmp_path: Path, lines: list[str]) -> None:
    assert found(tmp_path, "NP401", forward(*lines)) == []


NAMES = [
    ("from torch import distributed as td", "td.barrier()"),
    ("from torch import distributed", "distributed.all_reduce(x)"),
    ("from torch.distributed import all_reduce as ar", "ar(x)"),
    ("from torch.distributed import broadcast as send", "send(x, 0)"),
    ("import torch.distributed.nn.functional as F", "F.all_reduce(x)"),
    ("import deepspeed.comm as comm", "comm.barrier()"),
    ("group = torch.distributed", "group.barrier()"),
    ("", "dist.new_group([0, 1])"),
    ("", "self.trainer.strategy.barrier('here')"),
    ("", "self.trainer.save_checkpoint('here')"),
    ("", "self.log('loss', x, sync_dist=True)"),
    ("", "pl_module.log_dict(x, sync_dist=self.several)"),
    ("", "sync(x)"),
]
TESTS = [
    *(
        "rank == 0",
        "rank < 2",
        "not rank",
        "self.trainer.is_global_zero",
        "dist.get_rank() == 0 and self.training",
    ),
    *(
        "main",
        "int(os.environ['RANK']) == 0",
        "rank % 8 == 0",
        "torch.distributed.get_rank() in (0,)",
        "rank == x",
    ),
]


@pytest.mark.parametrize(
    ("imports", "call", "test"),
    [
        *((*each, TESTS[0]) for each in NAMES),
        *((*NAMES[0], each) for each in TESTS[1:]),
    ],
)
def test_under_any_name_and_by_any_test(
    tmp_path: Path, imports: str, call: str, test: str
) -> None:
    helper = (
        "def sync(x):\n    deeper(x)\n\ndef deeper(x):\n   "
        " torch.distributed.all_reduce(x)\n\n"
    )
    method = f"        main = rank == 0\n        if {test}:\n            {call}\n"
    method = (
        "class Mine(LightningModule):\n    def on_train_start(self, x, rank,"
        f" pl_module):\n{method}"
    )
    (finding,) = found(tmp_path, "NP401", f"{imports}\nimport os\n{helper}{method}")
    assert finding.what.startswith(f"Mine.on_train_start: {call.partition('(')[0]}")


@pytest.mark.parametrize(
    "lines",
    [
        ["if rank == 0:", "    dist.barrier()", "else:", "    dist.barrier()"],
        ["if rank == 0:", "    self.a(x)", "else:", "    self.b(x)"],
        ["if rank is not None:", "    dist.barrier()"],
        ["if rank >= 0:", "    dist.barrier()"],
        ["if os.environ.get('RANK'):", "    dist.barrier()"],
        ["for rank in range(8):", "    if rank == 0:", "        dist.barrier()"],
        ["rank = torch.linalg.matrix_rank(x)", "if rank == 0:", "    dist.barrier()"],
        ["if rank == 0 and self.saves:", "    x.save()", "dist.barrier()"],
        ["if rank == 0:", "    self.log('loss', x)"],
        [
            "if rank == 0:",
            "    self.log('loss', x, sync_dist=True, rank_zero_only=True)",
        ],
        [
            "if x.sum() > 0:",
            "    y = self.encoder(x)",
            "else:",
            "    y = self.encoder(-x)",
        ],
        ["if rank == 0:", "    x = x.reduce(1).gather(0, x)"],
    ],
)
def test_none_where_both_ways_are_alike(tmp_path: Path, lines: list[str]) -> None:
    helpers = (
        "    def a(self, x):\n        dist.barrier()\n\n    def b(self, x):\n       "
        " torch.distributed.barrier()\n"
    )
    assert found(tmp_path, "NP401", f"import os\n{forward(*lines)}\n{helpers}") == []


def test_a_method_of_rank_zero_only(tmp_path: Path) -> None:
    text = (
        "from lightning.pytorch.utilities import rank_zero_only as main\n\nclass"
        " Mine(LightningModule):\n"
    )
    text += (
        "    @main\n    def on_fit_start(self):\n       "
        " self.write(self.trainer.log_dir)\n\n"
    )
    text += "    def prepare_data(self):\n        dist.barrier()\n"
    first, second = found(tmp_path, "NP401", text)
    said = (
        "self.trainer.log_dir (which broadcasts rank 0's folder) is made on one rank of"
        " the job or of a node only"
    )
    assert f"Mine.on_fit_start: {said}, by @main" in (first.what, second.what)
    assert any(each.what.startswith("Mine.prepare_data: ") for each in (first, second))


def test_a_name_from_the_batch(tmp_path: Path) -> None:
    step = (
        "class Mine(LightningModule):\n    def validation_step(self, batch, batch_idx,"
        " dataloader_idx):\n"
    )
    log = "        self.log(f'wer/{}', batch.sum(), sync_dist=True)\n"
    (finding,) = found(
        tmp_path, "NP401", step + log.replace("{}", "{batch.language[0]}")
    )
    assert "`batch.language[0]`" in finding.what
    for shared in ("{dataloader_idx}", "{self.prefix}"):
        assert found(tmp_path, "NP401", step + log.replace("{}", shared)) == []
    loop = "        for name, loss in self.losses(batch).items():\n    " + log.replace(
        "{}", "{name}"
    )
    assert found(tmp_path, "NP401", step + loop) == []


def test_another_order(tmp_path: Path) -> None:
    lines = [
        "if rank == 0:",
        "    dist.barrier()",
        "    dist.all_reduce(x)",
        "else:",
        "    dist.all_reduce(x)",
    ]
    (finding,) = found(tmp_path, "NP401", forward(*lines, "    dist.barrier()"))
    assert "in another order" in finding.what


def test_a_guess_is_called_one(tmp_path: Path) -> None:
    (finding,) = found(
        tmp_path, "NP401", forward("if rank == 0:", "    self.val_acc.compute()")
    )
    assert finding.severity is Severity.NOTE
    sure = "import torchmetrics\n" + forward(
        "if rank == 0:", "    self.val_acc.compute()"
    )
    sure += (
        "\n    def __init__(self):\n        self.val_acc = torchmetrics.Accuracy()\n"
    )
    (finding,) = found(tmp_path, "NP401", sure)
    assert finding.severity is Severity.WARNING


def test_the_same_collective_is_said_once(tmp_path: Path) -> None:
    lines = [
        "if rank == 0:",
        "    if x.sum() > 0:",
        "        dist.barrier()",
        "        dist.all_reduce(x)",
    ]
    (finding,) = found(tmp_path, "NP401", forward(*lines))
    assert "dist.all_reduce" in finding.what


def test_code_that_is_deeply_nested_is_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    for text in (
        "x = " + "+".join(["1"] * 3000),
        "x = " + "a." * 3000 + "b",
        "if x:\n    pass\n" + "elif x:\n    pass\n" * 2000,
    ):
        path.write_text(text)
        done = examination.examine_code(path, examination.chosen())
        assert not [
            finding for rule, finding in done.findings if rule.identifier == "NP001"
        ]
        assert "\n" not in done.error


def test_what_is_no_python_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    for content in (
        b"class:\n",
        b"\x00",
        b"\xff\xfe",
        b"x = " + b"(" * 5000,
        b"#" * (1 << 21),
        b"x=" + b"-" * 100_000 + b"1",
    ):
        path.write_bytes(content)
        with pytest.raises(DoctorError) as error:
            code.read(path)
        assert "\n" not in str(error.value)
        assert examination.examine_code(path, ()).exit_code == 2
    with pytest.raises(DoctorError, match="No such file"):
        code.read(tmp_path / "none.py")


def test_a_chain_of_returns_is_read_in_moments(tmp_path: Path) -> None:
    returns = (f"    if a{i}:\n        return b{i}\n" for i in range(12))
    text = f"def kind():\n{''.join(returns)}    return rest\n"
    test = "def step(x):\n    if kind() == 1:\n        dist.all_reduce(x)\n"
    begun = time.process_time()
    assert found(tmp_path, "NP401", text + test) == []
    assert time.process_time() - begun < 20


def test_a_method_of_what_a_call_gives_is_named_whole(tmp_path: Path) -> None:
    text = (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "def step(model, batch, scaler):\n"
        "    model = DDP(model)\n"
        "    loss = model(batch).mean()\n"
        "    if not loss.isnan():\n"
        "        scaler.scale(loss).backward()\n"
    )
    (finding,) = found(tmp_path, "NP401", text)
    assert "scaler.scale(loss).backward" in finding.what
