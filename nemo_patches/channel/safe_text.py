"""Makes text of another rank, of the store or of a file safe to print. Needs no torch, so tools use it, too."""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations


def safe(text: str, longest: int = 600) -> str:
    """One line, no control characters, nothing that reorders or hides others, at most so many characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:longest])


def first_line(error: BaseException) -> str:
    """An error in one line: torch's go on with a C++ stack."""
    text = str(error).strip()
    return f"{type(error).__name__}: {safe(text.splitlines()[0])}" if text else type(error).__name__
