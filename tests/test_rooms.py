"""The rooms of the package: imports go one way, towards runtime/, which needs only torch and the stdlib."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nemo_patches.sync

PACKAGE = Path(__file__).parent.parent / "nemo_patches"
MAY_IMPORT = {
    "runtime": {"runtime"},
    "tracing": {"runtime", "tracing"},
    "patching": {"runtime", "tracing", "patching"},
    "tools": {"runtime", "tracing", "patching", "tools", ""},  # "" is the package itself, the public API
    "": {"runtime", "tracing", "patching", ""},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # The diffs vendor runtime/ under another name, so there, and only there, imports are relative.
            inside = room(path) == "runtime" and node.level == 1
            assert inside or node.level == 0, f"{path}: a relative import hides its room"
            module = "nemo_patches.sync" + (f".{node.module}" if node.module else "") if inside else node.module
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def room(path: Path) -> str:
    inner = path.relative_to(PACKAGE).parts
    if inner == ("__main__.py",):
        return "tools"  # the command, under another name
    return inner[0] if len(inner) > 1 else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_towards_the_runtime(path: Path) -> None:
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "nemo_patches":
            target = parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""
            assert target in MAY_IMPORT[room(path)], name
        elif room(path) == "runtime":
            assert parts[0] in {"torch", *sys.stdlib_module_names}, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_first_line_says_what_a_file_is_for(path: Path) -> None:
    documentation = ast.get_docstring(ast.parse(path.read_text()))
    assert documentation
    assert documentation.splitlines()[0].endswith((".", ":"))


def test_the_runtime_says_its_licence_and_where_it_comes_from() -> None:
    for path in (PACKAGE / "runtime").glob("*.py"):
        assert "\n# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0\n" in path.read_text(), path
    assert nemo_patches.sync.__version__ == nemo_patches.__version__


def test_the_runtime_imports_under_another_name_where_only_torch_is_there(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "runtime", tmp_path / "vendored")
    program = (
        "import sys\n"
        "missing = ('nemo_patches', 'nemo', 'wrapt', 'typer', 'rich', 'lightning')\n"
        "sys.modules.update(dict.fromkeys(missing))\n"
        "import vendored.encoder_methods, vendored.length_sync, vendored.private_growth\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=tmp_path)
