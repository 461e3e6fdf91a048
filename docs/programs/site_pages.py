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


def on_files(files: Any, config: Any) -> Any:
    for name, uri in PAGES.items():
        text = Path(config.config_file_path).with_name(name).read_text(encoding="utf-8")
        # On the site, docs/ is the root; here its pages are a folder below.
        text = text.replace("](docs/", "](").replace("](README.md", "](index.md")
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\]\(\.\./(\w+\.md)", lambda match: f"]({PAGES[match[1]]}", markdown)
