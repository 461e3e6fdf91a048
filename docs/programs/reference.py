"""Write what docs/reference.md and docs/doctor-rules.md take from the code: settings, the Python API
and the doctor's rules. `make reference` runs it.

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
# What the public classes give, and what is imported from elsewhere than the package itself.
ALSO = {
    "Stall": "nemo_patches.judging.missing_rank",
    "EncoderCounters": "nemo_patches.sync.length_sync",
    "lightning.StopTogether": "nemo_patches.options.stop_together",
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
    names = dict.fromkeys(FUNCTIONS, "nemo_patches")
    names |= {
        name: nemo_patches._MODULE_OF[name]
        for name in nemo_patches.__all__
        if name not in FUNCTIONS
    }
    for name, module in (names | ALSO).items():
        yield from (
            "",
            f"### nemo_patches.{name}"
            if name not in ALSO or "." in name
            else f"### {name}",
            "",
            "```text",
        )
        yield from _described(*_definition(module, name.rpartition(".")[2]))
        yield "```"


def rules() -> Iterator[str]:
    yield "| rule | at worst | finds |"
    yield "|---|---|---|"
    for rule in all_rules():
        yield f"| {rule.identifier} | {rule.worst} | {rule.finds} |"


def _definition(
    module: str, name: str
) -> tuple[ast.FunctionDef | ast.ClassDef, list[str]]:
    """And the lines of the file that it stands in."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    text = (
        path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    ).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node, text.splitlines()
    raise LookupError(f"{module} has no {name}")


def _described(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """The signature, the docstring, and a class's fields with their comments."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        yield f"class {node.name}({bases})" if bases else f"class {node.name}"
    else:
        arguments = [
            f"{argument.arg}: {_annotation(argument.annotation)}"
            for argument in node.args.args
        ]
        defaults = [f" = {ast.unparse(default)}" for default in node.args.defaults]
        given = [
            a + b
            for a, b in zip(
                arguments,
                [""] * (len(arguments) - len(defaults)) + defaults,
                strict=True,
            )
        ]
        inside = (
            "".join(f"\n    {one}," for one in given) + "\n"
            if len(given) > 2
            else ", ".join(given)
        )
        yield f"{node.name}({inside}) -> {_annotation(node.returns)}"
    yield from ("", _without_settings(ast.get_docstring(node) or ""))
    fields = [
        lines[line.lineno - 1].strip()
        for line in node.body
        if isinstance(line, ast.AnnAssign)
    ]
    yield from ("", *fields) if fields else ()


def _without_settings(docstring: str) -> str:
    """Without the paragraph that the table of settings repeats."""
    first = ALL_SETTINGS[0].name
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(
        "Each keyword is a setting: see the table above."
        if paragraph.startswith(f"{first}: ")
        else paragraph
        for paragraph in paragraphs
    )


def _annotation(node: ast.expr | None) -> str:
    """Without the quotes of those that are evaluated late."""
    return (
        str(node.value)
        if isinstance(node, ast.Constant)
        else ast.unparse(node)
        if node
        else "None"
    )


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
