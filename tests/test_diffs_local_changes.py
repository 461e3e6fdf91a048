"""NeMo checkouts with local changes near the length sync: a correct edit, or a refusal that names
the place.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import subprocess
import tempfile
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_patches.patching.targets import TARGETS, Target
from nemo_patches.vendoring import checkouts, git
from nemo_patches.vendoring.errors import DiffError

SPEC = importlib.util.find_spec("nemo")  # finds the files, imports nothing
SITE = Path(next(iter((SPEC and SPEC.submodule_search_locations) or ["."]))).parent
PACKAGE_INFO = 'MAJOR = 3\nMINOR = 0\nPATCH = 0\nPRE_RELEASE = ""\n'

IMPORT = (
    b"from nemo.collections.asr.parts.utils.bounded_length_sync import"
    b" max_length_in_time"
)
BOUNDED = re.compile(
    rb"seq_length = max_length_in_time\(self, seq_length(,"
    rb" self\.sync_max_audio_length)?\)"
)
REGISTERED = re.compile(
    rb"[^\r\n]*if hasattr\(self, 'seq_range'\):.*?persistent=False\)[^\r\n]*", re.DOTALL
)
PLAIN = re.compile(
    rb"[^\r\n]*# Not a buffer: [^\r\n]*[\r\n]+[ \t\f]*self.seq_range = seq_range"
)
MASK, MASK_ON = (
    b"self.seq_range[:max_audio_length].expand(",
    b"self.seq_range[:max_audio_length].to(seq_lens.device).expand(",
)


def path_of(target: Target) -> str:
    return target.module.replace(".", "/") + ".py"


PRESENT = {
    target.owner: target for target in TARGETS if (SITE / path_of(target)).is_file()
}
# An older NeMo is for what newer ones do not have: the others are edited alike, and the time of
# `make test` counts.
if (
    GONE := {"SqueezeformerEncoder", "PunctuationCapitalizationLexicalAudioModel"}
    & PRESENT.keys()
):
    PRESENT = {owner: PRESENT[owner] for owner in sorted(GONE)}
REAL = {
    owner: (SITE / path_of(target)).read_text(encoding="utf-8")
    for owner, target in PRESENT.items()
}


def shortened(text: str, target: Target) -> str:
    """The file to the end of the class, which keeps its docstring, two methods, and those of the
    sync: as it is, but fast to parse a few hundred times."""
    lines = text.splitlines(keepends=True)
    owner = next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == target.owner
    )
    functions = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
    plain = [
        node
        for node in functions
        if node.name not in ("__init__", target.method, target.setter)
    ]
    kept = {node.name for node in plain[:2]} | {
        target.method,
        target.setter,
        "make_pad_mask",
    }
    gone: set[int] = set()
    for node in functions:
        if node.name not in kept:
            first = min(
                [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
            )
            gone.update(range(first, int(node.end_lineno or 0) + 1))
    return "".join(
        line for at, line in enumerate(lines[: owner.end_lineno], 1) if at not in gone
    )


SHORT = {owner: shortened(text, PRESENT[owner]) for owner, text in REAL.items()}


def classes(path: str, *names: str) -> str:
    """These classes of an installed file alone."""
    text = (SITE / path).read_text(encoding="utf-8")
    nodes = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name in names
    ]
    return (
        "\n\n".join(ast.get_source_segment(text, node) or "" for node in nodes) + "\n"
    )


# What the encoders read: their tables are in other files.
ATTENTION = "nemo/collections/asr/parts/submodules/multi_head_attention.py"
JASPER = "nemo/collections/asr/parts/submodules/jasper.py"
ENCODINGS = (
    "PositionalEncoding",
    "RelPositionalEncoding",
    "LocalAttRelPositionalEncoding",
)
TABLES = (
    {
        ATTENTION: classes(ATTENTION, *ENCODINGS),
        JASPER: classes(JASPER, "SqueezeExcite"),
    }
    if PRESENT
    else {}
)


# The changes. In their texts <owner>, <method> and <setter> are the target's, <if> is its reduce's
# condition.

Change = Callable[[str, Target], "str | bytes"]


def block(text: str, target: Target) -> tuple[int, int]:
    """Where the reduce is: from the beginning of its first line to the end of its last."""
    last = text.index(
        "seq_length = global_max_len.int().item()\n",
        text.index(f"    def {target.method}("),
    )
    first = text.rindex("        if ", 0, last)
    return text.rindex("\n", 0, first + 1) + 1, text.index("\n", last) + 1


def filled(part: str, text: str, target: Target) -> str:
    found = re.search(
        r"\n        if ((?:self\.sync_max_audio_length and"
        r" )?torch\.distributed\.is_init.*\(\)):\n",
        text,
    )
    words = {
        "owner": target.owner,
        "method": target.method,
        "setter": target.setter,
        "if": found[1] if found else "?",
    }
    for word, meaning in words.items():
        part = part.replace(f"<{word}>", meaning)
    return part


def swap(*pairs: str) -> Change:
    """Replaces text, the first one from the method on; where there is none, the first one in the
    file.
    """

    def change(text: str, target: Target) -> str:
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            old, new = filled(old, text, target), filled(new, text, target)
            place = text.find(old, max(text.find(f"    def {target.method}("), 0))
            place = text.index(old) if place < 0 else place
            text = text[:place] + new + text[place + len(old) :]
        return text

    return change


def every(old: str, new: str) -> Change:
    return lambda text, target: re.sub(old, new, text, flags=re.MULTILINE)


def reduce_as(new: str | Callable[[str], str]) -> Change:
    """Puts other text for the whole reduce: as it would stand in a module, `<reduce>` for itself."""

    def change(text: str, target: Target) -> str:
        first, last = block(text, target)
        old = textwrap.dedent(text[first:last])
        other = (
            new(old)
            if callable(new)
            else filled(new, text, target).replace("<reduce>", old.rstrip("\n"))
        )
        return (
            text[:first]
            + textwrap.indent(other.rstrip("\n") + "\n", " " * 8)
            + text[last:]
        )

    return change


def at_start(new: str) -> Change:
    return lambda text, target: filled(new, text, target) + text


def at_end(new: str) -> Change:
    return lambda text, target: text.rstrip("\n") + "\n" + filled(new, text, target)


def as_bytes(encoding: str = "utf-8", end: str = "\n", prefix: str = "") -> Change:
    return lambda text, target: (prefix + text).replace("\n", end).encode(encoding)


def both(*changes: Change) -> Change:
    def change(text: str, target: Target) -> str | bytes:
        result: str | bytes = text
        for one in changes:
            assert isinstance(result, str)
            result = one(result, target)
        return result

    return change


def class_as(new: Callable[[str], str]) -> Change:
    """Other text for the class, with its decorators."""

    def change(text: str, target: Target) -> str:
        classes = [
            node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)
        ]
        owner = next(node for node in classes if node.name == target.owner)
        lines = text.splitlines(keepends=True)
        first = (
            min(
                [
                    owner.lineno,
                    *(decorator.lineno for decorator in owner.decorator_list),
                ]
            )
            - 1
        )
        inner = "".join(lines[first : owner.end_lineno])
        return (
            "".join(lines[:first])
            + filled(new(inner), text, target)
            + "".join(lines[owner.end_lineno :])
        )

    return change


def method_as(new: Callable[[str], str], name: str = "<method>") -> Change:
    """Other text for the method, or the setter."""

    def change(text: str, target: Target) -> str:
        lines = text.splitlines(keepends=True)
        first = next(
            at
            for at, line in enumerate(lines)
            if line.startswith(f"    def {filled(name, text, target)}(")
        )
        last = next(
            (
                at
                for at in range(first + 1, len(lines))
                if re.match(r" {0,4}\S", lines[at])
            ),
            len(lines),
        )
        inner = "".join(lines[first:last]).rstrip("\n") + "\n"
        return (
            "".join(lines[:first])
            + filled(new(inner), text, target)
            + "\n"
            + "".join(lines[last:])
        )

    return change


def imports_as(new: Callable[[str], str]) -> Change:
    """Other text for all of NeMo's own imports."""

    def change(text: str, target: Target) -> str:
        nodes = [
            node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)
        ]
        own = [node for node in nodes if str(node.module).startswith("nemo.")]
        lines = text.splitlines(keepends=True)
        first, last = own[0].lineno - 1, own[-1].end_lineno
        return (
            "".join(lines[:first])
            + new("".join(lines[first:last]))
            + "".join(lines[last:])
        )

    return change


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")


TENSOR = (
    "global_max_len = torch.tensor([seq_length], dtype=torch.float32, device=device)"
)
REDUCE = (
    "torch.distributed.all_reduce(global_max_len, op=torch.distributed.ReduceOp.MAX)"
)
BACK = "seq_length = global_max_len.int().item()"
GROW = "if seq_length > self.max_audio_length:"
ARGUMENTS = "(self, seq_length: int, device):"
CALL = "self.<setter>(seq_length)"
SET = "def <setter>(self, max_audio_length):"
INLINE = "self.max_audio_length = seq_length\n"

ANYWHERE: dict[str, Change] = {  # edited, on every target
    "nothing": lambda text, target: text,
    "CRLF": as_bytes(end="\r\n"),
    "CR": as_bytes(end="\r"),
    "CRLF but for the reduce": lambda text, target: (
        (
            parts := [
                text[: block(text, target)[0]],
                text[slice(*block(text, target))],
                text[block(text, target)[1] :],
            ]
        )
        and (
            parts[0].replace("\n", "\r\n") + parts[1] + parts[2].replace("\n", "\r\n")
        ).encode()
    ),
    "CRLF in the reduce alone": (
        lambda text, target: (
            text[: block(text, target)[0]]
            + text[slice(*block(text, target))].replace("\n", "\r\n")
            + text[block(text, target)[1] :]
        ).encode()
    ),
    "BOM": as_bytes("utf-8-sig"),
    "BOM and CRLF": as_bytes("utf-8-sig", "\r\n"),
    "BOM and a cookie": as_bytes("utf-8-sig", prefix="# coding: utf-8\n"),
    "coding cookie": as_bytes("cp1252", prefix="# -*- coding: cp1252 -*-\n# Grüße\n"),
    "coding cookie, two bytes a letter": as_bytes(
        "gb18030", prefix="#!/usr/bin/python\n# coding: gb18030\n# 长度\n"
    ),
    "letters outside ASCII": at_start("# 长度 é 🙂\n"),
    "letters outside ASCII in the reduce": swap(TENSOR, TENSOR + "  # 最大长度 🙂"),
    "no newline at the end": lambda text, target: text.rstrip("\n"),
    "form feed before the class": class_as(lambda inner: "\f\n" + inner),
    "form feed on the line of the class": class_as(lambda inner: "\f" + inner),
    "form feed before the method": method_as(lambda inner: "\f\n" + inner),
    "form feed in the reduce's indentation": swap(
        "        if <if>:", "    \f        if <if>:"
    ),
    "line separators inside strings": at_start("x = 'a\u2028b\x0b\x1c\x85'\n"),
    "tabs": every(r"^( {4})+", lambda found: "\t" * (len(found[0]) // 4)),  # type: ignore[arg-type]
    "indented by two": every(r"^( {4})+", lambda found: "  " * (len(found[0]) // 4)),  # type: ignore[arg-type]
    "method's body indented by eight more": method_as(
        lambda inner: (
            inner.split("\n", 1)[0]
            + "\n"
            + textwrap.indent(inner.split("\n", 1)[1], " " * 8)
        )
    ),
    "spaces at the ends of lines": every(r"(\S)$", r"\1  "),
    "comment on the condition": swap("if <if>:", "if <if>:  # all ranks"),
    "comments in the reduce": swap(
        TENSOR, "# one\n            " + TENSOR + "  # two", BACK, BACK + "  # three"
    ),
    "comment after the reduce, as deep": swap(
        BACK, BACK + "\n            # it is ours now"
    ),
    "comment after the reduce, not indented": swap(BACK, BACK + "\n# it is ours now"),
    "comments on the tables' lines": every(
        r"(device\)|persistent=False\)|unsqueeze\(-1\))$", r"\1  # Grüße"
    ),
    "comment between signature and body": swap(
        ARGUMENTS, ARGUMENTS + "\n        # a comment"
    ),
    "comment between decorator and class": class_as(
        lambda inner: "@typing.final\n# a comment\n\n" + inner
    ),
    "type: ignore": swap(
        REDUCE, REDUCE + "  # type: ignore", BACK, BACK + "  # noqa: E501"
    ),
    "blank lines in the reduce": swap(
        TENSOR,
        "\n\n            " + TENSOR + "\n\n\n",
        BACK,
        "\n            " + BACK + "\n\n",
    ),
    "no blank lines in the reduce": reduce_as(lambda old: re.sub(r"\n\n+", "\n", old)),
    "local renamed": reduce_as(lambda old: old.replace("global_max_len", "longest")),
    "local named as the length": reduce_as(
        lambda old: old.replace("global_max_len", "seq_length")
    ),
    "other spacing": swap(
        TENSOR,
        "global_max_len=torch . tensor( [seq_length,], dtype ="
        " torch.float32,device=device )",
    ),
    "calls over several lines": swap(
        REDUCE,
        "torch.distributed.all_reduce(\n    global_max_len,  # it\n "
        " op=torch.distributed.ReduceOp.MAX,\n)",
    ),
    "condition in parentheses, over several lines": swap(
        "if <if>:", "if (\n    <if>\n        ):"
    ),
    "statement in parentheses at the end": swap(
        BACK, "seq_length = (\n    global_max_len.int()\n    .item()\n)"
    ),
    "continued with backslashes": swap(
        TENSOR,
        TENSOR.replace(", ", ", \\\n"),
        BACK,
        "seq_length \\\n= global_max_len.int().item()",
    ),
    "condition continued with a backslash": swap("if <if>:", "if \\\n<if>:"),
    "backslash at the end of the reduce": swap(BACK + "\n", BACK + " \\\n\n"),
    "backslash before the reduce": swap("        if <if>:", "        \\\nif <if>:"),
    "backslash before the class": class_as(lambda inner: "\\\n" + inner),
    "backslash at the end of the docstring": method_as(
        lambda inner: re.sub(
            r'("""|:)(\n        (?:#.*\n        )?if )', r"\1 \\\n\2", inner, count=1
        )
    ),
    "on one line": reduce_as(f"if <if>: {TENSOR}; {REDUCE}; {BACK}\n"),
    "semicolons": swap(TENSOR, TENSOR + ";", BACK, BACK + ";"),
    "two statements on a line": reduce_as(
        f"if <if>:\n    {TENSOR}; {REDUCE}\n    {BACK};\n"
    ),
    "no docstring": method_as(
        lambda inner: re.sub(r'        """.*?"""\n', "", inner, flags=re.DOTALL)
    ),
    "docstring in one line": method_as(
        lambda inner: re.sub(
            r':\n(        """.*?"""\n)?',
            ":\n        'Text.'\n",
            inner,
            count=1,
            flags=re.DOTALL,
        )
    ),
    "return annotation": swap(ARGUMENTS, "(self, seq_length: int, device) -> None:"),
    "no annotation": swap(ARGUMENTS, "(self, seq_length, device):"),
    "signature over several lines": swap(
        ARGUMENTS,
        "(\n        self,\n        seq_length: int,  # in frames\n        device,\n "
        "   ):",
    ),
    "growth over several lines": swap(
        GROW, "if (\n    seq_length > self.max_audio_length  # longer\n        ):"
    ),
    "class decorator": class_as(lambda inner: "@typing.final\n" + inner),
    "class decorator over several lines": class_as(
        lambda inner: "@typing.no_type_check_decorator(\n    typing.final\n)\n" + inner
    ),
    "class decorated already by a name alike": class_as(
        lambda inner: "@length_sync('x')\n" + inner
    ),
    "another base and a metaclass": class_as(
        lambda inner: re.sub(
            r"^(class \w+\()(.*)\):$",
            r"\1Mine, \2, metaclass=Meta):",
            inner,
            flags=re.M,
        )
    ),
    "no docstring of the class": class_as(
        lambda inner: re.sub(
            r'\A((?:@.*\n)*class .*:\n)    """.*?"""\n', r"\1", inner, flags=re.S
        )
    ),
    "the reduce in the docstring of the class": class_as(
        lambda inner: re.sub(
            r"(\A(?:@.*\n)*class .*:\n)",
            r'\1    """if torch.distributed.is_initialized():\n           '
            rf' {REDUCE}"""\n    "other"\n',
            inner,
        )
    ),
    "the class in a string": imports_as(
        lambda inner: (
            inner
            + '\nTEXT = """\nclass <owner>(Base):\n    def <method>(self): ...\n"""\n'
        )
    ),
    "the import in a string": imports_as(
        lambda inner: f'TEXT = """\n{inner}"""\n' + inner
    ),
    "another method first": class_as(
        lambda inner: re.sub(
            r"^    def ",
            "    def first(self):\n        return 1\n\n    def ",
            inner,
            count=1,
            flags=re.M,
        )
    ),
    "another class with a reduce": at_end(
        "\n\nclass Other:\n    def <method>(self, seq_length):\n        if"
        " torch.distributed.is_initialized():\n           "
        " torch.distributed.all_reduce(seq_length)\n"
    ),
    "a subclass": at_end("\n\nclass Adapter(<owner>):\n    pass\n"),
    "a function with a local class of that name": at_end(
        "\n\ndef make():\n    class <owner>:\n        pass\n    return <owner>\n"
    ),
    "a method of that name inside another function": at_end(
        "\n\ndef make():\n    def <method>(self): ...\n    return <method>\n"
    ),
    "other text after the class": at_end(
        "\n\nif __name__ == '__main__':\n    print(<owner>)\n"
    ),
    "__future__ first": at_start("from __future__ import annotations\n\n"),
    "docstring and __future__ first": at_start(
        '"""The encoder."""\n\nfrom __future__ import annotations; import abc\n'
    ),
    "imports not sorted": imports_as(
        lambda inner: "from nemo.utils import logging\n" + inner
    ),
    "one import, before ours": imports_as(
        lambda inner: "from nemo.collections.asr.parts import *\n"
    ),
    "one import, after ours": imports_as(
        lambda inner: "from nemo.utils import logging\n"
    ),
    "import with a comment": imports_as(
        lambda inner: (
            "from nemo.collections import asr  # noqa\nfrom nemo.utils import logging\n"
        )
    ),
    "import in backslashes": imports_as(
        lambda inner: "from nemo.collections \\\n    import asr, \\\n    nlp\n"
    ),
    "import continued into the next statement": imports_as(
        lambda inner: "from nemo.collections import asr; \\\nx = 1\n"
    ),
    "some imports inside try": imports_as(
        lambda inner: (
            inner
            + "try:\n    from nemo.collections.asr import x\nexcept ImportError:\n    x"
            " = None\n"
        )
    ),
    "a NeMo import after the class too": at_end(
        "\nfrom nemo.collections.asr.models import x\n"
    ),
    "an import in the class": class_as(
        lambda inner: re.sub(
            r"^    def ",
            "    from nemo.collections.asr import x\n\n    def ",
            inner,
            count=1,
            flags=re.M,
        )
    ),
    "deep text elsewhere": at_start("x = " + "(" * 60 + "1" + ")" * 60 + "\n"),
}


def setter_first(text: str, target: Target) -> str:
    """The setter before the method, or after it, where it has been before."""
    moved: list[str] = []
    without = method_as(lambda inner: moved.append(inner) or "", "<setter>")(
        text, target
    )  # type: ignore[func-returns-value]
    assert isinstance(without, str)
    is_first = text.index(filled(SET, text, target)) < text.index(
        f"def {target.method}("
    )
    changed = method_as(
        lambda inner: inner + "\n" + moved[0] if is_first else moved[0] + "\n" + inner
    )(without, target)
    assert isinstance(changed, str)
    return changed


WITH_SETTER: dict[str, Change] = {  # edited, where another method grows the buffers
    "setter in another place": setter_first,
    "setter does more": swap(
        SET, SET + "\n        self.calls = getattr(self, 'calls', 0) + 1"
    ),
    "setter annotated": swap(SET, "def <setter>(self, max_audio_length: int) -> None:"),
    "growth on one line": swap(GROW + "\n            " + CALL, GROW + " " + CALL),
    "growth with a comment": swap(CALL, CALL + "  # once"),
}
INLINE_GROWTH: dict[
    str, Change
] = {  # edited, where the method itself grows the buffers
    "growth does more": swap(INLINE, INLINE + "            self.grown = True\n"),
    "growth without a step": swap("seq_length * 1.5", "seq_length * 2"),
    "growth returns early": swap(
        INLINE, INLINE + "            if seq_length < 10:\n                return\n"
    ),
    "reduce under a flag": swap("if <if>:", "if self.sync_max_audio_length and <if>:"),
}

# Refused: the change, and a text that the line named in the refusal has.
METHOD, OWNER, IF = "def <method>", "class <owner>", "if <if>"
REFUSED: dict[str, tuple[Change, str]] = {
    "extra argument": (
        swap(ARGUMENTS, "(self, seq_length: int, device, group=None):"),
        METHOD,
    ),
    "extra keyword argument": (
        swap(ARGUMENTS, "(self, seq_length: int, device, *, group=None):"),
        METHOD,
    ),
    "star arguments": (swap(ARGUMENTS, "(self, *args, **kwargs):"), METHOD),
    "positional only": (swap(ARGUMENTS, "(self, seq_length: int, device, /):"), METHOD),
    "default": (swap(ARGUMENTS, "(self, seq_length: int, device=None):"), METHOD),
    "arguments renamed": (swap(ARGUMENTS, "(self, length: int, device):"), METHOD),
    "arguments swapped": (swap(ARGUMENTS, "(self, device, seq_length: int):"), METHOD),
    "argument annotated otherwise": (
        swap(ARGUMENTS, "(self, seq_length: integer, device):"),
        METHOD,
    ),
    "async method": (swap("    def <method>(", "    async def <method>("), METHOD),
    "decorated method": (
        swap("    def <method>(", "    @torch.no_grad()\n    def <method>("),
        METHOD,
    ),
    "static method": (
        swap("    def <method>(", "    @staticmethod\n    def <method>("),
        METHOD,
    ),
    "method renamed": (swap("    def <method>(", "    def _<method>("), OWNER),
    "method missing": (method_as(lambda inner: ""), OWNER),
    "method twice": (method_as(lambda inner: inner + "\n" + inner), METHOD),
    "method twice, once inside if": (
        method_as(lambda inner: inner + "\n    if FAST:\n" + indented(inner)),
        METHOD,
    ),
    "method inside if": (
        method_as(lambda inner: "    if FAST:\n" + indented(inner)),
        METHOD,
    ),
    "method wrapped in the class": (
        method_as(
            lambda inner: inner + "\n    <method> = torch.jit.ignore(<method>)\n"
        ),
        "<method> = torch",
    ),
    "method deleted": (
        method_as(lambda inner: inner + "\n    del <method>\n"),
        "del <method>",
    ),
    "method imported into the class": (
        method_as(lambda inner: inner + "\n    from nemo.core import <method>\n"),
        "import <method>",
    ),
    "method replaced from outside": (
        at_end("\n<owner>.<method> = print\n"),
        "<owner>.<method> = print",
    ),
    "method replaced for one encoder": (
        at_end("\n\ndef quick(encoder):\n    encoder.<method> = print\n"),
        "encoder.<method> = print",
    ),
    "method is a class": (
        method_as(lambda inner: "    class <method>:\n        pass\n"),
        METHOD.replace("def", "class"),
    ),
    "statement before the reduce": (reduce_as("seq_length += 1\n<reduce>"), METHOD),
    "statement after the reduce": (
        reduce_as("<reduce>\nlogging.info(seq_length)"),
        METHOD,
    ),
    "local used after the reduce": (
        reduce_as("<reduce>\nprint(global_max_len)"),
        METHOD,
    ),
    "statement after the growth": (
        method_as(lambda inner: inner + "        return seq_length\n"),
        METHOD,
    ),
    "early return": (reduce_as("if self.frozen:\n    return\n<reduce>"), METHOD),
    "return instead of the growth": (reduce_as("return"), METHOD),
    "bytes for a docstring": (swap(ARGUMENTS, ARGUMENTS + "\n        b'text'"), METHOD),
    "statement in the reduce": (
        swap(BACK, BACK + "\n            logging.info(seq_length)"),
        IF,
    ),
    "statement first in the reduce": (
        swap(TENSOR, "logging.info('now')\n            " + TENSOR),
        "logging.info",
    ),
    "statement amid the reduce": (
        swap(REDUCE, "device = 'cpu'\n            " + REDUCE),
        "device = 'cpu'",
    ),
    "statement in the reduce after a semicolon": (
        swap(BACK, BACK + "; print(seq_length)"),
        IF,
    ),
    "else": (reduce_as("<reduce>\nelse:\n    logging.info('alone')"), IF),
    "elif": (reduce_as("<reduce>\nelif seq_length > 5000:\n    seq_length = 5000"), IF),
    "condition: more": (swap("if <if>:", "if <if> and self.training:"), IF),
    "condition: or": (swap("if <if>:", "if <if> or self.force:"), IF),
    "condition: not": (swap("if <if>:", "if not <if>:"), "if not"),
    "condition: true": (swap("if <if>:", "if True:"), "if True"),
    "condition: world size": (
        swap("if <if>:", "if torch.distributed.get_world_size() > 1:"),
        "get_world_size",
    ),
    "condition: another flag": (
        swap("if <if>:", "if self.sync and torch.distributed.is_initialized():"),
        "self.sync",
    ),
    "condition: the other order": (
        swap(
            "if <if>:",
            "if torch.distributed.is_initialized() and self.sync_max_audio_length:",
        ),
        "and self.sync",
    ),
    "condition: walrus": (
        swap("if <if>:", "if (on := torch.distributed.is_initialized()):"),
        "on :=",
    ),
    "condition inside a condition": (
        reduce_as(lambda old: "if self.training:\n" + indented(old)),
        "if self.training",
    ),
    "try and finally around": (
        reduce_as(lambda old: "try:\n" + indented(old) + "finally:\n    pass\n"),
        METHOD,
    ),
    "try and except around": (
        reduce_as(
            lambda old: "try:\n" + indented(old) + "except RuntimeError:\n    pass\n"
        ),
        METHOD,
    ),
    "try inside": (
        swap(
            REDUCE,
            "try:\n                "
            + REDUCE
            + "\n            finally:\n                pass",
        ),
        "try:",
    ),
    "with around": (
        reduce_as(lambda old: "with torch.no_grad():\n" + indented(old)),
        METHOD,
    ),
    "while for if": (swap("if <if>:", "while <if>:"), METHOD),
    "nested function": (
        reduce_as(
            lambda old: "def sync(seq_length):\n" + indented(old) + "sync(seq_length)\n"
        ),
        METHOD,
    ),
    "second reduce": (reduce_as("<reduce>\n<reduce>"), METHOD),
    "second reduce inside": (swap(REDUCE, REDUCE + "\n            " + REDUCE), REDUCE),
    "reduce missing": (reduce_as(""), METHOD),
    "reduce after the growth": (
        lambda text, target: (
            reduce_as("")(text, target).rstrip("\n")  # type: ignore[union-attr]
            if target.setter
            else reduce_as("pass")(text, target)
        ),
        METHOD,
    ),
    "sum": (swap(REDUCE, REDUCE.replace("MAX", "SUM")), "SUM"),
    "no op": (
        swap(REDUCE, "torch.distributed.all_reduce(global_max_len)"),
        "all_reduce",
    ),
    "op not by name": (swap(REDUCE, REDUCE.replace("op=", "")), "all_reduce"),
    "async_op": (swap(REDUCE, REDUCE[:-1] + ", async_op=True)"), "async_op"),
    "group": (swap(REDUCE, REDUCE[:-1] + ", group=self.group)"), "self.group"),
    "result kept": (swap(REDUCE, "work = " + REDUCE), "work ="),
    "another collective": (
        swap(REDUCE, "torch.distributed.broadcast(global_max_len, 0)"),
        "broadcast",
    ),
    "another tensor": (swap(TENSOR, TENSOR.replace("float32", "int64")), "int64"),
    "tensor with another value": (
        swap(TENSOR, TENSOR.replace("[seq_length]", "[seq_length + 1]")),
        "+ 1",
    ),
    "tensor on the CPU": (
        swap(TENSOR, TENSOR.replace("device=device", "device='cpu'")),
        "cpu",
    ),
    "tensor in two names": (swap(TENSOR, "other = " + TENSOR), "other ="),
    "tensor in an attribute": (
        reduce_as(lambda old: old.replace("global_max_len", "self.longest")),
        "self.longest =",
    ),
    "tensor annotated": (
        swap("global_max_len =", "global_max_len: torch.Tensor ="),
        "torch.Tensor",
    ),
    "length rounded": (
        swap(BACK, "seq_length = round(global_max_len.item())"),
        "round",
    ),
    "length in another local": (
        swap(BACK, "longest = global_max_len.int().item()"),
        "longest =",
    ),
    "dist for torch.distributed": (
        both(
            at_start("from torch import distributed as dist\n"),
            every(r"torch\.distributed\.(?=is_init|all_|Red)", "dist."),
        ),
        "dist.is_init",
    ),
    "dist in the reduce alone": (
        swap(REDUCE, REDUCE.replace("torch.distributed", "dist")),
        "dist.all",
    ),
    "all_reduce imported": (
        swap(REDUCE, REDUCE.replace("torch.distributed.all", "all")),
        "all_reduce",
    ),
    "growth: another comparison": (
        swap(GROW, "if seq_length >= self.max_audio_length:"),
        "seq_length >=",
    ),
    "growth: another condition": (
        swap(GROW, "if seq_length > self.longest:"),
        "self.longest",
    ),
    "class twice": (class_as(lambda inner: inner + "\n\n" + inner), OWNER),
    "class twice, once inside if": (
        class_as(lambda inner: inner + "\n\nif FAST:\n" + indented(inner)),
        OWNER,
    ),
    "class twice, once inside else": (
        class_as(
            lambda inner: (
                "if FAST:\n    pass\nelse:\n" + indented(inner) + "\n\n" + inner
            )
        ),
        OWNER,
    ),
    "class inside if": (class_as(lambda inner: "if FAST:\n" + indented(inner)), OWNER),
    "class inside try": (
        class_as(
            lambda inner: (
                "try:\n"
                + indented(inner)
                + "\nexcept ImportError:\n    <owner> = None\n"
            )
        ),
        "<owner> = None",
    ),
    "class inside a class": (
        class_as(lambda inner: "class Outer:\n" + indented(inner)),
        "",
    ),
    "class inside a function": (
        class_as(lambda inner: "def make():\n" + indented(inner)),
        "",
    ),
    "class missing": (class_as(lambda inner: ""), ""),
    "class renamed": (every(r"^class (\w+)\((?=.*)", r"class Their\1("), ""),
    "class is a function": (
        class_as(lambda inner: "def <owner>():\n    pass\n"),
        "def <owner>",
    ),
    "class wrapped later": (
        at_end("\n<owner> = experimental(<owner>)\n"),
        "<owner> = experimental",
    ),
    "class imported over": (
        at_end("\nfrom nemo.core import Fast as <owner>\n"),
        "Fast as <owner>",
    ),
    "class is a loop's name": (
        at_end("\nfor <owner> in ():\n    pass\n"),
        "for <owner> in",
    ),
    "no import of NeMo's": (imports_as(lambda inner: ""), OWNER),
    "imports inside try": (
        imports_as(
            lambda inner: "try:\n" + indented(inner) + "except ImportError:\n    pass\n"
        ),
        OWNER,
    ),
    "imports inside if": (
        imports_as(lambda inner: "if True:\n" + indented(inner)),
        OWNER,
    ),
    "NeMo imported otherwise": (imports_as(lambda inner: "import nemo.utils\n"), OWNER),
    "imports after the class": (
        both(
            imports_as(lambda inner: ""), at_end("\nfrom nemo.utils import logging\n")
        ),
        OWNER,
    ),
    "import after the class, one like ours": (
        both(
            imports_as(lambda inner: ""), at_end("\nfrom nemo.collections import asr\n")
        ),
        OWNER,
    ),
    "docstring on the line of the import": (
        both(
            imports_as(lambda inner: ""),
            at_start('"""Text."""; from nemo.utils import logging\n'),
        ),
        "import logging",
    ),
    "__future__ on the line of the import": (
        both(
            imports_as(lambda inner: ""),
            at_start(
                "from __future__ import annotations; from nemo.utils import logging\n"
            ),
        ),
        "import logging",
    ),
    "import after the end of another statement": (
        imports_as(lambda inner: "x = (\n1); from nemo.utils import logging\n"),
        "import logging",
    ),
    "import after the end of a string": (
        imports_as(lambda inner: 'x = """\n1"""; from nemo.utils import logging\n'),
        "import logging",
    ),
    "import with another statement after it": (
        imports_as(lambda inner: "from nemo.collections import asr; x = 1\n"),
        "import asr",
    ),
    "import with another statement before it": (
        imports_as(lambda inner: "x = 1; from nemo.utils import logging\n"),
        "import logging",
    ),
    "import continued into nothing": (
        imports_as(lambda inner: "from nemo.collections import asr \\\n\nx = 1\n"),
        "import asr",
    ),
    "import continued into an indented statement": (
        imports_as(lambda inner: "from nemo.collections import asr; \\\n    x = 1\n"),
        "import asr",
    ),
    "our name taken by a function": (
        imports_as(lambda inner: inner + "def max_length_in_time(x):\n    return x\n"),
        "def max_length_in_time",
    ),
    "our name taken by a variable": (
        imports_as(lambda inner: inner + "max_length_in_time = 1\n"),
        "max_length_in_time =",
    ),
    "the import is there": (
        imports_as(lambda inner: inner + IMPORT.decode() + "\n"),
        "max_length_in_time",
    ),
    "the call is there": (
        reduce_as("seq_length = max_length_in_time(self, seq_length)"),
        "max_length_in_time",
    ),
    "syntax error": (swap(BACK, BACK + ")"), ")"),
    "merge conflict": (reduce_as("<<<<<<< HEAD\n<reduce>\n=======\n>>>>>>> mine"), ""),
    "indentation": (swap("        " + GROW, "       " + GROW), GROW),
    "tabs among spaces": (swap("        " + GROW, "\t" + GROW), GROW),
    "return outside a function": (at_end("\nreturn 1\n"), "return 1"),
    "__future__ late": (at_end("\nfrom __future__ import annotations\n"), "__future__"),
    "zero byte": (at_end("x = '\0'\n"), ""),
    "zero byte in a comment": (swap(BACK, BACK + "  # \0"), ""),
    "not UTF-8": (
        lambda text, target: swap(BACK, BACK + "  # \xe9")(text, target).encode(
            "latin-1", "replace"
        ),
        BACK,
    ),  # type: ignore[union-attr]
    "not UTF-8, in the first line": (
        lambda text, target: b"# \xe9\n" + text.encode(),
        "",
    ),
    "unknown cookie": (at_start("# coding: klingon\n"), ""),
    "cookie of no text": (at_start("# coding: rot13\n"), ""),
    "cookie that does not hold": (
        lambda text, target: ("# coding: ascii\n# é\n" + text).encode(),
        "",
    ),
    "cookie against the BOM": (as_bytes("utf-8-sig", prefix="# coding: latin-1\n"), ""),
    "cookie of an encoding with states": (
        at_start("# coding: utf-7\nx = '+AOk-+AOg-'\n"),
        "",
    ),
    "UTF-16": (as_bytes("utf-16"), ""),
    "nested too deep": (at_start("x = " + "(" * 300 + "1" + ")" * 300 + "\n"), ""),
    "a sum too long": (at_start("x = " + " + ".join(["1"] * 3000) + "\n"), ""),
    "a chain of conditions too long to compare": (
        at_start("if 1:\n    pass\n" + "elif 2:\n    pass\n" * 450),
        "",
    ),
    "a chain too long": (at_start("x = a" + ".a" * 20000 + "\n"), ""),
    "empty": (lambda text, target: "", ""),
    "a comment alone": (lambda text, target: "# moved to another file", ""),
}
REFUSED_WITH_SETTER: dict[str, tuple[Change, str]] = {
    "setter missing": (method_as(lambda inner: "", "<setter>"), OWNER),
    "setter renamed": (swap(SET, SET.replace("def ", "def _")), OWNER),
    "setter decorated": (
        swap("    " + SET, "    @torch.no_grad()\n    " + SET),
        "def <setter>",
    ),
    "setter a property": (
        swap("    " + SET, "    @property\n    " + SET),
        "def <setter>",
    ),
    "setter with another argument": (
        swap(SET, SET.replace("):", ", device=None):")),
        "def <setter>",
    ),
    "setter with a default": (swap(SET, SET.replace("):", "=5000):")), "def <setter>"),
    "setter's argument renamed": (
        swap(SET, SET.replace("max_audio_length", "length")),
        "def <setter>",
    ),
    "setter twice": (
        method_as(lambda inner: inner + "\n" + inner, "<setter>"),
        "def <setter>",
    ),
    "setter twice, once inside if": (
        method_as(
            lambda inner: inner + "\n    if FAST:\n" + indented(inner), "<setter>"
        ),
        "def <setter>",
    ),
    "setter replaced from outside": (
        at_end("\n<owner>.<setter> = print\n"),
        "<owner>.<setter> = print",
    ),
    "setter that reduces": (
        swap(SET, SET + "\n        torch.distributed.all_reduce(max_audio_length)"),
        "all_reduce(max_audio_length)",
    ),
    "growth: another call": (swap(CALL, "self.grow(seq_length)"), "self.grow"),
    "growth: another argument": (swap(CALL, "self.<setter>(seq_length * 2)"), "* 2"),
    "growth: more": (swap(CALL, CALL + "\n            self.grown = True"), CALL),
    "growth: else": (
        swap(CALL, CALL + "\n        else:\n            self.grown = False"),
        GROW,
    ),
    "growth: the local": (
        swap(CALL, "self.<setter>(global_max_len.int().item())"),
        "global_max_len",
    ),
}
REFUSED_INLINE: dict[str, tuple[Change, str]] = {
    "growth: the local": (
        swap(INLINE, "self.max_audio_length = global_max_len.int().item()\n"),
        "global_max_len",
    ),
    "growth: another reduce": (
        swap(INLINE, INLINE + "            torch.distributed.barrier()\n"),
        "barrier",
    ),
    "growth: another reduce by dist": (
        swap(INLINE, INLINE + "            dist.barrier()\n"),
        "barrier",
    ),
    "growth: another reduce by name": (
        swap(INLINE, INLINE + "            all_reduce(seq_length)\n"),
        "all_reduce(s",
    ),
    "growth: else": (
        method_as(
            lambda inner: inner + "        else:\n            self.grown = False\n"
        ),
        GROW,
    ),
}
FLAGGED = "self.sync_max_audio_length and torch.distributed.is_initialized()"


def changes() -> Iterator[Any]:
    """What may be anywhere, on the first target only; what its growth is changed in, on each."""
    for number, (owner, target) in enumerate(PRESENT.items()):
        accepted = WITH_SETTER if target.setter else INLINE_GROWTH
        refused = REFUSED_WITH_SETTER if target.setter else REFUSED_INLINE
        if number == 0:
            accepted, refused = ANYWHERE | accepted, REFUSED | refused
        for name, change in accepted.items():
            yield pytest.param(owner, change, None, id=f"{owner}-edited-{name}")
        for name, (change, at) in refused.items():
            yield pytest.param(owner, change, at, id=f"{owner}-refused-{name}")


# What a correct edit is, and a refusal; nothing here is from vendoring/.


def checkout_with(folder: Path, target: Target, source: bytes) -> Path:
    files = {path: text.encode() for path, text in TABLES.items()} | {
        path_of(target): source
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    (folder / "nemo" / "package_info.py").write_text(PACKAGE_INFO)
    return folder


def edit_of(target: Target, checkout: Path) -> checkouts.Edit:
    (edit,) = (
        edit
        for edit in checkouts.read(checkout).edits()
        if edit.path == path_of(target)
    )
    return edit


def assert_correct(before: bytes, after: bytes, target: Target) -> None:
    assert_lines(before, after)
    old, new = ast.parse(before), ast.parse(after)
    compile(after, "after", "exec", dont_inherit=True)
    assert_import_in_place(new, target)
    assert_nothing_else(old, new, target)
    assert_acts_alike(old, new, target)


def assert_lines(before: bytes, after: bytes) -> None:
    """Byte for byte: an import more, a call for lines that are the reduce, whole, and the tables
    are no buffers.
    """
    registered = REGISTERED.findall(before)
    assert len(registered) == len(PLAIN.findall(after)) <= 1 and not REGISTERED.search(
        after
    )
    after = PLAIN.sub(lambda _: registered[0], after).replace(MASK_ON, MASK)
    lines = after.splitlines(keepends=True)
    ours = [
        at
        for at, line in enumerate(lines)
        if line.strip() == IMPORT or BOUNDED.fullmatch(line.strip())
    ]
    assert len(ours) == 2 and lines[ours[0]].strip() == IMPORT
    prefix = b"".join(line for at, line in enumerate(lines[: ours[1]]) if at != ours[0])
    suffix = b"".join(lines[ours[1] + 1 :])
    assert before.startswith(prefix) and before.endswith(suffix)
    gone = before[len(prefix) : len(before) - len(suffix)].decode("latin-1")
    (around,) = ast.parse(f"if 1:\n {gone.lstrip()}\n").body
    assert isinstance(around, ast.If)
    (reduce,) = around.body
    assert (
        isinstance(reduce, ast.If)
        and not reduce.orelse
        and len(re.findall(r"all_reduce\s*\(", gone)) == 1
    )
    assert ("sync_max_audio_length" in ast.unparse(reduce.test)) == (
        b"sync_max" in lines[ours[1]]
    )
    for at, neighbour in (
        (ours[0], lines[ours[0] + 1]),
        (ours[1], gone.splitlines(keepends=True)[0].encode()),
    ):
        assert lines[at].endswith(b"\r\n") == neighbour.endswith(b"\r\n")


def top_class(tree: ast.Module, target: Target) -> ast.ClassDef:
    (owner,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == target.owner
    )
    return owner


def methods_of(owner: ast.ClassDef, *names: str) -> list[ast.FunctionDef]:
    return [
        node
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]


def assert_import_in_place(new: ast.Module, target: Target) -> None:
    (place,) = (
        at for at, node in enumerate(new.body) if ast.unparse(node) == IMPORT.decode()
    )
    later = new.body[place + 1 :]
    assert top_class(new, target) in later
    assert not any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for node in later
    )


def assert_nothing_else(old: ast.Module, new: ast.Module, target: Target) -> None:
    assert ast.get_docstring(old) == ast.get_docstring(new)
    old_owner, new_owner = top_class(old, target), top_class(new, target)
    assert "all_reduce" not in ast.dump(methods_of(new_owner, target.method)[0])
    names = (target.method, target.setter, "make_pad_mask")

    def dumped(nodes: list[ast.stmt], *without: ast.AST) -> list[str]:
        return [
            ast.dump(node)
            for node in nodes
            if node not in without and ast.unparse(node) != IMPORT.decode()
        ]

    assert dumped(old.body, old_owner) == dumped(new.body, new_owner)
    old_methods, new_methods = (
        methods_of(old_owner, *names),
        methods_of(new_owner, *names),
    )
    assert dumped(old_owner.body, *old_methods) == dumped(new_owner.body, *new_methods)
    for field in ("bases", "keywords", "decorator_list"):
        assert [*map(ast.dump, getattr(old_owner, field))] == [
            *map(ast.dump, getattr(new_owner, field))
        ]
    for before, after in zip(old_methods, new_methods, strict=True):
        assert (before.name, ast.dump(before.args)) == (
            after.name,
            ast.dump(after.args),
        )
        assert ast.get_docstring(before, clean=False) == ast.get_docstring(
            after, clean=False
        )


class Number:
    """A tensor of one number."""

    def __init__(self, values: list[int], **how: object) -> None:
        (self.value,) = values

    def int(self) -> Number:
        return self

    def item(self) -> int:  # type: ignore[valid-type]
        return self.value


class Base:
    """In place of the class's own bases; notes what is asked of it."""

    def __init__(self, seen: list[object], flag: bool | None) -> None:
        self.seen, self.max_audio_length = seen, 10
        self.pos_enc = self.time_reduce_pos_enc = SimpleNamespace(
            extend_pe=lambda *given: seen.append(given)
        )
        if flag is not None:
            self.sync_max_audio_length = flag

    def parameters(self) -> Iterator[object]:
        return iter([SimpleNamespace(device="device", dtype="dtype")])

    def register_buffer(self, name: str, tensor: object, persistent: bool) -> None:
        assert not persistent
        setattr(self, name, tensor)

    def named_modules(self) -> list[tuple[str, object]]:
        return []


def outcome(
    tree: ast.Module, target: Target, flag: bool | None, largest: int | None
) -> object:
    """What the sync's methods do, call after call: alone, or in a group whose other ranks have
    `largest`.
    """
    seen: list[object] = []
    owner = top_class(tree, target)

    def all_reduce(number: Number, op: str) -> None:
        seen.append(("agreed", op))
        number.value = max(number.value, largest or 0)

    def max_length_in_time(encoder: Any, length: int, sync: bool = True) -> int:
        number = Number([length])
        if largest is not None and sync:
            all_reduce(number, "MAX")
        return number.value

    distributed = SimpleNamespace(
        is_initialized=lambda: largest is not None,
        all_reduce=all_reduce,
        ReduceOp=SimpleNamespace(MAX="MAX"),
    )
    torch = SimpleNamespace(
        distributed=distributed,
        tensor=Number,
        float32="",
        arange=lambda *given, **named: given,
    )
    standing = ast.ClassDef(
        name="Standing",
        bases=[ast.Name("Base", ast.Load())],
        keywords=[],
        body=methods_of(owner, target.method, target.setter),  # type: ignore[arg-type]
        decorator_list=[],
    )
    names: dict[str, Any] = {
        "Base": Base,
        "torch": torch,
        "max_length_in_time": max_length_in_time,
    }
    names |= {"MaskedConv1d": Number, "SqueezeExcite": Number, "logging": MagicMock()}
    module = ast.fix_missing_locations(ast.Module([standing], []))
    exec(compile(module, "standing", "exec", dont_inherit=True), names)
    encoder = names["Standing"](seen, flag)
    calls = [
        (target.method, (length, "device"))
        for length in (3, 10, 11, 40, 7, 4999, 5000, 9999, 40000, 12)
    ]
    for method, arguments in (
        [*calls, (target.setter, (3,))] if target.setter else calls
    ):
        try:
            seen.append(getattr(encoder, method)(*arguments))
        except Exception as error:
            seen.append(type(error))
        seen.append(encoder.max_audio_length)
    left = {
        name: value
        for name, value in vars(encoder).items()
        if name not in ("seen", "pos_enc", "time_reduce_pos_enc")
    }
    return seen, left


def assert_acts_alike(old: ast.Module, new: ast.Module, target: Target) -> None:
    has_flag = "'sync_max_audio_length'" in ast.dump(top_class(old, target))
    for flag in (True, False) if has_flag else (None,):
        for largest in (None, 1, 11, 6000, 50000):
            assert outcome(old, target, flag, largest) == outcome(
                new, target, flag, largest
            ), (flag, largest)


def assert_refusal(
    error: DiffError, before: bytes, target: Target, at: str = ""
) -> None:
    found = re.match(rf"{re.escape(path_of(target))}:(\d+): (\S.*)", str(error))
    assert found, str(error)
    lines = re.split(rb"\r\n|\r|\n", before)
    assert 1 <= int(found[1]) <= len(lines), str(error)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(before).readline)
        compile(before.decode(encoding), "before", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
        pass  # a refusal of the file, not of the target's code
    else:
        of_the_file = ("recursion depth", "it would not be the same bytes")
        assert str(target) in found[2] or any(
            text in found[2] for text in of_the_file
        ), str(error)
    assert filled(at, SHORT[target.owner], target) in lines[int(found[1]) - 1].decode(
        "utf-8", "replace"
    ), str(error)


@pytest.mark.skipif(not PRESENT, reason="no NeMo here")
@pytest.mark.parametrize("owner, change, at", list(changes()))
def test_a_change(owner: str, change: Change, at: str | None, tmp_path: Path) -> None:
    """`at`: None where the edit is to be made, else a text on the line that the refusal names."""
    target = PRESENT[owner]
    changed = change(SHORT[owner], target)
    before = changed if isinstance(changed, bytes) else changed.encode()
    checkout = checkout_with(tmp_path, target, before)
    if at is None:
        edit = edit_of(target, checkout)
        assert edit.before == before
        assert_correct(before, edit.after, target)
    else:
        with pytest.raises(DiffError) as refused:
            checkouts.read(checkout).edits()
        assert_refusal(refused.value, before, target, at)
    assert (checkout / path_of(target)).read_bytes() == before


@pytest.mark.parametrize("owner", PRESENT)
def test_every_change_changes_something(owner: str) -> None:
    same = [
        parameters.id
        for parameters in changes()
        if parameters.values[0] == owner
        and parameters.values[1](SHORT[owner], PRESENT[owner]) == SHORT[owner]
    ]
    nothing = {"edited-nothing", "edited-no blank lines in the reduce"}
    if owner == "SqueezeformerEncoder":  # the method has none
        nothing.add("edited-no docstring")
    assert {str(name).partition("-")[2] for name in same} <= nothing


@pytest.mark.parametrize("owner", PRESENT)
def test_the_whole_file(owner: str, tmp_path: Path) -> None:
    target = PRESENT[owner]
    before = (SITE / path_of(target)).read_bytes()
    edit = edit_of(target, checkout_with(tmp_path, target, before))
    assert_correct(before, edit.after, target)


@pytest.mark.parametrize(
    "owner", [owner for owner, text in REAL.items() if FLAGGED in text]
)
def test_a_reduce_that_ignores_the_encoders_flag_still_does(
    owner: str, tmp_path: Path
) -> None:
    changed = swap(f"if {FLAGGED}:", "if torch.distributed.is_initialized():")(
        REAL[owner], PRESENT[owner]
    )
    assert isinstance(changed, str)
    edit = edit_of(
        PRESENT[owner], checkout_with(tmp_path, PRESENT[owner], changed.encode())
    )
    assert_correct(changed.encode(), edit.after, PRESENT[owner])
    assert b"max_length_in_time(self, seq_length)\n" in edit.after


@pytest.mark.parametrize(
    "name",
    [
        "CRLF",
        "CR",
        "CRLF in the reduce alone",
        "BOM and CRLF",
        "no newline at the end",
        "coding cookie",
    ],
)
def test_git_applies_the_diff_and_takes_it_back(name: str, tmp_path: Path) -> None:
    owner, target = next(iter(PRESENT.items()))
    changed = ANYWHERE[name](SHORT[owner], target)
    before = changed if isinstance(changed, bytes) else changed.encode()
    checkout = checkout_with(tmp_path, target, before)
    found = checkouts.read(checkout).edits()
    before_all = {edit.path: edit.before for edit in found if edit.before is not None}
    text = git.diff(before_all, {edit.path: edit.after for edit in found})
    for reverse in ([], ["-R"]):
        command = [
            "git",
            "-c",
            "core.autocrlf=false",
            "apply",
            "--whitespace=nowarn",
            *reverse,
            "-",
        ]
        done = subprocess.run(
            command, cwd=checkout, input=text, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        for edit in found:
            file = checkout / edit.path
            assert (file.read_bytes() if file.exists() else None) == (
                edit.before if reverse else edit.after
            )


BROKEN_INFO = {
    "syntax error": b"MAJOR = = 3\n",
    "zero byte": b"MAJOR = 3\0\n",
    "unknown cookie": b"# coding: klingon\n",
    "not UTF-8": b"# a\n# \xff\n# b\n# c\nMAJOR = 3\n",
    "other constants": b"VERSION = '3.0.0'\n",
    "not constant": b"MAJOR, MINOR, PATCH = 3, 0, 0\nPRE_RELEASE = str()\n",
}


@pytest.mark.parametrize(
    "name", [*BROKEN_INFO, "missing", "a folder", "a file for nemo"]
)
def test_no_version_to_be_found(name: str, tmp_path: Path) -> None:
    info = tmp_path / "nemo" / "package_info.py"
    info.parent.mkdir()
    if name in BROKEN_INFO:
        info.write_bytes(BROKEN_INFO[name])
    elif name == "a folder":
        info.mkdir()
    elif name == "a file for nemo":
        info.parent.rmdir()
        info.parent.write_text("")
    with pytest.raises(DiffError, match=str(tmp_path)):
        checkouts.read(tmp_path).edits()


# Changes together, and changes that nobody thought of.

TEXTUAL = [change for name, change in (ANYWHERE | WITH_SETTER | INLINE_GROWTH).items()]
TEXTUAL += [
    change for change, _ in (REFUSED | REFUSED_WITH_SETTER | REFUSED_INLINE).values()
]
PIECES = [
    "\n",
    "\r",
    "\f",
    "\t",
    "    ",
    "\\\n",
    ";",
    "#",
    "(",
    ")",
    ":",
    '"""',
    "'",
    ",",
    "=",
    "if x:",
    "else:",
    "x",
    "é",
    "\0",
]
PIECES += [
    "return",
    "pass\n",
    "class X:",
    "global_max_len",
    "seq_length",
    "\u2028",
    "@x\n",
    "async ",
    "not ",
]


@st.composite
def changed_sources(draw: st.DrawFn) -> tuple[Target, bytes]:
    owner = draw(st.sampled_from(sorted(PRESENT)))
    target, source = PRESENT[owner], SHORT[owner]
    for change in draw(st.lists(st.sampled_from(TEXTUAL), max_size=3)):
        try:
            changed = change(source, target)
        except (
            ValueError,
            SyntaxError,
            StopIteration,
            IndexError,
            RecursionError,
            MemoryError,
        ):
            continue  # this change finds its place no more
        if isinstance(changed, bytes):
            return target, changed
        source = changed
    for _ in range(draw(st.integers(0, 2))):
        near = [found.start() for found in re.finditer(r"\b|$", source, re.MULTILINE)]
        first = source.find(f"def {target.method}(")
        if draw(st.booleans()) and first > 0:
            near = [place for place in near if first <= place <= first + 1500] or near
        place = draw(st.sampled_from(near))
        length = draw(st.sampled_from([0, 0, 1, 4, 20]))
        source = (
            source[:place] + draw(st.sampled_from(PIECES)) + source[place + length :]
        )
    return target, source.encode()


@pytest.mark.skipif(not PRESENT, reason="no NeMo here")
@settings(max_examples=60, deadline=None)
@given(changed_sources())
def test_changes_together(drawn: tuple[Target, bytes]) -> None:
    target, before = drawn
    with tempfile.TemporaryDirectory() as folder:
        try:
            edit = edit_of(target, checkout_with(Path(folder), target, before))
        except DiffError as error:
            assert_refusal(error, before, target)
        else:
            assert_correct(before, edit.after, target)
