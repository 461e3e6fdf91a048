"""NP406: an error that one rank goes on after."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import found

pytestmark = pytest.mark.one_nemo

HEAD = "class Mine(LightningModule):\n    def training_step(self, batch, batch_nb):\n"


def step(*lines: str) -> str:
    return HEAD + "".join(f"        {line}\n" for line in lines)


@pytest.mark.parametrize(
    "error",
    [
        *(
            "torch.cuda.OutOfMemoryError",
            "torch.OutOfMemoryError",
            "RuntimeError",
            "Exception",
            "(RuntimeError, KeyError)",
        ),
        "batches.TooLong",
    ],
)
def test_a_step_that_is_skipped(tmp_path: Path, error: str) -> None:
    text = step(
        "try:", "    return self.net(batch)", f"except {error}:", "    return None"
    )
    (finding,) = found(tmp_path, "NP406", text)
    assert finding.what.startswith(f"Mine.training_step: after {error}")
    assert "(the backward pass" in finding.what
    assert finding.line == 12


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["try:", "    out = self.encoder(batch)", "except RuntimeError:", "    out = self.encoder(batch[:1])",
          "return out"], "(self.encoder)"),  # tried again
        (["try:", "    x = self.load(batch)", "    dist.all_reduce(x)", "except RuntimeError:", "    x = None",
          "return batch.sum()"], "(dist.all_reduce)"),
        (["for x in self.parts:", "    try:", "        y = self.net(x)", "    except RuntimeError:", "        continue",
          "    dist.barrier()"], "(dist.barrier)"),
        (["loss = None", "with contextlib.suppress(RuntimeError):", "    loss = self.net(batch)", "return loss"],
         "(the backward pass"),
        (["try:", "    y = self.net(batch)", "except RuntimeError as error:", "    if 'memory' not in str(error):",
          "        raise", "    y = None", "return y"], "(the backward pass"),
        (["try:", "    y = self.net(batch)", "except RuntimeError as error:", "    if 'memory' in str(error):",
          "        return None", "    raise", "return y"], "(the backward pass"),
    ],
)  # fmt: skip
def test_other_collectives_on_this_rank(
    tmp_path: Path, lines: list[str], said: str
) -> None:
    (finding,) = found(tmp_path, "NP406", step(*lines))
    assert said in finding.what


@pytest.mark.parametrize(
    "lines",
    [
        ["try:", "    return self.net(batch)", "except RuntimeError:", "    print(batch)", "    raise"],
        [
            "try:",
            "    return self.net(batch)",
            "except RuntimeError as error:",
            "    if 'memory' in str(error):",
            "        print(batch)",
            "    raise",
        ],
        ["if self.training:", "    try:", "        x = self.net(batch)", "        dist.barrier()",
         "    except Exception:", "        print(batch)", "        raise", "return batch.sum()"],
        ["try:", "    try:", "        x = self.net(batch)", "        dist.barrier()",
         "    except Exception:", "        raise", "except KeyError:", "    pass", "return batch.sum()"],
        ["try:", "    import fused", "except ImportError:", "    return batch.mean()", "return batch.sum()"],
        # All lack it
        ["try:", "    key = batch['key']", "except KeyError:", "    return None", "return batch.sum()"],
        ["try:", "    loss = self.net(batch)", "except RuntimeError:", "    loss = self.zero(batch)", "return loss"],
        ["try:", "    dist.barrier()", "except RuntimeError:", "    print('the group is gone')", "return batch.sum()"],
        ["try:", "    self.show(batch)", "except Exception:", "    pass", "dist.barrier()", "return batch.sum()"],
        ["try:", "    x = self.net(batch)", "finally:", "    dist.barrier()", "return x"],
    ],
)  # fmt: skip
def test_none_where_the_rank_ends_or_goes_the_same_way(
    tmp_path: Path, lines: list[str]
) -> None:
    assert found(tmp_path, "NP406", step(*lines)) == []
