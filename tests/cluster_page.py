"""The commands of docs/on-a-cluster.md, so that what tests run is what it says."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "on-a-cluster.md"


def blocks(heading: str) -> list[str]:
    """Of this section."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.MULTILINE)
    section = parts[parts.index(heading) + 1]
    return re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def command(heading: str, comment: str) -> str:
    """The line below the comment that begins so."""
    lines = "".join(blocks(heading)).splitlines()
    (number,) = [n for n, line in enumerate(lines) if line.startswith(f"# {comment}")]
    return lines[number + 1]


def with_words(text: str, **words: str) -> str:
    """With other words in place of these, each of which it has."""
    for word, other in words.items():
        assert word in text, (word, text)
        text = re.sub(rf"\b{word}\b", lambda _, other=other: other, text)  # type: ignore[misc]
    return text
