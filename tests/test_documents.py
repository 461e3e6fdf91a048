"""README and documents: both languages say the same, and what they name (commands, settings, files)
exists.
"""

from __future__ import annotations

import dataclasses
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import typer.main
from diagnosing import report_of
from interpreters import CHECKOUT
from simulated_traces import write

from nemo_patches.cli import app
from nemo_patches.patching import DISABLE_VARIABLE, UNSUPPORTED_VARIABLE, admission
from nemo_patches.sync.settings import ALL_SETTINGS, Settings
from nemo_patches.tools import status
from nemo_patches.tools.diagnose import findings as ids
from nemo_patches.tools.diagnose.command import JSON_FORMAT

pytestmark = pytest.mark.one_nemo

MOST_LINES_OF_README = 90
README, CHINESE = CHECKOUT / "README.md", CHECKOUT / "README.zh-CN.md"
PAGES = sorted(
    page
    for where in ("*.md", "docs/*.md", "examples/*/*.md")
    for page in CHECKOUT.glob(where)
)
PAGES.remove(CHECKOUT / "CHANGELOG.md")  # which may name what has gone since
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT))
)
VARIABLES = {setting.variable for setting in ALL_SETTINGS} | {
    DISABLE_VARIABLE,
    UNSUPPORTED_VARIABLE,
}
COMMANDS: Any = typer.main.get_command(app)
CJK = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
HALF_WIDTH = "[,:;()?!]"


def code(page: Path) -> list[str]:
    """Every command of a code block, without its comments, and every piece of code in a sentence."""
    text = re.sub(
        r"^```.*?^```",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    pieces = re.findall(r"^ {4,}(\S.*)|`([^`]+)`", text, re.MULTILINE)
    code = [re.sub(r"(^| +)#.*", "", block) or inline for block, inline in pieces]
    return [piece for piece in code if piece]


def links(page: Path) -> list[str]:
    return re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_README


@pytest.mark.parametrize("readme", [README, CHINESE], ids=lambda page: page.name)
def test_a_fresh_machine_is_told_first_what_sets_up_everything(readme: Path) -> None:
    top = readme.read_text(encoding="utf-8").split("![")[0]
    assert "\n    make demo\n" in top
    assert "\n    make test\n" in top
    assert re.search("on no index yet|还没有发布到任何包索引", top)
    ci = (CHECKOUT / ".ci/run").read_text(encoding="utf-8")
    assert ci.endswith("\nexec make test\n")


def test_both_readmes_have_the_same_headings_commands_settings_and_links_in_the_same_order() -> (
    None
):
    def headings(page: Path) -> list[str]:
        return re.findall(r"^#+ ", page.read_text(encoding="utf-8"), re.MULTILINE)

    def tables(page: Path) -> list[int]:
        return [
            row.count("|")
            for row in re.findall(
                r"^\|.*", page.read_text(encoding="utf-8"), re.MULTILINE
            )
        ]

    assert headings(CHINESE) == headings(README)
    assert tables(CHINESE) == tables(README)
    assert code(CHINESE) == code(README)
    in_english = {link.replace(".zh-CN", "") for link in links(CHINESE)}
    assert in_english - {"README.md"} == set(links(README)) - {"README.zh-CN.md"}


def test_who_reads_chinese_is_sent_to_pages_in_chinese() -> None:
    for page in PAGES:
        own = page.name.replace(".zh-CN", "")  # the switch to English
        if own == page.name:
            continue
        for link in links(page):
            chinese = page.parent / link.replace(".md", ".zh-CN.md")
            assert (
                chinese == page.parent / link or link == own or not chinese.exists()
            ), (
                page,
                link,
            )


def rows(page: Path) -> list[list[str]]:
    """The cells of all tables."""
    found = re.findall(r"^\| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.split(r" \| ?", row) for row in found]


def facts(cell: str) -> tuple[list[str], list[str], list[str]]:
    """What a translation leaves as it is: code, reports and rules by number, levels, pages."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", cell)
    pages = re.findall(r"\]\(([\w./-]+\.md)", cell)
    return (
        sorted(re.findall(r"`([^`]+)`", cell)),
        sorted(re.findall(r"\d{2,}|INFO|WARNING|ERROR", prose)),
        sorted(page.replace(".zh-CN", "") for page in pages),
    )


@pytest.mark.wheel
@pytest.mark.parametrize("name", ["messages", "troubleshooting"])
def test_a_page_in_chinese_has_the_english_ones_rows_and_commands(name: str) -> None:
    english, chinese = (CHECKOUT / "docs" / f"{name}{of}.md" for of in ("", ".zh-CN"))
    assert len(rows(english)) > 20
    for row, translated in zip(rows(english), rows(chinese), strict=True):
        assert list(map(facts, translated)) == list(map(facts, row))
    for of_page in (r"^#+ ", r"^ {4,}nemo.*"):
        there, here = (
            re.findall(of_page, page.read_text(encoding="utf-8"), re.MULTILINE)
            for page in (english, chinese)
        )
        assert there == here


def chinese_paragraphs(text: str) -> list[str]:
    """Paragraphs, list items, rows and lines of code with Chinese in them; a piece of code stands
    as one character.
    """
    text = re.sub(r"\]\([^)\n]*\)", "]", text.strip())
    paragraphs = re.split(r"\n\n|\n(?=[-|#]| {4})", text)
    return [
        re.sub(r"`[^`]*`", "码", paragraph)
        for paragraph in paragraphs
        if re.search(CJK, paragraph)
    ]


@pytest.mark.wheel
@each_page
def test_chinese_has_full_width_punctuation_and_no_line_break_in_a_paragraph(
    page: Path,
) -> None:
    for paragraph in chinese_paragraphs(page.read_text(encoding="utf-8")):
        assert not re.search(f"{CJK} ?{HALF_WIDTH}|{HALF_WIDTH} ?{CJK}", paragraph), (
            paragraph
        )
        assert not re.search(f"{CJK}\n|\n *{CJK}", paragraph), (
            f"a line break is rendered as a space: {paragraph}"
        )


@pytest.mark.wheel
def test_chinese_in_the_program_has_full_width_punctuation() -> None:
    for source in (CHECKOUT / "nemo_patches").rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        assert not re.search(f"{CJK}{HALF_WIDTH}|{HALF_WIDTH}{CJK}", text), source


def test_the_numbers_of_the_readme_are_the_codes() -> None:
    text = README.read_text(encoding="utf-8")
    assert f"NeMo {admission.SUPPORTED}." in text
    assert f"the default is {Settings().timeout.seconds} s" in text
    assert text.count(f"after {Settings().stall_timeout.seconds} s") == 1
    (python,) = re.findall(
        r'^requires-python = ">=(.*)"$',
        (CHECKOUT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert f"Python {python} or later" in text


@each_page
def test_every_variable_of_ours_exists(page: Path) -> None:
    named = set(
        re.findall(
            r"NEMO_PATCHES_[A-Z]+(?:_[A-Z]+)*\b", page.read_text(encoding="utf-8")
        )
    )
    assert named <= VARIABLES


@each_page
def test_every_command_of_ours_exists_with_its_options(page: Path) -> None:
    for line in code(page):
        for words in re.findall(
            r"(?:(?<!/)nemo-patches|-m nemo_patches) ([a-z].*)", line
        ):
            name, *given = words.split(" -- ")[0].split()
            assert name in COMMANDS.commands, line
            known = {
                "--help",
                *(
                    option
                    for each in COMMANDS.commands[name].params
                    for option in each.opts
                ),
            }
            assert {
                word.split("=")[0] for word in given if re.match(r"--?[a-z]", word)
            } <= known, line


@each_page
def test_every_make_target_exists(page: Path) -> None:
    phony = " ".join(
        re.findall(r"^\.PHONY:(.*)", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    )
    families = tuple(re.findall(r"=([a-z-]+)%\)", phony))  # matrix-%, for every release
    for line in code(page):
        for target in re.findall(r"^make ([a-z][a-z.-]*)", line):
            assert target in phony.split() or target.startswith(families), target


@each_page
def test_every_file_that_is_linked_is_there(page: Path) -> None:
    assert [link for link in links(page) if not (page.parent / link).exists()] == []


@each_page
def test_every_file_that_code_names_is_there(page: Path) -> None:
    for piece in code(page):
        for name in re.findall(
            r"(?<![\w/])((?:docs|tests|benchmarks|examples|nemo_patches)/[\w/.-]+\.\w+)",
            piece,
        ):
            of_nemo = name.startswith(("tests/collections/", "tests/.data/"))
            assert of_nemo or (CHECKOUT / name).is_file(), name


def program_of_the_documents(name: str) -> Any:
    spec = spec_from_file_location(name, CHECKOUT / "docs" / "programs" / f"{name}.py")
    assert spec and spec.loader
    program = module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def test_what_is_generated_is_what_make_reference_writes() -> None:
    program = program_of_the_documents("reference")
    assert len(program.PAGES) == 2
    for page in program.PAGES:
        text = page.read_text(encoding="utf-8")
        assert program.written(page) == text, "run `make reference`"


def test_every_message_that_is_explained_is_in_the_code() -> None:
    page = (CHECKOUT / "docs" / "messages.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \| [A-Z]", page, re.MULTILINE)
    sources = [
        path.read_text(encoding="utf-8")
        for path in (CHECKOUT / "nemo_patches").rglob("*.py")
    ]
    # Texts that go on in the next line.
    code = "\n".join(re.sub(r'"\s*\n\s*f?"', "", source) for source in sources)
    pieces = [
        piece.strip(" :") for message in messages for piece in message.split("...")
    ]
    assert len(messages) > 10
    assert [piece for piece in pieces if piece not in code] == []


def test_every_verdict_has_its_row() -> None:
    page = (CHECKOUT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    table = page.split("## What does a verdict mean?")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == sorted(
        ids.ORDER
    )


def first_cells(page: str, heading: str) -> set[str]:
    """The fields in the table of `--json` under this heading."""
    text = (CHECKOUT / "docs" / page).read_text(encoding="utf-8")
    table = (
        text.split(heading)[1].split("\n## ")[0].split("| field |")[1].split("\n\n")[0]
    )
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def names(of: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(of)}


def test_the_table_of_diagnose_json_has_each_field_and_no_other() -> None:
    of_all = {"format", "exit_code", "error"}
    told = first_cells("for-agents.md", "## What do the fields mean?")
    assert {name for name in told if "[" not in name} == (
        names(ids.Diagnosis) - {"findings"} | of_all
    )
    of_findings = {name.partition(".")[2] for name in told if "[" in name}
    assert of_findings == names(ids.Finding)
    page = (CHECKOUT / "docs" / "for-agents.md").read_text(encoding="utf-8")
    assert f"| `format` | {JSON_FORMAT}; another number" in page
    (row,) = re.findall(r"^\| `ranks` \| (.*)", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == names(ids.RankSummary)
    ids_named = re.findall(r"`([a-z]+(?:-[a-z]+)+)`", page)
    assert len(ids_named) > 5
    assert set(ids_named) <= set(ids.ORDER)


def test_the_table_of_status_json_has_each_field_and_no_other() -> None:
    told = first_cells("auto-apply.md", "## Is it on?")
    assert told == names(status.EnvironmentStatus) | {"format", "error"}
    page = (CHECKOUT / "docs" / "auto-apply.md").read_text(encoding="utf-8")
    assert f"| `format` | {status.JSON_FORMAT}; another number" in page
    for field, of in (
        ("targets", status.TargetReport),
        ("settings", status.SettingReport),
    ):
        (row,) = re.findall(rf"^\| `{field}` \| (.*)", page, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row)) == names(of)


def test_the_picture_shows_what_its_caption_says(tmp_path: Path) -> None:
    write(tmp_path, program_of_the_documents("stalled_job").schedules())
    findings = {finding.id: finding for finding in report_of(tmp_path).findings}
    stuck, late = findings[ids.MISSING_RANK], findings[ids.LATE]
    assert (stuck.ranks, late.ranks) == ((5,), (5,))
    assert "training call 71 of" in stuck.text
    assert all(
        number in README.read_text(encoding="utf-8")
        for number in ("Rank 5 of 8", "call 38", "call 71")
    )


def test_slurms_restart_script_is_the_file_that_is_tested() -> None:
    page = (CHECKOUT / "docs" / "on-a-cluster.md").read_text()
    script = (CHECKOUT / "examples" / "slurm_restart.sh").read_text()
    assert f"```bash\n{script}```\n" in page
