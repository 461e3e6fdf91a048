"""The packages of nemo_patches: imports go one way, towards channel/, without a circle."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import nemo_patches.sync
from nemo_patches.judging import kinds
from nemo_patches.patching import DISABLE_VARIABLE, TARGET_MODULES
from nemo_patches.patching.targets import TARGETS
from nemo_patches.sync import protocol, settings
from nemo_patches.watch import late_modules

pytestmark = pytest.mark.one_nemo
PACKAGE = Path(__file__).parent.parent / "nemo_patches"
MAY_IMPORT = {
    "text": set[str](),
    "limits": set[str](),
    "growth": set[str](),
    "facts": {"text", "channel"},
    "channel": {"text", "limits", "channel"},
    "sync": {"text", "growth", "channel", "sync"},
    "judging": {"text", "facts", "channel", "judging"},
    "watch": {"text", "limits", "facts", "channel", "sync", "watch", "judging"},
    "tracing": {"text", "channel", "sync", "watch", "judging", "tracing"},
    "options": {"text", "channel", "sync", "options"},
    "patching": {"text", "growth", "channel", "sync", "watch", "judging", "patching"},
    "vendoring": {"patching", "vendoring"},
    # "" is the package: its public API.
    "": {
        "text",
        "channel",
        "sync",
        "watch",
        "judging",
        "tracing",
        "options",
        "patching",
        "",
    },
}
# What a setting switches on, by the module that imports it: itself imported with the setting.
WITH_SETTING = {
    "patching/parts/trace.py": "tracing",
    "patching/parts/metrics.py": "options",
    "patching/parts/stop_together.py": "options",
}
# On by default: in a function, at its first use.
AT_FIRST_USE = {"patching/parts/checkpoints.py": "options"}
MAY_IMPORT["tools"] = {*MAY_IMPORT, "tools"}
TORCH_ONLY = (
    "growth",
    "channel",
    "sync",
    "watch",
)  # what a rank always imports needs torch and the standard library
LAYER = {
    "",
    "text",
    "limits",
    "facts",
    "growth",
    "channel",
    "sync",
    "watch",
    "patching",
}  # what a rank imports by default
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path) for path in FILES}
TRAINING_NEEDS = {"torch", "lightning", "pytorch_lightning", "wrapt"}


def package(path: Path) -> str:
    inner = path.relative_to(PACKAGE).parts
    if inner in (("cli.py",), ("__main__.py",)):
        return "tools"  # the commands' line
    if inner in (("growth.py",), ("text.py",), ("facts.py",), ("limits.py",)):
        return inner[0].removesuffix(".py")
    return inner[0] if len(inner) > 1 else ""


def home(path: Path) -> str:
    """The package from which a file's relative imports count."""
    return (
        module(path) if path.name == "__init__.py" else module(path).rpartition(".")[0]
    )


def imports(path: Path, at_once: bool = False) -> set[str]:
    """The full names that a file imports, wherever in it: in functions and for type checkers, too.

    at_once: only those that are imported with it.
    """
    names = set()
    tree = TREES[path]
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                home(path).split(".")[: -(node.level - 1) or None] if node.level else []
            )
            source = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{source}.{alias.name}" for alias in node.names}
    return names


def modules_of(name: str) -> str:
    """The module of ours that an imported name is, or is in; empty for others'."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imports_back(path: Path) -> list[str]:
    """The imports of a file that its package may not have."""
    loads = (AT_FIRST_USE | WITH_SETTING).get(name_of(path), "")
    may_import = MAY_IMPORT[package(path)] | {loads}
    found = []
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "nemo_patches":
            target = parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""
            is_allowed = target in may_import
        else:
            known = {"torch", *sys.stdlib_module_names}
            is_allowed = package(path) not in TORCH_ONLY or parts[0] in known
        if not is_allowed:
            found.append(name)
    return found


def test_imports_go_towards_the_channel() -> None:
    assert not {name_of(path): back for path in FILES if (back := imports_back(path))}


@pytest.mark.parametrize("file", WITH_SETTING)
def test_what_a_setting_switches_on_is_imported_by_no_file_at_once(file: str) -> None:
    name = module(PACKAGE / file)
    assert not [
        path
        for path in FILES
        if name in {modules_of(each) for each in imports(path, at_once=True)}
    ]


@pytest.mark.parametrize("file", AT_FIRST_USE)
def test_what_is_imported_at_first_use_is_imported_in_functions_alone(
    file: str,
) -> None:
    def packages(at_once: bool) -> set[str]:
        names = imports(PACKAGE / file, at_once)
        ours = [name.split(".") for name in names if name.startswith("nemo_patches.")]
        return {name[1] for name in ours}

    assert AT_FIRST_USE[file] in packages(at_once=False)
    assert AT_FIRST_USE[file] not in packages(at_once=True)


def test_there_is_a_module_for_each_setting_that_switches_something_on() -> None:
    pytest.importorskip("torch")
    from nemo_patches.patching import parts

    folder = PACKAGE / "patching" / "parts"
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert names == set(parts.PARTS)


def test_what_is_needed_at_a_stall_alone_is_imported_in_functions_alone() -> None:
    """By files that a rank always imports."""
    late = set(late_modules.NAMES)
    assert not {
        name_of(path): found
        for path in FILES
        if package(path) in LAYER
        and module(path) not in late
        and (found := late & set(map(modules_of, imports(path, at_once=True))))
    }


def test_a_watch_reads_all_of_judging() -> None:
    assert {name for name in MODULES if name.startswith("nemo_patches.judging")} <= set(
        late_modules.NAMES
    )
    assert set(late_modules.NAMES) <= MODULES


def test_judging_needs_the_standard_library_alone() -> None:
    """In a process of its own: what is imported with all of judging/."""
    modules = [
        name for name in sorted(MODULES) if name.startswith("nemo_patches.judging")
    ]
    script = (
        f"import sys, importlib; [importlib.import_module(name) for name in {modules}];"
        " print(*sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-S", "-c", script],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
    )
    assert not told.returncode, told.stderr
    found = set(told.stdout.split())
    assert not {
        name
        for name in found
        if name.partition(".")[0]
        not in {"__main__", "nemo_patches", *sys.stdlib_module_names}
    }
    shared = {
        "nemo_patches",
        "nemo_patches.text",
        "nemo_patches.facts",
        "nemo_patches.channel",
    }
    assert found & MODULES <= {*modules, *shared, "nemo_patches.channel.answers"}


def test_judging_has_the_words_of_the_sync() -> None:
    """It imports none of it."""
    assert kinds.APART == protocol.APART
    assert kinds.FLAG_IS_OFF == protocol.FLAG_IS_OFF
    assert kinds.IS_LOCAL == protocol.IS_LOCAL


def test_training_needs_wrapt_alone() -> None:
    """What the commands need is the extra `tools`."""
    known = {"nemo_patches", "nemo", "", *TRAINING_NEEDS, *sys.stdlib_module_names}
    assert not {
        name_of(path): others
        for path in FILES
        if package(path) != "tools"
        and (others := {name.split(".")[0] for name in imports(path)} - known)
    }


def test_there_is_no_import_circle() -> None:
    graph = {
        module(path): {modules_of(name) for name in imports(path)} - {"", module(path)}
        for path in FILES
    }
    # A package's __init__.py runs before its modules; none but the first, the public API, imports
    # anything of theirs.
    graphlib.TopologicalSorter(graph).prepare()


def test_a_name_is_of_one_class_or_module() -> None:
    """But what stands for another at run time: of two RunningTrainers a process loads one."""
    of_each_tool, of_each_setting = {"__init__", "command"}, PACKAGE / "patching/parts"
    names = [
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    names += [
        path.stem
        for path in FILES
        if path.stem not in of_each_tool and path.parent != of_each_setting
    ]
    twice = {name for name, count in Counter(names).items() if count > 1}
    assert twice == {"RunningTrainer"}


def draws(node: ast.AST) -> bool:
    """Whether it is `random.anything` but a generator of its own, or imports such a thing."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id == "random" and node.attr != "Random"
    return isinstance(node, ast.ImportFrom) and node.module in (
        "random",
        "numpy.random",
    )


def test_nothing_draws_from_the_generators_that_training_draws_from() -> None:
    assert not [
        f"{name_of(path)}: {ast.unparse(node)}"
        for path in FILES
        if package(path) != "tools"
        for node in ast.walk(TREES[path])
        if draws(node)
    ]


def test_no_annotation_is_read_from_text() -> None:
    """Like ruff's TID251 in pyproject.toml, which knows no keywords."""
    assert not [
        f"{name_of(path)}: {ast.unparse(node)}"
        for path in FILES
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.keyword) and node.arg == "eval_str"
    ]


def test_the_first_line_says_what_a_file_is_for() -> None:
    first = {
        path: (ast.get_docstring(TREES[path]) or "").split("\n")[0] for path in FILES
    }
    assert not [name_of(path) for path in FILES if not first[path].endswith((".", ":"))]


def test_the_sync_has_the_name_of_the_switch() -> None:
    """patching/__init__.py has it, too, and imports nothing: all Python processes import that."""
    assert settings.DISABLE_VARIABLE == DISABLE_VARIABLE


def test_there_is_one_version() -> None:
    assert nemo_patches.sync.__version__ == nemo_patches.__version__


@pytest.mark.wheel
def test_the_hook_watches_the_modules_of_the_targets() -> None:
    assert set(TARGET_MODULES) == {target.module for target in TARGETS}
