"""A hook of mkdocs: no page of the site asks another host for anything, so that it is whole where
there is no network.

Each such reference is a warning, which `mkdocs build --strict` counts as an error. What a reader
clicks on may lead anywhere.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_ELSEWHERE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
_LOADED_BY_CSS = re.compile(
    r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s]+)""", re.IGNORECASE
)
_LOADING = {"src", "srcset", "poster", "data", "background"}
_CLICKED_OR_NAMED = {
    "alternate",
    "author",
    "canonical",
    "help",
    "license",
    "next",
    "prev",
    "search",
}
# What the theme's script fetches from another host where a page has it: a diagram's program, a
# repository's stars.
_FETCHED_BY_THE_THEME = ("mermaid", "md-source")


class _Page(HTMLParser):
    """Collects what a browser loads for a page, or a picture, without a click."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        values = {name: value or "" for name, value in attributes}
        relation = set(values.get("rel", "").lower().split())
        loading = set(_LOADING)
        if tag in ("base", "image", "use") or (
            tag == "link" and not relation & _CLICKED_OR_NAMED
        ):
            loading |= {"href", "xlink:href"}
        for name in loading & set(values):
            links = values[name].split(",") if name == "srcset" else [values[name]]
            self.found += [link.split()[0] for link in links if _ELSEWHERE.match(link)]
        self.found += _LOADED_BY_CSS.findall(values.get("style", ""))
        self.found += [
            f"class {name}"
            for name in _FETCHED_BY_THE_THEME
            if name in values.get("class", "").split()
        ]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "style":
            self.found += _LOADED_BY_CSS.findall(data)


def references(site: Path) -> Iterator[str]:
    """The built site's references to another host, each with its file."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".svg"):
            page = _Page()
            page.feed(path.read_text(encoding="utf-8"))
            found = page.found
        elif path.suffix == ".css":
            found = _LOADED_BY_CSS.findall(path.read_text(encoding="utf-8"))
        else:
            continue
        yield from (
            f"{path.relative_to(site)} asks another host: {reference}"
            for reference in found
        )


def on_post_build(config: Any) -> None:
    for reference in references(Path(config.site_dir)):
        logging.getLogger("mkdocs.hooks.other_hosts").warning(reference)
