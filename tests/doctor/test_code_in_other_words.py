"""The rules on code beside the same code in other words, and beside code that is hostile."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from pathlib import Path

import changes
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_patches.tools.doctor import examination
from nemo_patches.tools.doctor.finding import Severity

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

RULES = examination.chosen(
    ["NP001", "NP401", "NP405", "NP406", "NP407", "NP411", "NP413"]
)


# A name is what tells that this object decides by this rank's loss: its class is of another file.
ONLY_BY_NAME = {("Renamed", "NP405 stopped by an object of another file")}


def snippets(name: str) -> list[tuple[str, str]]:
    _, *parts = Path(__file__).with_name(name).read_text().split("\n=== ")
    pairs = [
        (title, text) for title, _, text in (part.partition("\n") for part in parts)
    ]
    return [each for each in pairs if not each[0].startswith(("missed", "NP410"))]


def said(folder: Path, text: str) -> list[tuple[str, Severity]]:
    path = folder / "model.py"
    path.write_text(text)
    done = examination.examine_code(path, RULES)
    assert "\n" not in done.error
    found = [(rule.identifier, each.severity) for rule, each in done.findings]
    assert "NP001" not in [identifier for identifier, _ in found]
    return found


@pytest.mark.parametrize("change", changes.ALL, ids=lambda each: each.__name__)
@pytest.mark.parametrize("hangs", [True, False])
def test_a_change_that_keeps_what_code_does(
    tmp_path: Path, change: Callable[[], ast.NodeTransformer], hangs: bool
) -> None:
    wrong = []
    for title, text in snippets("classes_hang.txt" if hangs else "classes_fine.txt"):
        before = ast.unparse(ast.parse(text))
        after = ast.unparse(ast.fix_missing_locations(change().visit(ast.parse(text))))
        found = said(tmp_path, after) if after != before else []
        warned = any(severity > Severity.NOTE for _, severity in found)
        missed = hangs and not found and after != before
        if (missed and (change.__name__, title) not in ONLY_BY_NAME) or (
            warned and not hangs
        ):
            wrong.append(title)
    assert wrong == []


STATEMENTS = """
x = model(batch)
asked = rank == 0
y = x.isnan().any()
rank = dist.get_rank() % 4
names = paths[rank::dist.get_world_size()]
dist.barrier()
dist.all_reduce(x)
act = {"a": step, "b": print}[kind]
act(x)
step(x)
kind = "a" if y else "b"
self.value = rank
return x
raise ValueError(x)
""".strip().split("\n")
HEADS = """
if y:
if asked and kind == "a":
while x.sum() > rank:
for each in names:
with guard(x) as x:
try:
def step(x):
""".strip().split("\n")


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Twenty statements in each other, in a function."""
    lines = [
        "import torch.distributed as dist",
        "def step(batch, model, paths, kind, self):",
    ]
    depth = 1
    for _ in range(20):
        indent = "    " * depth
        if depth < 6 and draw(st.booleans()):
            head = draw(st.sampled_from(HEADS))
            lines += [indent + head, f"{indent}    {draw(st.sampled_from(STATEMENTS))}"]
            if head == "try:":
                lines += [f"{indent}except RuntimeError as y:", f"{indent}    pass"]
                continue
            depth += 1
        else:
            lines.append(indent + draw(st.sampled_from(STATEMENTS)))
            depth = draw(st.integers(1, depth))
    return "\n".join(lines)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(programs())
def test_no_program_takes_long_or_makes_a_rule_fail(tmp_path: Path, text: str) -> None:
    begun = time.process_time()
    said(tmp_path, text)
    assert time.process_time() - begun < 1  # it takes milliseconds


BARRIER = "import torch.distributed as dist\n"
HOSTILE = {
    "tests one after another": "def f(x):\n"
    + "".join(
        f"    if x{n}.isnan().any():\n        dist.barrier()\n" for n in range(2000)
    ),
    "returns": "def f(x):\n"
    + "".join(f"    if x{n}.any():\n        return\n" for n in range(250)),
    "a chain of calls": "x = a" + ".b()" * 400 + "\n",
    "helpers of helpers": "".join(
        f"def f{n}(x):\n"
        + "".join(f"    f{other}(x)\n" for other in range(max(0, n - 6), n))
        + "    dist.barrier()\n"
        for n in range(200)
    ),
    "numbers that grow": "r = dist.get_rank()\nx = 'a' * (r * 10**9)\ny = r + 3\n"
    + "y = y * y\n" * 40
    + "if y > 3 and x == '':\n    dist.barrier()\n",
    "a text without an end": "x = 'a' * 1000000000000\nif x:\n    dist.barrier()\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_takes_seconds(tmp_path: Path, name: str) -> None:
    begun = time.process_time()
    said(tmp_path, BARRIER + HOSTILE[name])
    assert time.process_time() - begun < 20  # 2 s on two cores, alone
