"""How much of nemo_patches a rank can run by default: no command, no option, no trace, and how many
tokens of code, those included that it executes when there is something to judge.

Tokens, not lines: a limit on lines once packed the code.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
import tokenize
from pathlib import Path

import encoders
import pytest
import torch
from ranks import CONNECTING_S, run_ranks

import nemo_patches
from nemo_patches.watch import late_modules

pytestmark = pytest.mark.one_nemo
PACKAGE = Path(nemo_patches.__file__).parent
NOT_BY_DEFAULT = (
    "nemo_patches.tools",
    "nemo_patches.options",
    "nemo_patches.tracing",
    "nemo_patches.vendoring",
    "nemo_patches.patching.process_status",  # for status()
    "nemo_patches.patching.parts.trace",  # with its setting
    "nemo_patches.patching.parts.metrics",  # the same
    "nemo_patches.patching.parts.stop_together",  # the same
    "nemo_patches.patching.released_source",  # for a NeMo that is newer than the tested ones
)
NOT_IN_A_RANK = {"ast", "dis"}  # no code is read there
# All that a rank can run; the aim is 46,000. It may not grow from here: it did by watch/frames.py,
# without which Python 3.11 ends ranks.
MOST_TOKENS = 66_700
STEPS = 20
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def train(rank: int, size: int) -> dict[str, str]:
    """Twenty steps on real NeMo, everything by default: the modules of ours that are there then,
    and their files.
    """
    # Long, else the first call may be late on a busy machine, and be looked into.
    nemo_patches.apply(timeout=CONNECTING_S)
    encoder = encoders.conformer()
    model = torch.nn.parallel.DistributedDataParallel(encoder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        encoders.run(model, 80 + 40 * step, seed=rank).pow(2).mean().backward()
        optimizer.step()
    found = dict(sys.modules)
    return {
        name: str(module.__file__)
        for name, module in found.items()
        if name.partition(".")[0] == "nemo_patches"
    }


def code_tokens(path: Path) -> int:
    """Without comments, docstrings and layout."""
    source = path.read_text()
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            documentation.update(
                range(first.lineno, (first.end_lineno or first.lineno) + 1)
            )
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in NO_CODE and token.start[0] not in documentation
        for token in tokens
    )


def imported_by(path: Path) -> set[str]:
    """The packages that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def file_of(name: str) -> Path:
    """Of a module of ours, which is not imported for that."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def test_a_rank_imports_the_layer_and_no_more() -> None:
    modules: dict[str, str] = {}
    for result in run_ranks(train, 2):
        modules |= result.value
    assert not [name for name in modules if name.startswith(NOT_BY_DEFAULT)]
    # Until there is something to judge.
    assert not set(late_modules.NAMES).intersection(modules)
    files = sorted({Path(file) for file in modules.values()})
    assert not {
        str(path): names
        for path in files
        if (names := imported_by(path) & NOT_IN_A_RANK)
    }
    at_a_stall = [file_of(name) for name in late_modules.NAMES]
    tokens = {path: code_tokens(path) for path in (*files, *at_a_stall)}
    total = sum(tokens.values())
    imported = sum(tokens[path] for path in files)
    print(
        f"{total:,} tokens of code: {imported:,} in {len(files)} imported modules,"
        f" {total - imported:,} in {len(at_a_stall)} that are executed at a stall"
    )
    largest = sorted(tokens.items(), key=lambda item: -item[1])
    assert total <= MOST_TOKENS, "\n".join(
        f"{count:7,} {path.relative_to(PACKAGE)}" for path, count in largest
    )
