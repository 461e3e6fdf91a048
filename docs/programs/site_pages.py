"""A hook of mkdocs: the README and the other pages of the checkout's root are pages of the site, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGES = {
    "README.md": "index.md",
    **{name: name for name in ("README.zh-CN.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")},
}

SHORT = 55  # characters of a command in a table that stays in one piece: a phone's window has about as many
LONG = re.compile(rf"<code>([^<]{{{SHORT + 1},}})</code>")


def on_files(files: Any, config: Any) -> Any:
    for name, uri in PAGES.items():
        text = Path(config.config_file_path).with_name(name).read_text(encoding="utf-8")
        # On the site, docs/ is the root; here its pages are a folder below.
        text = text.replace("](docs/", "](").replace("](README.md", "](index.md")
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\]\(\.\./(\w+\.md)", lambda match: f"]({PAGES[match[1]]}", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    html = re.sub(r"<td\b.*?</td>", lambda cell: LONG.sub(_in_words, cell[0]), html)
    if page.file.src_uri.endswith(".zh-CN.md"):
        html = f'<div lang="zh-CN">{html}</div>'  # else a browser may take Japanese forms of the characters
    return html


def _in_words(code: re.Match[str]) -> str:
    """A long command in a table: site.css lets it break between its words; within one only if that is long itself."""
    words = " ".join(word if len(word) > SHORT else f"<span>{word}</span>" for word in code[1].split(" "))
    return f'<code class="long">{words}</code>'
