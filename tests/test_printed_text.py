"""Text of another rank, of the store or of a file is one short line wherever it is printed, and
steers no terminal.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from interpreters import CHECKOUT, environment, run
from rank_states import state
from ranks import wait_until
from simulated_traces import Setup, file_name, header

from nemo_patches.channel import meeting
from nemo_patches.channel.exchange import Exchange
from nemo_patches.channel.link import REGISTER, Link
from nemo_patches.channel.rounds import RoundFailed
from nemo_patches.judging.answer import Answer
from nemo_patches.judging.missing_rank import ELSEWHERE, MissingRank
from nemo_patches.judging.read_facts import read_facts
from nemo_patches.sync import rank_log
from nemo_patches.text import first_line, safe
from nemo_patches.tools.doctor import ranks, ranks_facts
from nemo_patches.tracing import records

pytestmark = pytest.mark.one_nemo

EVIL = {
    "escape": "a\x1b[2J\x1b]0;title\x07b",
    "8-bit escape": "a\x9b31mb",
    "forged line": "a\n2026-11-22 nemo_patches WARNING [rank 3/8 node7] forged",
    "other line ends": "a\rb\x0bc\x0cd\x85e\u2028f\u2029g",
    "bidi override": "a\u202egpj.exe\u2066b\u200b",
    "nothing": "a\x00b",
    "half a character": "a\ud800b",
    "markup": "[/red][link=https://example.org]a[/link]\x1b[0m",
    "1 MiB": "long" * (1 << 18),
}
evil = pytest.mark.parametrize("text", EVIL.values(), ids=list(EVIL))
LONGEST = 10_000  # of a line that is printed


def is_harmless(line: str) -> bool:
    return line.isprintable() and len(line) <= LONGEST


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    rank_log.logger.addHandler(handler)
    yield lines
    rank_log.logger.removeHandler(handler)


@evil
def test_a_log_line_is_one_line_whatever_it_is_made_of(
    text: str, said: list[str]
) -> None:
    rank_log.report(logging.WARNING, text)
    (line,) = said
    assert line.isprintable() and len(line) < (1 << 16) + 1000
    assert is_harmless(first_line(RuntimeError(text)))
    assert is_harmless(safe(text)) and safe("as it is: ü, 語") == "as it is: ü, 語"


@evil
def test_what_keeps_another_rank_from_taking_part_is_printed_safely(text: str) -> None:
    """Rank 1 tells rank 0 its host and its trouble: both end up in lines of all ranks."""
    store, said = dist.HashStore(), list[str]()
    exchange = Exchange(lambda: store, 0, 2, said.append)
    rounds = exchange.rounds("encoder")
    rounds.issue(5)
    wait_until(lambda: store.check([meeting.ROOT_KEY]))
    found = meeting.find_root(store)
    assert found is not None
    root, token = found
    link = Link.opened(root.address, root.port, 1, 0, token)
    try:
        link.tell(
            REGISTER,
            {"member": [text[:200], "127.0.0.1", 1, 1, f"out of order: {text[:200]}"]},
        )
        wait_until(lambda: exchange.over or link.flush())  # once it is connected
        with pytest.raises(RoundFailed) as caught:
            rounds.wait(timedelta(seconds=60))
    finally:
        exchange.end()
        link.socket.close()
    assert str(caught.value).startswith("rank 1 cannot take part: out of order: ")
    assert is_harmless(str(caught.value))
    assert all(map(is_harmless, said))


@evil
def test_what_another_rank_says_of_itself_is_printed_safely(text: str) -> None:
    fields = (
        "host",
        "versions",
        "settings",
        "encoder",
        "where",
        "caller",
        "hook",
        "batch",
        "collective",
    )
    content = {
        **state(3).to_json(),
        **dict.fromkeys(fields, text),
        "rounds": {text: 1},
        "apart": {text: text},
    }
    told = read_facts(json.loads(json.dumps(content)))
    assert told is not None
    missing = MissingRank(
        3, ELSEWHERE, told.host, 1, 1, 1.0, told.where, batch=told.batch
    )
    assert is_harmless(Answer((missing,) * 4, safe(text)).text(8))
    assert all(
        map(
            is_harmless,
            (
                *(getattr(told, field) for field in fields),
                *told.rounds,
                *told.apart.values(),
            ),
        )
    )


def texts_in(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        yield from content
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from texts_in(item)
    elif isinstance(content, str):
        yield content


@evil
def test_the_doctor_prints_what_ranks_publish_safely(text: str) -> None:
    own = ranks.Facts(0, "node0", 1, {"nemo": "3.0.0"}, {"sync": "bounded"}, {})
    short = text if len(text) < 1000 else text[:20_000]  # so that all of it is taken
    other = ranks.Facts(
        1,
        short,
        2,
        {"nemo": short},
        {"sync": short},
        {short: short},
        {"batch_size": short},
    )
    store = dist.HashStore()
    for facts in (own, other):
        store.set(f"facts/{facts.rank}", json.dumps(msgspec.to_builtins(facts)))
    collected = ranks_facts._collect(store, 2, timedelta(seconds=5))
    # A launcher that starts all ranks again may keep the store.
    assert not store.check(["facts/0"])
    # Which is no JSON.
    assert collected[0] == own and (
        (1 in collected) == (text != EVIL["half a character"])
    )
    job = ranks.Ranks(2, timedelta(seconds=5), collected)
    assert all(map(is_harmless, job.lines()))
    assert all(map(is_harmless, texts_in(json.loads(json.dumps(job.as_json())))))
    for what in (
        lambda facts: facts.versions,
        lambda facts: facts.settings,
        lambda facts: facts.environment,
    ):
        assert all(
            is_harmless(name + values) for name, values in ranks.differing(job, what)
        )
    store.set("facts/0", json.dumps(msgspec.to_builtins(own)))
    store.set(
        "facts/1",
        json.dumps({**msgspec.to_builtins(own), "rank": 1, "host": "x" * (1 << 20)}),
    )
    assert list(ranks_facts._collect(store, 2, timedelta(seconds=5))) == [0]


@evil
def test_diagnose_prints_what_files_say_safely(text: str, tmp_path: Path) -> None:
    """The exception, the encoder, the host, the versions, and the places of ranks."""
    text = text if len(text) < 1000 else text[:20_000]  # as long as a record may be
    for rank in (0, 1):
        first = header(rank, 2, 1e9, Setup())
        lines: list[records.Record] = [
            replace(
                first,
                host=text,
                versions={
                    **first.versions,
                    text: f"{rank}{text}",
                    "nemo": f"{rank}{text}",
                },
            ),
            records.Enter(1e9 + 1, text, 1, True, [1, 80, 100], text, text),
            records.Stalled(1e9 + 2, text, 1, [1 - rank], [text], [text], text=text),
            records.Raised(1e9 + 3, text, 1, text, text, "\n".join([text] * 3)),
        ]
        (tmp_path / file_name(rank, 1e9)).write_bytes(
            b"".join(map(records.encode, lines))
        )
    (tmp_path / "an\x1b[2Jother").touch()
    command = [sys.executable, "-m", "nemo_patches", "diagnose", str(tmp_path)]
    shown = run(command, environment(CHECKOUT), cwd=tmp_path)
    assert shown.returncode == 1, shown.stderr
    assert "raised" in shown.stdout
    assert all(map(is_harmless, shown.stdout.split("\n")))
    content = json.loads(
        run([*command, "--json"], environment(CHECKOUT), cwd=tmp_path).stdout
    )
    assert all(map(is_harmless, texts_in(content)))
