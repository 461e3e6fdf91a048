"""NeMo checkouts with the local changes that forks have: a correct edit, or a refusal that names
the place.

Where a change is beside what the edit replaces, the order does not matter: the change and then the
edit give what the edit and then the change give. Where it is inside, the edit removes it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from diff_checkouts import CONFORMER, CONV, SITE, contents, copied_nemo

from nemo_patches.vendoring import checkouts
from nemo_patches.vendoring.errors import DiffError

pytestmark = pytest.mark.one_nemo
Change = Callable[[bytes], bytes]
CLASS = "class ConformerEncoder("
METHOD = "    def update_max_seq_length(self, seq_length: int, device):\n"
SETTER = "    def set_max_audio_length(self, max_audio_length):\n"
TENSOR = (
    "global_max_len = torch.tensor([seq_length], dtype=torch.float32, device=device)"
)
REDUCE = (
    "torch.distributed.all_reduce(global_max_len, op=torch.distributed.ReduceOp.MAX)"
)
BACK = "seq_length = global_max_len.int().item()"
IF = "if self.sync_max_audio_length and torch.distributed.is_initialized():"
GROW = "            self.set_max_audio_length(seq_length)\n"


def swap(*pairs: str) -> Change:
    """Replaces texts, each the first after the method's beginning, or else in the file."""

    def change(source: bytes) -> bytes:
        text = source.decode()
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            place = text.find(old, text.find(METHOD.rstrip("\n")))
            place = text.index(old) if place < 0 else place
            text = text[:place] + new + text[place + len(old) :]
        return text.encode()

    return change


def at_end(text: str) -> Change:
    return lambda source: source + text.encode()


def at_start(text: str) -> Change:
    return lambda source: text.encode() + source


def ends(end: bytes) -> Change:
    return lambda source: source.replace(b"\n", end)


BESIDE: dict[str, Change] = {  # the order of change and edit does not matter
    "CRLF": ends(b"\r\n"),
    "BOM": at_start("\ufeff"),
    "BOM and CRLF": lambda source: b"\xef\xbb\xbf" + ends(b"\r\n")(source),
    "coding cookie": lambda source: (
        b"# coding: cp1252\n# Gr\xfc\xdfe\n" + source.replace(b"\xe2\x80\x99", b"'")
    ),
    "letters outside ASCII": at_start("# 长度 é 🙂\n"),
    "no newline at the end": lambda source: source.rstrip(b"\n"),
    "indented by tabs": lambda source: re.sub(
        rb"^( {4})+", lambda found: b"\t" * (len(found[0]) // 4), source, flags=re.M
    ),
    "no comment on the reduce": swap(
        "        # Find global max audio length across all nodes\n", ""
    ),
    "comment after the method's line": swap(METHOD, f"{METHOD}        # ours\n"),
    "another docstring": swap(
        "Updates the maximum sequence length for the model.", "Ours."
    ),
    "annotated": swap(METHOD, METHOD.replace(")", ") -> None")),
    "another argument": swap(METHOD, METHOD.replace("device)", "device, group=None)")),
    "decorated method": swap(METHOD, f"    @torch.no_grad()\n{METHOD}"),
    "statement before the reduce": swap(
        "        # Find global max audio length across all nodes\n",
        "        self.calls = 1\n        # Find it\n",
    ),
    "statement after the growth": swap(GROW, f"{GROW}        return seq_length\n"),
    "setter does more": swap(SETTER, f"{SETTER}        self.grown = True\n"),
    "setter annotated": swap(SETTER, SETTER.replace("length)", "length: int)")),
    "decorated class": swap(CLASS, f"@typing.final\n{CLASS}"),
    "another base": swap(CLASS, f"{CLASS}Ours, "),
    "another method": swap(METHOD, f"    def ours(self):\n        pass\n\n{METHOD}"),
    "another class with a reduce": at_end(
        f"\n\nclass Ours:\n    def reduce(self, n):\n        {REDUCE}\n"
    ),
    "a subclass": at_end("\n\nclass Ours(ConformerEncoder):\n    pass\n"),
    "__future__": at_start("from __future__ import annotations\n"),
    "another import": at_start("from nemo.core import ours\n"),
}
INSIDE: dict[str, Change] = {  # what the edit removes
    "comments": swap(
        IF, f"{IF}  # all ranks", TENSOR, f"# one\n            {TENSOR}  # two"
    ),
    "type: ignore": swap(REDUCE, f"{REDUCE}  # type: ignore", BACK, f"{BACK}  # noqa"),
    "blank lines": swap(TENSOR, f"\n\n            {TENSOR}\n\n"),
    "calls over several lines": swap(
        REDUCE,
        "torch.distributed.all_reduce(\n                global_max_len,\n"
        "                op=torch.distributed.ReduceOp.MAX,\n            )",
    ),
    "condition over several lines": swap(
        IF,
        "if (\n            self.sync_max_audio_length\n"
        "            and torch.distributed.is_initialized()\n        ):",
    ),
}
# The change, and a text on the line that the refusal names.
REFUSED: dict[str, tuple[Change, str]] = {
    "another operation": (swap(REDUCE, REDUCE.replace("MAX", "SUM")), "SUM"),
    "a group": (swap(REDUCE, REDUCE[:-1] + ", group=self.group)"), "self.group"),
    "async_op": (swap(REDUCE, f"{REDUCE[:-1]}, async_op=True)"), "async_op"),
    "another collective": (
        swap(REDUCE, "torch.distributed.broadcast(global_max_len, 0)"),
        "broadcast",
    ),
    "another tensor": (swap(TENSOR, TENSOR.replace("float32", "int64")), "int64"),
    "another length": (swap(BACK, f"{BACK[:-7]}.ceil().item()"), "ceil"),
    "another condition": (swap(IF, IF.replace(":", " and self.training:")), "training"),
    "a statement more": (swap(BACK, f"{BACK}\n            print(seq_length)"), METHOD),
    "else": (swap(BACK, f"{BACK}\n        else:\n            pass"), METHOD),
    "twice": (
        swap(
            GROW,
            f"{GROW}        {IF}\n            {TENSOR}\n            {REDUCE}\n"
            f"            {BACK}\n",
        ),
        METHOD,
    ),
    "a collective in the setter": (
        swap(SETTER, f"{SETTER}        torch.distributed.barrier()\n"),
        "barrier()",
    ),
    "a collective in what the setter calls": (
        swap(
            SETTER,
            "    def ours(self):\n        dist.all_gather([], None)\n\n"
            f"{SETTER}        self.ours()\n",
        ),
        "all_gather",
    ),
    "a buffer more": (
        swap(SETTER, f"{SETTER}        self.register_buffer('x', y)\n"),
        "register_buffer('x'",
    ),
    "method renamed": (swap(METHOD, METHOD.replace("update", "renew")), CLASS),
    "method twice": (swap(GROW, f"{GROW}\n{METHOD}        pass\n"), METHOD),
    "method inside if": (
        swap(
            METHOD,
            f"    if x:\n\n        def update_max_seq_length(self): ...\n\n{METHOD}",
        ),
        "def update_max_seq_length",
    ),
    "class renamed": (swap(CLASS, "class Ours("), ""),
    "class twice": (at_end(f"\n\n{CLASS}Ours):\n    pass\n"), CLASS),
    "no import of NeMo's": (
        lambda source: re.sub(
            rb"^from nemo\.[^(\n]*(\([^)]*\))?\n", b"", source, flags=re.MULTILINE
        ),
        CLASS,
    ),
    "the name that the edit brings": (
        at_end("\nmax_length_in_time = 1\n"),
        "max_length_in_time",
    ),
    "a conflict that is not resolved": (swap(CLASS, f"<<<<<<< HEAD\n{CLASS}"), "<<<"),
    "not UTF-8": (lambda source: b"# \xe9\n" + source, ""),
    "unknown coding cookie": (at_start("# coding: klingon\n"), ""),
    "an expression too deep": (at_end("x = a" + ".a" * 20000 + "\n"), ""),
}


# `make test` has one of each kind, `make test-matrix` all.
IN_MAKE_TEST = {
    *("CRLF", "BOM", "coding cookie", "indented by tabs", "annotated"),
    *("statement before the reduce", "setter does more", "another import"),
    *("comments", "calls over several lines"),
    *("another operation", "another condition", "a statement more", "twice"),
    *("a collective in what the setter calls", "method twice", "class renamed"),
    *("the name that the edit brings", "not UTF-8", "an expression too deep"),
}


def each(changes: Iterable[str]) -> pytest.MarkDecorator:
    cases = [
        name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.weekly)
        for name in changes
    ]
    return pytest.mark.parametrize("name", cases)


@functools.cache
def stock(path: str = CONFORMER) -> bytes:
    return (SITE / path).read_bytes()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copied_nemo(tmp_path / "checkout")


def edited(checkout: Path, source: bytes, path: str = CONFORMER) -> bytes:
    (checkout / path).write_bytes(source)
    before = contents(checkout)
    edits = {edit.path: edit for edit in checkouts.read(checkout).edits()}
    assert edits[path].before == source
    assert contents(checkout) == before
    compile(edits[path].after, path, "exec", dont_inherit=True)
    return edits[path].after


def without_import(source: bytes) -> bytes:
    lines = re.split(rb"(?<=\n)", source)
    return b"".join(line for line in lines if b"import max_length_in_time" not in line)


@each(BESIDE)
def test_a_change_beside_the_reduce_stays(name: str, checkout: Path) -> None:
    plain = edited(checkout, stock())
    changed = BESIDE[name](stock())
    assert changed != stock()
    assert without_import(edited(checkout, changed)) == without_import(
        BESIDE[name](plain)
    )


@each(INSIDE)
def test_a_reduce_that_is_written_otherwise_goes(name: str, checkout: Path) -> None:
    plain = edited(checkout, stock())
    assert INSIDE[name](stock()) != stock()
    assert edited(checkout, INSIDE[name](stock())) == plain


@each(REFUSED)
def test_what_is_not_known_is_refused_with_its_line(name: str, checkout: Path) -> None:
    change, at = REFUSED[name]
    (checkout / CONFORMER).write_bytes(change(stock()))
    with pytest.raises(DiffError) as refused:
        checkouts.read(checkout).edits()
    found = re.match(rf"{re.escape(CONFORMER)}:(\d+): \S", str(refused.value))
    assert found, refused.value
    lines = change(stock()).decode("utf-8", "replace").splitlines()
    assert at.strip() in lines[int(found[1]) - 1], refused.value


def test_a_reduce_that_ignores_the_encoders_flag_still_does(checkout: Path) -> None:
    changed = swap(IF, "if torch.distributed.is_initialized():")(stock())
    assert b"= max_length_in_time(self, seq_length)\n" in edited(checkout, changed)


def test_growth_in_the_method_itself_may_do_more(checkout: Path) -> None:
    more = b"            self.max_audio_length = seq_length\n"
    assert more in stock(CONV).replace(b"seq_length * 1.5", b"seq_length")
    change = stock(CONV).replace(b"seq_length < 5000", b"seq_length < 6000")
    assert change != stock(CONV)
    after = edited(checkout, change, CONV)
    assert after == edited(checkout, stock(CONV), CONV).replace(b"< 5000", b"< 6000")


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
