"""A hook of mkdocs: the README and the other pages of the checkout's root are pages of the site,
too; links have titles, and tables of commands can stack.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
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

# A link whose text is a file's name: [docs/stalls.md](docs/stalls.md#which-ranks).
NAMED = re.compile(r"\[(?:docs/)?([\w.-]+\.md)\]\((?=(?:\.\./|docs/)?\1[#)])")

# Code without colours, whose text has no tags; a diagram scrolls instead.
CODE = re.compile(r'(?<!"diagram">)<code>([^<]+)</code>')
# So many characters fit a phone's window.
WORD = re.compile(r"(?<!\S)[!-~]{1,36}(?!\S)")
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
HEADING = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
CELL = re.compile(r"<td( [^>]*)?>")
PICTURE = re.compile(r'<img [^>]*src="(?P<source>[^"]+)"[^>]*>')
TAG = re.compile(r"<[^>]+>")
SHORT = 55  # characters of a command in a table that stays in one piece


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File  # the tests have no mkdocs

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
    markdown = NAMED.sub(_titled, markdown)
    return re.sub(r"\]\(\.\./(\w+\.md)", lambda match: f"]({PAGES[match[1]]}", markdown)


def _titled(link: re.Match[str]) -> str:
    """The link with the page's own title as its text."""
    folder = ROOT if link[1] in PAGES else ROOT / "docs"
    text = (folder / link[1]).read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    return f"[{title}]("


def on_page_content(html: str, page: Any, **_: Any) -> str:
    # A picture is as wide as the page; a click shows it in its own size.
    html = PICTURE.sub(r'<a href="\g<source>">\g<0></a>', html)
    return TABLE.sub(_labelled, CODE.sub(_in_words, html))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.endswith(".zh-CN.md"):
        # Else a browser may take Japanese forms of the characters
        return output.replace('<html lang="en"', '<html lang="zh"', 1)
    return output


def _labelled(table: re.Match[str]) -> str:
    """A table of commands, whose cells know their heading: on a phone they stack (site.css)."""
    if "<code" not in table[0]:
        return table[0]
    headings = [TAG.sub("", cell) for cell in HEADING.findall(table[0])]

    def row(match: re.Match[str]) -> str:
        labels = iter(headings)
        return CELL.sub(
            lambda cell: f'<td data-label="{next(labels, "")}"{cell[1] or ""}>',
            match[0],
        )

    return ROW.sub(row, table[0])


def _in_words(code: re.Match[str]) -> str:
    """For site.css: a command breaks between its words, and not after a hyphen; in a table only if
    it is long.
    """
    length = "long" if len(code[1]) > SHORT else "short"
    words = WORD.sub(r"<span>\g<0></span>", code[1])
    return f'<code class="{length}">{words}</code>'
