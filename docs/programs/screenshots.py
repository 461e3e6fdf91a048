"""Take a picture of every page of the built site, as wide as on a desktop and on a phone, and say
what is cut off.

    .venv/docs/bin/python docs/programs/screenshots.py .venv/site .venv/screenshots

Needs playwright and an installed Chromium or Chrome. The exit code is 1 where a reader cannot get
to all of a page, where a command in a table breaks in the middle, or where a page asks another host
for something.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import Request, sync_playwright

WIDTHS = (1400, 390)  # CSS pixels
HEIGHT = 900
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_MS = 60_000  # of one page

PROBLEMS = """() => {
    const found = [];
    const scrolls = (box) => ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    const text = (box) => (box.textContent || box.src || "").trim().slice(0, 60);
    const shown = (box) => `<${box.localName}> ${text(box)}`;
    const boxes = "article :is(pre, code, table, td, img, p, li, h1, h2, h3)";
    const commands = "td code.short, code > span:not([class], [id])";
    if (document.documentElement.scrollWidth > innerWidth)
        found.push("the page is wider than the window");
    for (const box of document.querySelectorAll(boxes)) {
        let around = box;
        while (around && !scrolls(around)) around = around.parentElement;
        if (!around && box.getBoundingClientRect().right > innerWidth + 1)
            found.push(`cut off: ${shown(box)}`);
        if (getComputedStyle(box).overflowX === "hidden" && box.scrollWidth > box.clientWidth + 1)
            found.push(`its end is hidden: ${shown(box)}`);
    }
    for (const command of document.querySelectorAll(commands))
        if (command.getClientRects().length > 1)
            found.push(`breaks in the middle: ${shown(command)}`);
    return found;
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def main(site: Path, folder: Path) -> int:
    installed = next(filter(None, map(shutil.which, BROWSERS)), None)
    if installed is None:
        print(
            f"screenshots: no browser; one of these must be on the PATH: {', '.join(BROWSERS)}",
            file=sys.stderr,
        )
        return 2
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=site)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}/"
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    count = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=installed, args=["--no-sandbox"]
        )
        for width in WIDTHS:
            window = browser.new_page(viewport={"width": width, "height": HEIGHT})
            window.set_default_timeout(LIMIT_MS)
            window.on("request", note)
            for page in sorted(path.name for path in site.glob("*.html")):
                asked.clear()
                window.goto(here + page)
                window.screenshot(
                    path=folder / f"{Path(page).stem}-{width}.png", full_page=True
                )
                problems = window.evaluate(PROBLEMS)
                problems += [
                    f"asks another host: {url}"
                    for url in asked
                    if not url.startswith((here, "data:"))
                ]
                count += len(problems)
                for problem in problems:
                    print(f"{page} at {width} px: {problem}")
        browser.close()
    print(f"{folder}: {len(list(folder.iterdir()))} pictures, {count} problems")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
