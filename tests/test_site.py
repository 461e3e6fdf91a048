"""The documents' site: no page asks another host for anything, by the hook that `make docs` runs on
what it built.
"""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from interpreters import CHECKOUT

pytestmark = [pytest.mark.wheel, pytest.mark.one_nemo]


def program(name: str) -> ModuleType:
    spec = spec_from_file_location(name, CHECKOUT / "docs" / "programs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


other_hosts = program("other_hosts")
site_pages = program("site_pages")


def page(name: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name), meta={})


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


def test_a_link_has_the_title_of_its_page() -> None:
    def shown(text: str) -> str:
        return str(site_pages.on_page_markdown(text, page("stalls.md")))

    title = (CHECKOUT / "docs" / "doctor.md").read_text().splitlines()[0][2:]
    for name in ("docs/doctor.md", "doctor.md"):
        assert shown(f"[{name}]({name}#rules)") == f"[{title}]({name}#rules)"
    assert shown("[SECURITY.md](../SECURITY.md)") == "[Security](SECURITY.md)"
    assert shown("[my words](doctor.md)") == "[my words](doctor.md)"


def test_the_chinese_page_is_in_chinese_and_each_page_has_a_switch() -> None:
    html = '<!doctype html><html lang="en" class="no-js">'
    chinese = site_pages.on_post_page(html, page("README.zh-CN.md"))
    assert '<html lang="zh" ' in chinese
    assert site_pages.on_post_page(html, page("index.md")) == html
    settings = (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "link: README.zh-CN.html, lang: zh}" in settings
    assert "- Start: index.md" in settings


def test_the_cells_of_a_table_of_commands_know_their_headings() -> None:
    head = "<table><thead><tr><th>to</th><th>type</th></tr></thead><tbody>"
    words = head + "<tr><td>a</td><td>b</td></tr></tbody></table>"
    assert site_pages.on_page_content(words, page("x.md")) == words
    commands = words.replace("<td>b</td>", '<td style="x"><code>b c</code></td>')
    html = site_pages.on_page_content(commands, page("x.md"))
    assert '<td data-label="to">a</td><td data-label="type" style="x"><code' in html


def test_a_click_on_a_picture_shows_it_in_its_own_size() -> None:
    html = site_pages.on_page_content('<p><img alt="" src="a.svg" /></p>', page("x.md"))
    assert html == '<p><a href="a.svg"><img alt="" src="a.svg" /></a></p>'


def test_the_build_runs_it_and_a_picture_in_the_repository_loads_nothing() -> None:
    settings = (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "docs/programs/other_hosts.py" in re.findall(
        r"^hooks: \[(.*)\]$", settings, re.MULTILINE
    )[0].split(", ")
    assert list(other_hosts.references(CHECKOUT / "docs")) == []
