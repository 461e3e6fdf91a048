"""NP401: collectives and encoder calls in a branch that not every rank may take."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import found

from nemo_patches.tools.doctor import code, examination
from nemo_patches.tools.doctor.errors import DoctorError

pytestmark = pytest.mark.one_nemo


def forward(*lines: str) -> str:
    return "class Mine(torch.nn.Module):\n    def forward(self, x=None, rank=0):\n" + "".join(
        f"        {line}\n" for line in lines
    )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["if x.sum() > 0:", "    dist.all_reduce(x)"], "dist.all_reduce depends on `x.sum() > 0`"),
        (
            ["y = x.mean()", "while y > 1:", "    torch.distributed.barrier()"],
            "torch.distributed.barrier depends on `y > 1`",
        ),
        (["if len(x):", "    return self.encoder(x)"], "self.encoder is called only if `len(x)`"),
        (["return self.encoder(x) if x.any() else x"], "self.encoder is called only if `x.any()`"),
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
def test_what_not_every_rank_may_reach(tmp_path: Path, lines: list[str], said: str) -> None:
    (finding,) = found(tmp_path, "NP401", forward(*lines))
    assert finding.what.startswith(f"Mine.forward: {said}")
    assert finding.line


@pytest.mark.parametrize(
    "lines",
    [
        ["dist.all_reduce(x)", "return self.encoder(x)"],
        ["if dist.is_available() and dist.is_initialized():", "    dist.all_reduce(x)"],
        ["dist = torch.distributed", "if dist.is_initialized():", "    dist.all_reduce(x)"],
        ["if self.training:", "    dist.barrier()"],
        ["if x is not None:", "    x = self.encoder(x)"],
        ["if x.any():", "    x = x.gather(0, x)"],  # of a tensor
        ["if rank != 0:", "    dist.barrier()", "if rank == 0:", "    dist.barrier()"],  # one rank first
        ["if rank < 2:", "    dist.all_reduce(x, group=self.group)"],
    ],
)
def test_none_for_what_all_ranks_share(tmp_path: Path, lines: list[str]) -> None:
    assert found(tmp_path, "NP401", forward(*lines)) == []


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
