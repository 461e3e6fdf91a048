"""The documents' site: no page asks another host for anything, by the hook that `make docs` runs on
what it built.
"""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from interpreters import CHECKOUT

pytestmark = [pytest.mark.wheel, pytest.mark.one_nemo]

_spec = spec_from_file_location(
    "other_hosts", CHECKOUT / "docs" / "programs" / "other_hosts.py"
)
assert _spec and _spec.loader
other_hosts = module_from_spec(_spec)
_spec.loader.exec_module(other_hosts)


def found(folder: Path, name: str, text: str) -> list[str]:
    (folder / "assets").mkdir()
    (folder / "assets" / name).write_text(text, encoding="utf-8")
    return list(other_hosts.references(folder))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>'),
        ("a.html", "<SCRIPT SRC='//cdn.example/x.js'></SCRIPT>"),
        (
            "a.html",
            '<link rel="stylesheet" href="https://fonts.example/css?family=Roboto">',
        ),
        ("a.html", '<link rel="preconnect" href="https://fonts.example" crossorigin>'),
        ("a.html", '<link rel="icon" href="http://cdn.example/icon.png">'),
        ("a.html", '<img src="https://img.example/badge.svg" alt="passed">'),
        (
            "a.html",
            '<img src="own.png" srcset="own.png 1x, https://img.example/large.png 2x">',
        ),
        ("a.html", '<iframe src="https://video.example/1"></iframe>'),
        ("a.html", "<style>@import 'https://fonts.example/css';</style>"),
        ("a.html", '<p style="background: url(https://img.example/a.png)">'),
        ("a.html", '<pre class="mermaid"><code>flowchart LR</code></pre>'),
        ("a.html", '<div class="md-source" data-md-component="source">'),
        (
            "a.svg",
            (
                '<svg xmlns="http://www.w3.org/2000/svg"><image'
                ' href="https://img.example/a.png"/></svg>'
            ),
        ),
        (
            "a.svg",
            (
                '<svg><style>@font-face { src: url("https://fonts.example/a.woff2")'
                " }</style></svg>"
            ),
        ),
        ("a.css", "body { background: url(//img.example/a.png) }"),
    ],
)
def test_what_a_browser_would_load_from_another_host_is_found(
    name: str, text: str, tmp_path: Path
) -> None:
    (reference,) = found(tmp_path, name, text)
    assert reference.startswith(f"assets/{name} asks another host: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.html",
            (
                '<a href="https://issues.example/1">report</a> <link rel="canonical"'
                ' href="https://site.example/">'
            ),
        ),
        (
            "a.html",
            (
                '<script src="own.js"></script><link rel="stylesheet"'
                ' href="../own.css"><img src="/own.png">'
            ),
        ),
        (
            "a.html",
            (
                "<code>curl https://x.example; url(https://img.example/a.png)</code><p"
                ' class="diagram">'
            ),
        ),
        (
            "a.svg",
            '<svg xmlns="http://www.w3.org/2000/svg"><use href="#a"/></svg>',
        ),
        (
            "a.css",
            (
                'body { mask: url("data:image/svg+xml;utf8,<svg/>"); src:'
                " url(own.woff2) } /* https://x.example */"
            ),
        ),
    ],
)
def test_what_a_reader_clicks_on_or_the_site_has_itself_is_not(
    name: str, text: str, tmp_path: Path
) -> None:
    assert found(tmp_path, name, text) == []


def test_the_build_runs_it_and_a_picture_in_the_repository_loads_nothing() -> None:
    settings = (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "docs/programs/other_hosts.py" in re.findall(
        r"^hooks: \[(.*)\]$", settings, re.MULTILINE
    )[0].split(", ")
    assert list(other_hosts.references(CHECKOUT / "docs")) == []
