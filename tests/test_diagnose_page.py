"""The page of `diagnose --html`: what it shows, that it shows texts as texts, and the page in a real
browser.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from interpreters import as_ordinary_user, environment, python, run
from simulated_job import Call, Event, Exit, Killed, steps
from simulated_traces import write
from test_one_folder import KEY_ERROR, READS, WAITS
from typer.testing import CliRunner

from nemo_patches.cli import app
from nemo_patches.tools.diagnose import conditions
from nemo_patches.tools.diagnose.judge import judge
from nemo_patches.tools.diagnose.page import ELSEWHERE, Lane, ShownJob, page
from nemo_patches.tools.diagnose.page_content import content_of
from nemo_patches.tools.diagnose.rank_facts import (
    Condition,
    Evidence,
    Fact,
    Motion,
    Place,
    ProcessRank,
)
from nemo_patches.tracing import records

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
HOSTILE = (
    "</script></title></style><script>parent.attacked = 1</script>"
    '<img src=x onerror="parent.attacked = 1"> \' " & &lt; --> ]]>'
)
UNSEEN = "\u202e\u2066\x00\x07\x1b\u200b"  # reorder text, or are not shown
VOID = {"meta", "img", "br", "link", "input", "hr"}


@dataclass
class Element:
    """text: its own and its children's."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str = "", kind: str = "") -> list[Element]:
        """Those in it, in their order."""
        found = []
        for one in self.children:
            kinds = one.attributes.get("class", "").split()
            if (not tag or one.tag == tag) and (not kind or kind in kinds):
                found.append(one)
            found += one.all(tag, kind)
        return found


class Parsed(HTMLParser):
    """A page as a browser reads it; every element must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(text)
        self.close()
        assert self._open == [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data


def written(*given: Path, code: int = 1) -> tuple[str, Element]:
    """The page that the command writes of these: its text, and what is in it."""
    file = given[0].parent / "report.html"
    done = CliRunner().invoke(app, ["diagnose", *map(str, given), "--html", str(file)])
    assert (done.exit_code, done.stderr) == (code, "")
    return shown(file.read_text("utf-8"))


def shown(text: str) -> tuple[str, Element]:
    is_safe(text)
    return text, Parsed(text).root


def is_safe(text: str) -> None:
    """No script, no other file, and no markup but the page's own."""
    root = Parsed(text).root
    tags = {one.tag for one in root.all()}
    assert not tags & {"script", "img", "iframe", "object", "link", "base", "form", "a"}
    for one in root.all():
        assert not {"src", "href", "srcdoc", "action"} & one.attributes.keys()
        assert not [name for name in one.attributes if name.startswith("on")]
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert not [each for each in UNSEEN if each in text]
    [policy] = [one for one in root.all("meta") if "http-equiv" in one.attributes]
    assert policy.attributes["content"].startswith("default-src 'none'; style-src")
    assert "script-src" not in policy.attributes["content"]


def lanes(root: Element) -> list[Element]:
    """Of the first figure."""
    [figure, *_] = root.all("ol", "lanes")
    return [one for one in figure.children if "axis" not in one.attributes["class"]]


def share_of_time(lane: Element, kind: str) -> float:
    [block] = lane.all("rect", kind)
    return float(block.attributes["width"].rstrip("%")) / 100


def stuck(
    size: int, odd: int, calls: int = 30, pause: float = 0.1
) -> list[list[Event]]:
    """Rank `odd` does not come to the last call; the others report it a minute later."""
    return [steps(calls - (rank == odd), pause=pause) for rank in range(size)]


def test_the_page_has_the_verdict_the_lanes_the_stacks_and_the_lines(
    tmp_path: Path,
) -> None:
    job = write(tmp_path / "job", stuck(3, 1))
    (job / "train.log").write_text("\n\n" + KEY_ERROR.replace("rank2", "rank1"))
    _, root = written(job)
    [title] = root.all("h1")
    assert title.text.startswith("Rank 1 raised KeyError: 'audio' in read (data.py:41)")
    first, odd, last = lanes(root)
    assert odd.attributes["class"] == "named"
    # Its own reports come after what the log tells.
    assert odd.all("rect")[0].attributes["class"] == "unknown"
    assert odd.all("div", "state")[0].text.startswith(
        "it raised an exception, KeyError"
    )
    for lane in (first, last):
        assert lane.all("div", "state")[0].text == "waits in a collective"
    assert "rank 1" in [one.text for one in root.all("b", "ranks")]
    [line] = root.all("ol", "cites")[0].children
    assert line.all("cite")[0].text == "train.log:6"
    assert line.all("pre")[0].text == "[rank1]: KeyError: 'audio'"


def test_a_stall_fills_the_lanes_to_the_last_record(tmp_path: Path) -> None:
    """Of 3 s of training and a minute's stall."""
    _, root = written(write(tmp_path / "job", stuck(3, 1)))
    first, odd, last = lanes(root)
    assert share_of_time(odd, "elsewhere") > 0.6
    for lane in (first, last):
        assert share_of_time(lane, "waits-at-end") > 0.5
        assert [mark.text for mark in lane.all("span", "mark")] == ["▼", "◆"]
    assert "named" in odd.attributes["class"]
    said = first.all("svg")[0].attributes["aria-label"]
    assert "s in length syncs; gave up a length sync at 0:" in said
    assert "it waits for others" in said


def test_the_lane_of_a_rank_that_has_ended_ends_there(tmp_path: Path) -> None:
    """By an exception, or by SIGKILL; the others report a stall a minute later."""
    for name, end in (("a", [Call(raises="ValueError"), Exit()]), ("b", [Killed()])):
        schedules = [steps(21), [*steps(20), *end], steps(21)]
        _, root = written(write(tmp_path / name, schedules))
        _, odd, last = lanes(root)
        assert "named" in odd.attributes["class"] and not odd.all("rect")
        assert [mark.text for mark in odd.all("span", "mark")] == ["✕■"][: len(end) - 1]
        assert float(last.all("rect")[0].attributes["width"].rstrip("%")) > 60


def test_the_stall_of_a_long_job_has_a_figure_of_its_own(tmp_path: Path) -> None:
    """Of an hour; else the stall would be some pixels."""
    _, root = written(write(tmp_path / "job", stuck(3, 1, calls=1800, pause=2.0)))
    assert len(root.all("ol", "lanes")) == 2
    assert share_of_time(lanes(root)[1], "elsewhere") > 0.3
    [details] = [one for one in root.all("details") if one.all("ol", "lanes")]
    assert details.all("summary")[0].text.startswith("The whole time, 1:0")


def test_ranks_at_one_place_are_one_branch_with_the_ranks_that_are_there(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job"
    job.mkdir()
    for rank in range(3):
        text = READS if rank == 1 else WAITS
        (job / f"rank{rank}.txt").write_text(text.format(pid=100 + rank))
    _, root = written(job)
    [tree, *_] = root.all("ul", "tree")
    [whole] = tree.children
    assert [one.text for one in whole.all("b", "ranks")] == [
        "ranks 0-2",
        "rank 1",
        "ranks 0, 2",
    ]
    frames = [
        [frame.text for frame in one.children] for one in root.all("ol", "frames")
    ]
    assert frames == [
        ["<module> (train.py:90)"],
        ["read (data.py:41)"],
        ["training_step (train.py:41)", "all_reduce (distributed_c10d.py:2806)"],
    ]
    is_open = ["open" in one.attributes for one in whole.all("details")]
    assert is_open == [False, True, False]  # where the named rank is
    assert "No source has times" in root.text and not root.all("ol", "lanes")


def seen(
    rank: int, *values: object, host: str = "node0", at: float = 1e9
) -> list[Fact]:
    """As stacks that nemo-patches collects tell of it."""
    values = (ProcessRank(3, 100 + rank), Condition(conditions.RUNS), *values)
    cite = f"{host}, pid {100 + rank}"
    return [Fact(rank, value, cite, at, host) for value in values]  # type: ignore[arg-type]


def test_without_traces_the_lanes_are_as_long_as_the_waits(tmp_path: Path) -> None:
    """On hosts whose clocks are hours apart."""
    waits = Place("all_reduce (c10d.py:1)", "all_reduce", "train (train.py:41)")
    away = Place("read (data.py:41) < <module> (train.py:90)")
    facts = [
        *seen(0, waits, Motion(still_s=40.0)),
        *seen(1, away, Motion(still_s=80.0), host="node1", at=1e9 + 7200),
        *seen(2, waits, Motion(True, "another place")),
    ]
    evidence = Evidence(facts, world_size=3)
    _, root = shown(page([content_of(judge(evidence), evidence)]))
    first, odd, moved = lanes(root)
    assert share_of_time(first, "waits-at-end") == pytest.approx(0.5)
    assert share_of_time(odd, "elsewhere") == pytest.approx(1.0)
    assert "no record of its times" in moved.text


def test_64_ranks_have_a_lane_each_and_more_are_grouped(tmp_path: Path) -> None:
    text, root = written(write(tmp_path / "job", stuck(64, 17, calls=80)))
    assert len(lanes(root)) == 64
    assert len(text.encode()) < 1_000_000
    # As long as lanes can be: each cell of time unlike the next, in both figures.
    times = [2.0 * n for n in range(1000)]
    waits = [t + up for t in times for up in (0.0, 1.0 + t % 3 / 3)]
    most = Lane((0,), "x" * 300, "y" * 300, True, ELSEWHERE, 0.0, 2000.0, 2100.0)
    report = judge(Evidence(seen(0)))
    lanes_ = (replace(most, waits=waits, calls=times),) * 64
    assert 300_000 < len(page([ShownJob(report, lanes_)])) < 800_000
    text, root = written(write(tmp_path / "more", stuck(65, 17)))
    assert [one.all("b")[0].text for one in lanes(root)] == [
        "rank 17",
        "ranks 0-16, 18-64",
    ]
    # The share of the time that they waited, not the sum.
    heights = re.findall(
        r"V(-?\d+)", lanes(root)[1].all("path", "waits")[0].attributes["d"]
    )
    assert {int(one) for one in heights} <= set(range(17))


def test_nothing_of_a_file_becomes_markup(tmp_path: Path) -> None:
    """Of a trace, a log, stacks and their names."""
    name = (UNSEEN.replace("\0", "") + HOSTILE).replace("/", "|")[:120]
    job = tmp_path / name
    schedules = stuck(3, 1)
    schedules[2][-2:] = [Call(raises=HOSTILE + UNSEEN), Exit()]
    write(job, schedules)
    for file in [*job.iterdir()]:
        header, _, rest = file.read_bytes().partition(b"\n")
        told = records.encode(replace_header(header, host=HOSTILE + UNSEEN))
        file.write_bytes(told + rest)
    lines = [
        "[rank1]: Traceback (most recent call last):",
        f'[rank1]:   File "/job/{name}.py", line 41, in read',
        f"[rank1]: KeyError: '{HOSTILE}{UNSEEN}'",
        "x" * 300_000,
        "Epoch 1\rEpoch 2\r[rank2]: ValueError: <script>parent.attacked = 1</script>",
    ]
    data = "\n".join(lines).encode() + b" \xff\xfe<b>\n"
    (job / f"{name}.log").write_bytes(data)
    (job / "rank2.txt").write_text(READS.format(pid=7).replace("read", f"f{HOSTILE}"))
    text, root = written(job)
    assert root.all("h1")[0].text.startswith(f"Rank 1 raised KeyError: '{HOSTILE}")
    assert HOSTILE in lanes(root)[0].all("small")[0].text
    assert HOSTILE in root.all("pre")[0].text
    assert max(map(len, text.splitlines())) < 20_000


def replace_header(line: bytes, **fields: object) -> records.Header:
    return replace(msgspec.json.decode(line, type=records.Header), **fields)  # type: ignore[arg-type]


def test_a_line_is_told_from_others_with_its_number(tmp_path: Path) -> None:
    """Two logs of one name; one line is of a progress bar, and one is longer than what is kept."""
    job = tmp_path / "job"
    for node, rank in (("a", 0), ("b", 1)):
        (job / node).mkdir(parents=True)
        error = KEY_ERROR.replace("rank2", f"rank{rank}").splitlines()
        error[3] = f"\x1b[31m  7%|#\r{error[3]} of {node}\x1b[0m"
        text = "\n".join(["", "y" * 200_000, *error, ""])
        (job / node / "train.log").write_text(text)
    _, root = written(job)
    cites = root.all("ol", "cites")[0].children
    assert [one.all("cite")[0].text for one in cites] == [
        "train.log:6",
        "b/train.log:6",
    ]
    assert [one.all("pre")[0].text for one in cites] == [
        "[rank0]: KeyError: 'audio' of a",
        "[rank1]: KeyError: 'audio' of b",
    ]


def test_threads_of_dumps_are_no_lines_of_logs(tmp_path: Path) -> None:
    """Their frames are among the stacks."""
    job = tmp_path / "job"
    job.mkdir()
    dump = 'Process {0}: python train.py\n\nThread {0} (idle): "MainThread"\n    {1}\n'
    places = "all_reduce (torch/distributed/distributed_c10d.py:9)", "read (data.py:4)"
    text = "".join(dump.format(31 + rank, place) for rank, place in enumerate(places))
    (job / "train.log").write_text(text)
    page, _ = written(job)
    assert "data.py:4" in page
    assert "Thread 3" not in page


def test_where_nothing_is_found_the_page_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("hello\n")
    _, root = written(tmp_path / "x.log", code=2)
    assert root.all("h1")[0].text == "Nothing is recognised."
    assert [one.text for one in root.all("h2")] == []
    ended = [[*steps(20), Exit()]] * 2
    _, root = written(write(tmp_path / "job", ended), code=0)
    assert root.all("h1")[0].text.startswith("Nothing found. 2 of 2 ranks")
    assert [lane.all("span", "mark")[0].text for lane in lanes(root)] == ["■", "■"]


def test_times_that_no_clock_has_do_not_keep_the_page_from_being_written(
    tmp_path: Path,
) -> None:
    job = write(tmp_path / "job", stuck(3, 1))
    for file, started in zip(sorted(job.iterdir()), (1e300, -1e300, 0.0), strict=True):
        header, _, rest = file.read_bytes().partition(b"\n")
        rest += records.encode(records.Stalled(1e300, "", 0, [], [], [], waited=True))
        file.write_bytes(records.encode(replace_header(header, started=started)) + rest)
    text, root = written(job)
    assert len(lanes(root)) == 3 and not re.search(r"\b(?:nan|inf)\b", text)


def test_stacks_that_part_at_every_frame_are_shown(tmp_path: Path) -> None:
    facts = [
        fact
        for rank in range(300)
        for fact in seen(
            rank, Place("f (x.py:1)", way=("f (x.py:1)",) * rank + ("g (x.py:2)",))
        )
    ]
    evidence = Evidence(facts, world_size=300)
    _, root = shown(page([content_of(judge(evidence), evidence)]))
    assert "in other frames" in root.text


def test_a_page_that_cannot_be_written_is_one_line_that_names_it(
    tmp_path: Path,
) -> None:
    job = write(tmp_path / "job", stuck(3, 1))
    (tmp_path / "there.html").write_text("")
    (tmp_path / "there.html").chmod(0o400)
    for file, why in (
        ("no/x.html", "folder"),
        ("job", "directory"),
        ("there.html", "may not be written"),
    ):
        command = [sys.executable, "-m", "nemo_patches", "diagnose", job, "--html"]
        done = run(as_ordinary_user([*command, tmp_path / file]), environment())
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            f"nemo-patches diagnose: --html={tmp_path / file}: "
        )
        assert why in done.stderr and done.stderr.count("\n") == 1


def test_a_page_in_the_folder_is_no_evidence(tmp_path: Path) -> None:
    """It has the lines of logs in it."""
    (tmp_path / "train.log").write_text(KEY_ERROR)
    page = tmp_path / "report.html"
    command = ["diagnose", str(tmp_path), "--html", str(page), "--json"]
    first, second = (CliRunner().invoke(app, command).stdout for _ in range(2))
    assert page.exists() and first == second


def test_a_reader_that_stops_reading_has_the_page(tmp_path: Path) -> None:
    """`diagnose FOLDER --html FILE | head`: it is written before the report is printed."""
    job = write(tmp_path / "job", stuck(3, 1))
    program = (
        "import os, sys; from nemo_patches.cli import main\n"
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1)\n"
        f"sys.argv[1:] = ['diagnose', {str(job)!r}, '--html', {str(tmp_path / 'x.html')!r}]\n"
        "main()"
    )
    python("-c", program)
    assert "</html>" in (tmp_path / "x.html").read_text()


# In a browser

PROBE = """<!doctype html><title>probe</title><body><script>
const page = PAGE, widths = [1400, 390], told = [];
function look(width) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `border:0;width:${width}px;height:900px`;
    frame.srcdoc = page;
    frame.onload = () => {
        const inner = frame.contentDocument, view = frame.contentWindow;
        const closed = inner.querySelector("details:not([open])");
        if (closed) closed.firstElementChild.click();
        told.push({
            width, tooWide: inner.documentElement.scrollWidth - width,
            title: inner.querySelector("h1").textContent,
            lanes: [...inner.querySelectorAll(".lanes > li:not(.axis)")].map(
                (lane) => Math.round(lane.querySelector("svg").getBoundingClientRect().width)),
            opened: closed ? closed.open : null,
            asked: view.performance.getEntriesByType("resource").length,
            scripts: inner.scripts.length,
        });
        if (widths.length) look(widths.shift());
        else document.title = JSON.stringify({told, attacked: window.attacked ?? 0});
    };
    document.body.append(frame);
}
look(widths.shift());
</script>"""


def in_browser(text: str, folder: Path) -> Any:
    """What a browser makes of the page, as wide as a desktop and as a phone."""
    assert BROWSER is not None
    folder.mkdir()
    quoted = json.dumps(text).replace("<", "\\u003c")
    (folder / "probe.html").write_text(PROBE.replace("PAGE", quoted, 1))
    done = run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--disable-background-networking", "--disable-component-update"),
            *("--no-first-run", "--virtual-time-budget=20000"),
            f"--user-data-dir={folder / 'profile'}",
            (folder / "probe.html").as_uri(),
        ],
        environment(HOME=str(folder)),
        limit=180,
    )
    [title] = Parsed(done.stdout).root.all("title")[:1]
    return json.loads(title.text)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    job = write(tmp_path / "three", stuck(3, 1))
    (job / "train.log").write_text(
        KEY_ERROR.replace("'audio'", f"'{HOSTILE}' {'w' * 3000}")
    )
    of_three, _ = written(job)
    of_64, _ = written(write(tmp_path / "many", stuck(64, 17)))
    # What would be if a text were not escaped: the page's policy stops it, and nothing else.
    attacked = of_three.replace("<h1>", f"<p>{HOSTILE}</p><h1>", 1)
    unguarded = re.sub("<meta http-equiv[^>]*>", "", attacked)
    assert in_browser(unguarded, tmp_path / "d")["attacked"] == 1
    for name, text, count in (("a", of_three, 3), ("b", of_64, 64), ("c", attacked, 3)):
        told = in_browser(text, tmp_path / name)
        assert told["attacked"] == 0
        views = told["told"]
        assert [view["width"] for view in views] == [1400, 390]
        for view in views:
            assert view["tooWide"] <= 0
            assert len(view["lanes"]) == count and min(view["lanes"]) >= 340
            assert view["opened"] is True
            assert view["asked"] == 0 or name == "c"
            assert view["scripts"] == 0 or name == "c"
