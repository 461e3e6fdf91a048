"""examples/on_stall: each recipe does what it says with a report that a job has made, against a
server or a folder of this machine.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from interpreters import CHECKOUT

from nemo_patches.judging.missing_rank import MissingRank

pytestmark = pytest.mark.one_nemo
RECIPES = CHECKOUT / "examples" / "on_stall"
LIMIT_S = 60
TEXT = 'no encoder call for 60 s. rank 5 (node8, pid 4711): read "a" (data.py:41)'
REPORT = {
    "rank": 0,
    "time": 1780000000.5,
    "text": TEXT,
    "missing": [
        asdict(MissingRank(5, "elsewhere", 'no"de8', 4711)),
        asdict(MissingRank(6, "no heartbeat")),
    ],
}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        input=json.dumps(REPORT),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@contextmanager
def webhook(status: int) -> Iterator[tuple[str, list[Any]]]:
    """A server's address, and what it has been sent."""
    got: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/services/secret", got
    server.shutdown()
    server.server_close()
    thread.join(LIMIT_S)


@pytest.mark.parametrize(("status", "is_fine"), [(200, True), (500, False)])
def test_a_webhook_gets_the_line(status: int, is_fine: bool) -> None:
    with webhook(status) as (address, got):
        done = run("sh", str(RECIPES / "webhook.sh"), STALL_WEBHOOK=address)
    assert (done.returncode == 0) == is_fine, done.stderr
    assert got == [("/services/secret", "application/json", {"text": TEXT})]
    assert "secret" not in done.stdout + done.stderr


def test_without_an_address_the_webhook_says_so() -> None:
    done = run("sh", str(RECIPES / "webhook.sh"), STALL_WEBHOOK="")
    assert done.returncode != 0
    assert "STALL_WEBHOOK: is not set" in done.stderr


def test_node_exporter_gets_each_missing_rank(tmp_path: Path) -> None:
    for _ in range(2):  # the second report replaces the first
        done = run(
            sys.executable,
            str(RECIPES / "node_exporter.py"),
            STALL_TEXTFILES=str(tmp_path),
        )
        assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["nemo_patches.prom"]
    lines = (tmp_path / "nemo_patches.prom").read_text().splitlines()
    sample = re.compile(
        r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\["\\n])*",?)+\})? [0-9.]+|# (HELP|TYPE) \S+ .+'
    )
    assert all(map(sample.fullmatch, lines)), lines
    assert [line for line in lines if line[0] != "#"] == [
        r'nemo_patches_stall{rank="5",kind="elsewhere",host="no\"de8"} 1',
        'nemo_patches_stall{rank="6",kind="no heartbeat",host=""} 1',
        "nemo_patches_stall_time_seconds 1780000000.5",
    ]


def test_wandb_is_given_the_alert(tmp_path: Path) -> None:
    """Offline: the same client writes what it would send into a file."""
    pytest.importorskip("wandb")
    done = run(
        sys.executable,
        str(RECIPES / "wandb_alert.py"),
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
        WANDB_PROJECT="speech",
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    sent = file.read_bytes()
    assert b"missing ranks: 5, 6" in sent
    assert b"no encoder call for 60 s. rank 5" in sent


def test_a_recipe_has_its_row_in_the_documents() -> None:
    page = (CHECKOUT / "docs" / "stalls.md").read_text(encoding="utf-8")
    for recipe in RECIPES.iterdir():
        assert f"examples/on_stall/{recipe.name}" in page
