"""What whoever hosts this needs: workflows run the Makefile's commands, releases and Pythons; the
tests' order.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from interpreters import CHECKOUT, environment, run

import nemo_patches

pytestmark = pytest.mark.one_nemo

MAKEFILE = (CHECKOUT / "Makefile").read_text()
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (CHECKOUT / ".github" / "workflows").glob("*.yml")
}


def variable(name: str) -> list[str]:
    (values,) = re.findall(rf"^{name} \??= (.+)$", MAKEFILE, re.MULTILINE)
    return str(values).split()


def steps(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_they_run_what_the_makefile_has() -> None:
    commands = [
        step["run"]
        for name in ("ci", "matrix")
        for step in steps(WORKFLOWS[name])
        if "run" in step
    ]
    as_root = 'sudo env "PATH=$PATH" '
    made = [
        command.partition("  #")[0].removeprefix(as_root)
        for command in commands
        if "make " in command and "matrix." not in command
    ]
    assert made == [
        "make test",
        "make test-hosts",
        "make test-pythons",
        "make test-slurm",
        "make docs",
        "make screenshots",
    ]
    released = [step.get("run", "") for step in steps(WORKFLOWS["release"])]
    assert 'make check-tag TAG="$GITHUB_REF_NAME"' in released
    assert "make test-wheel" in released
    assert "make stacks.pyz && cp .venv/stacks.pyz .venv/wheel/dist/" in released
    for target in WORKFLOWS["matrix"]["jobs"]["nemo"]["strategy"]["matrix"]["target"]:
        assert f"$(MATRIX:%={target}-%)" in MAKEFILE


def test_a_tag_that_is_not_this_version_ends_a_release() -> None:
    def code(tag: str) -> int:
        command: list[str | Path] = ["make", "-s", "check-tag", f"TAG={tag}"]
        return run(command, environment(), cwd=CHECKOUT).returncode

    assert code(f"v{nemo_patches.__version__}") == 0
    assert [code(tag) for tag in ("v9.9.9", nemo_patches.__version__, "")] == [2, 2, 2]


def test_every_action_is_pinned_by_its_commit() -> None:
    pinned = re.compile(r"actions/[a-z-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    for path in (CHECKOUT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (.*)$", path.read_text(), re.MULTILINE)
        assert [one for one in used if not pinned.fullmatch(one)] == [], path.name


def test_an_issue_has_what_both_commands_print() -> None:
    (path,) = (CHECKOUT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    fields = yaml.safe_load(path.read_text())["body"]
    asked = {
        field["attributes"].get("label")
        for field in fields
        if field.get("validations", {}).get("required")
    }
    wanted = {"`nemo-patches status --json`", "`nemo-patches diagnose --json`"}
    assert wanted <= asked


def test_on_the_makefiles_releases_and_pythons() -> None:
    assert WORKFLOWS["matrix"]["jobs"]["nemo"]["strategy"]["matrix"][
        "nemo"
    ] == variable("MATRIX")
    pythons = {
        job: str(WORKFLOWS["ci"]["jobs"][job]["steps"][1]["with"]["python-version"])
        for job in ("pythons", "test")
    }
    assert pythons["pythons"].split()[:-1] == variable("PYTHONS")
    assert pythons["test"].split()[:-1] == [
        variable("PYTHONS")[0],
        variable("PYTHONS")[-1],
    ]
    weekly = WORKFLOWS["matrix"]["jobs"]["pythons"]
    assert weekly["strategy"]["matrix"]["python"] == variable("PYTHONS")
    assert weekly["steps"][-1]["run"] == "make test-nemo-python-${{ matrix.python }}"
    assert "test-nemo-python-%:" in MAKEFILE
    for target in WORKFLOWS["matrix"]["jobs"]["others"]["strategy"]["matrix"]["target"]:
        assert f"\n{target}: " in MAKEFILE


def test_the_files_that_come_first_are_there() -> None:
    tests = CHECKOUT / "tests"
    (longest,) = re.findall(
        r"^LONGEST = \((.*?)^\)",
        (tests / "conftest.py").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    there = {file.stem for file in tests.rglob("test_*.py")}
    assert [
        name for name in re.findall(r'"(\w+)"', longest) if f"test_{name}" not in there
    ] == []


def test_what_the_wheels_environment_lacks_is_tested_in_nemos() -> None:
    """A test that is marked `wheel` and is skipped without torch would else be run nowhere."""
    asks = ("importorskip(", "find_spec(", "beside_nemo", "NeMo is not installed")
    for path in (CHECKOUT / "tests").rglob("test_*.py"):
        text = path.read_text()
        marks = "".join(re.findall(r"^pytestmark = (.*)$", text, re.MULTILINE))
        if "mark.wheel" not in marks and not path.name.startswith("test_np"):
            continue
        for test in ast.parse(text).body:
            source = ast.get_source_segment(text, test) or ""
            if not isinstance(test, ast.FunctionDef) or not test.name.startswith(
                "test_"
            ):
                continue
            decorated = "".join(ast.unparse(one) for one in test.decorator_list)
            if any(word in source + decorated for word in asks):
                assert "mark.installed" in decorated + marks, (
                    f"{path.name}: {test.name}"
                )


def test_a_stage_of_make_test_is_one_line_with_what_to_run_again(
    tmp_path: Path,
) -> None:
    stages = tmp_path / "stages"
    failing = tmp_path / "test_it.py"
    failing.write_text(
        "import pytest\n@pytest.mark.parametrize('name', ['a b'])\n"
        "def test_(name): assert 0\n"
    )
    variables = environment(CHECKOUT / "tests", STAGE_LOG=str(stages))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-n", "2"]
    done = run([*command, "test_it.py"], variables, cwd=tmp_path)
    assert done.returncode == 1
    made = ["make", "-s", "stage-check-tag", "TAG=v9.9.9", f"STAGES={stages}"]
    assert run([*made], environment(), cwd=CHECKOUT).returncode == 2
    again, stage = stages.read_text().splitlines()
    assert re.fullmatch(r" +0 min \d\d s  FAILED  check-tag", stage)
    again = again.removeprefix("  again: ")
    assert again in done.stdout
    assert "1 failed" in run(["bash", "-c", again], environment()).stdout


def test_every_job_has_a_time_limit_and_no_more_rights_than_it_needs() -> None:
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values()), (
            name
        )
