"""A hook of mkdocs: the README and the other pages of the checkout's root are pages of the site,
too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGES = {
    "README.md": "index.md",
    **{
        name: name
        for name in (
            "README.zh-CN.md",
            "SECURITY.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
        )
    },
}

# Code without colours, whose text has no tags; a diagram scrolls instead.
CODE = re.compile(r'(?<!"diagram">)<code>([^<]+)</code>')
# So many characters fit a phone's window.
WORD = re.compile(r"(?<!\S)[!-~]{1,36}(?!\S)")
SHORT = 55  # characters of a command in a table that stays in one piece


def on_files(files: Any, config: Any) -> Any:
    for name, uri in PAGES.items():
        text = Path(config.config_file_path).with_name(name).read_text(encoding="utf-8")
        # On the site, docs/ is the root; here its pages are a folder below.
        text = text.replace("](docs/", "](").replace("](README.md", "](index.md")
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "CHANGELOG.md":
        # It has every word, and is what nobody who searches wants.
        page.meta["search"] = {"boost": 0.1}
    return re.sub(r"\]\(\.\./(\w+\.md)", lambda match: f"]({PAGES[match[1]]}", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    html = CODE.sub(_in_words, html)
    if page.file.src_uri.endswith(".zh-CN.md"):
        # Else a browser may take Japanese forms of the characters
        html = f'<div lang="zh-CN">{html}</div>'
    return html


def _in_words(code: re.Match[str]) -> str:
    """For site.css: a command breaks between its words, and not after a hyphen; in a table only if
    it is long.
    """
    length = "long" if len(code[1]) > SHORT else "short"
    words = WORD.sub(r"<span>\g<0></span>", code[1])
    return f'<code class="{length}">{words}</code>'
