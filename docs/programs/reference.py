"""Write what docs/reference.md and docs/doctor-rules.md take from the code: settings, the Python
API and the doctor's rules. `make reference` runs it.

A block begins with a comment that names it, and ends with `<!-- end -->`; what stands between is
replaced. Neither torch nor NeMo is imported, so that the test which compares is fast: classes and
functions are read from their source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nemo_patches
from nemo_patches.sync.settings import ALL_SETTINGS
from nemo_patches.tools.doctor.rules import all_rules

DOCS = Path(__file__).parents[1]
PACKAGE = Path(nemo_patches.__file__).parent
FUNCTIONS = ("apply", "revert", "status")
# What status() gives, and what is imported from elsewhere than the package itself.
ALSO = {
    "status().stalls": ("nemo_patches.judging.missing_rank", "Stall"),
    "status().encoders": ("nemo_patches.sync.length_sync", "EncoderCounters"),
    "lightning.StopTogether": ("nemo_patches.options.stop_together", "StopTogether"),
}


def settings() -> Iterator[str]:
    yield "| keyword | variable | values | default | what |"
    yield "|---|---|---|---|---|"
    for setting in ALL_SETTINGS:
        default = setting.text(setting.default) + setting.unit
        cells = (
            f"`{setting.name}`",
            f"`{setting.variable}`",
            setting.allowed,
            default,
            setting.help,
        )
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def api() -> Iterator[str]:
    names = {name: ("nemo_patches", name) for name in FUNCTIONS}
    names |= {
        name: (nemo_patches._MODULE_OF[name], name)
        for name in nemo_patches.__all__
        if name not in FUNCTIONS
    }
    yield "| name | what |"
    yield "|---|---|"
    for name, (module, in_module) in (names | ALSO).items():
        node = _definition(module, in_module)
        yield f"| `{_called(name, node)}` | {_described(node)} |"


def rules() -> Iterator[str]:
    yield "| rule | at worst | finds |"
    yield "|---|---|---|"
    for rule in all_rules():
        yield f"| {rule.identifier} | {rule.worst} | {rule.finds} |"


def _definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    path = PACKAGE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"{module} has no {name}")


def _called(name: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """A function with its arguments, of which settings are many."""
    if isinstance(node, ast.ClassDef):
        return name
    arguments = [argument.arg for argument in node.args.args]
    return f"{name}({', '.join(arguments) if len(arguments) < 3 else '...'})"


def _described(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The docstring's first paragraph, and the names of a class's fields."""
    what = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
    fields = [
        f"`{line.target.id}`"
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return f"{what} Fields: {', '.join(fields)}" if fields else what


PAGES = {
    DOCS / "reference.md": (settings, api),
    DOCS / "doctor-rules.md": (rules,),
}


def written(page: Path) -> str:
    """The page's text with its blocks made anew."""
    text = page.read_text(encoding="utf-8")
    for block in PAGES[page]:
        pattern = re.compile(
            rf"(<!-- {block.__name__}: .*? -->\n).*?(<!-- end -->)", re.DOTALL
        )
        made = "\n".join(block()).strip()
        text, count = pattern.subn(
            lambda match, made=made: f"{match[1]}\n{made}\n\n{match[2]}", text
        )
        if count != 1:
            raise LookupError(
                f"{page}: {count} blocks that begin with <!-- {block.__name__}: ... -->"
            )
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
