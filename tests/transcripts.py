"""Plays the transcripts in tests/golden: what is typed, and all that it prints; one file holds a
command's words.

`$ nemo-patches ...` is the command itself, `>>> f(...)` one of the functions that a test gives, `$
cat > NAME <<.` a file up to a line of ".", and `$ # ...` a comment. An exit code other than 0
follows in brackets.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import interpreters
import pytest

from nemo_patches import cli

GOLDEN = Path(__file__).parent / "golden"


def compare(
    name: str,
    folder: Path,
    names: Mapping[str, Any] | None = None,
    kept: Callable[[str, str], bool] | None = None,
) -> None:
    """Play it in the folder, which is the current one; fail where it prints something else than
    what the file has.

    kept: whether a line is compared, of the text that was typed and the line.
    """
    file = GOLDEN / f"{name}.txt"
    before = file.read_text()
    with patch.dict(os.environ, interpreters.environment(FORCE_COLOR=""), clear=True):
        after = "".join(
            _played(before.splitlines(), names or {}, kept or (lambda *_: True))
        )
    after = after.replace(str(folder), "/folder")
    if before == after:
        return
    if os.environ.get("RENEW_GOLDEN"):
        file.write_text(after)
        return
    changes = difflib.unified_diff(
        before.splitlines(),
        after.splitlines(),
        file.name,
        "printed now",
        n=1,
        lineterm="",
    )
    pytest.fail(
        "\n".join([*changes, "As it should be? `make golden` writes it."]),
        pytrace=False,
    )


def _played(
    lines: list[str], names: Mapping[str, Any], kept: Callable[[str, str], bool]
) -> Iterator[str]:
    typed = [
        number for number, line in enumerate(lines) if line.startswith(("$ ", ">>> "))
    ]
    for number in typed:
        yield lines[number] + "\n"
        line = lines[number].partition(" ")[2]
        if line.startswith("cat > "):
            end = lines.index(".", number)
            content = "".join(f"{each}\n" for each in lines[number + 1 : end])
            file = Path(line.split()[2])
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
            yield content + ".\n"
        elif lines[number].startswith(">>> "):
            yield from _printed(partial(eval, line, dict(names)), partial(kept, line))
        elif not line.startswith("#"):
            yield from _printed(partial(_typed, shlex.split(line)), partial(kept, line))


def _typed(words: list[str]) -> object:
    variables = {}
    while "=" in words[0]:
        variables.update([words.pop(0).split("=", 1)])
    main = sys.modules["__main__"]  # whose package is the program's name in messages
    with (
        patch.dict(os.environ, variables),
        patch("sys.argv", words),
        patch.object(main, "__package__", ""),
    ):
        return cli.main()


def _printed(call: Callable[[], object], kept: Callable[[str], bool]) -> Iterator[str]:
    """What the call prints, on either stream, and its exit code."""
    out, code = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            call()
        except SystemExit as end:
            code = end.code
    written = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    yield from (f"{line}\n" for line in written.splitlines() if kept(line))
    if code:
        yield f"[{code}]\n"
