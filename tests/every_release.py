"""Every diff in patches/ against every release of its series on PyPI, as a markdown table: `make patches-table`.

In a copy of NeMo's files the parts go in one after the other: sync and nemo, which is the core, then stall. Each must
apply with both tools without fuzz, change what it should and nothing else, give files that compile and are what
`nemo-patches diff` makes of that very release; and then go away again, one by one, without a trace. A cell is "yes" or
says what is wrong, and then the exit code is 1. No torch and no pytest; nothing of NeMo is run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_patches.patching.targets import TARGETS
from nemo_patches.vendoring import checkouts, parts
from nemo_patches.vendoring.edit import path_of
from nemo_patches.vendoring.errors import DiffError
from nemo_patches.vendoring.parts import FOLDER, Part

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("series", "release", "git apply", "patch -p1", "reversed", "compiles", "same as `nemo-patches diff`")
TARGET_FILES = {path_of(target) for target in TARGETS}
# What is copied: more than the diffs touch, so that a file too many would be seen.
FOLDERS = {str(Path(path).parent) for path in (*TARGET_FILES, FOLDER)}
TOOLS = {
    "git apply": (("git", "apply", "--check", "-"), ("git", "apply", "-")),
    "patch -p1": (("patch", "-p1", "--fuzz=0", "--force"),),  # --force: no questions
}

Tree = dict[str, bytes | None]  # of every path in a folder: a file's content, None for a folder
Problems = dict[str, list[str]]  # by column


class Failure(Exception):
    """What is wrong, in a few words."""


def main() -> int:
    patches = ROOT / "patches"
    numbered = sorted((file.stem.removeprefix("nemo-") for file in patches.glob("nemo-*.diff")), key=_numbers)
    try:
        released = _released()
    except Failure as failure:
        rows = [_row(series, "", f"found no list of releases: {failure}") for series in numbered]
    else:
        todo = [(series, release) for series in numbered for release in released if _is_of(series, release)]
        with ThreadPoolExecutor(4) as pool:
            rows = list(pool.map(lambda one: _check(*one), todo))
        without = set(numbered) - {series for series, _ in todo}
        rows += [_row(series, "", "found no release") for series in sorted(without, key=_numbers)]
    for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows):
        print(f"| {' | '.join(cells)} |")
    return 0 if rows and all(cell == "yes" for row in rows for cell in row[2:]) else 1


def _released() -> list[str]:
    """The final releases, oldest first."""
    listed = _run(sys.executable, "-m", "pip", "index", "versions", "nemo_toolkit", timeout=120)
    versions = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    if not versions:
        raise Failure("pip index names no versions")
    final = [version for version in versions[1].split(", ") if re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", version)]
    return sorted(final, key=_numbers)


def _check(series: str, release: str) -> tuple[str, ...]:
    """The row of one release."""
    print(f"nemo_toolkit {release}", file=sys.stderr)
    names = {Part.SYNC: "runtime-sync", Part.NEMO: f"nemo-{series}", Part.STALL: "runtime-stall"}
    diffs = {part: ROOT / "patches" / f"{name}.diff" for part, name in names.items()}  # in the order of application
    problems: Problems = {column: [] for column in COLUMNS[2:]}
    with tempfile.TemporaryDirectory() as folder:
        stock = Path(folder, "stock")
        try:
            _copy(_unpacked(release, Path(folder, "unpacked")), stock)
            if (found := checkouts.read(stock).version) != release:
                raise Failure(f"these are the files of {found}")
        except (Failure, DiffError, OSError) as failure:
            return _row(series, release, f"no files: {failure}")
        for tool in TOOLS:
            _put_in_and_take_out(tool, diffs, stock, shutil.copytree(stock, Path(folder, tool)), problems)
    return (series, release, *(_cell(*found) for found in problems.values()))


def _put_in_and_take_out(tool: str, diffs: dict[Part, Path], stock: Path, copy: Path, problems: Problems) -> None:
    """Every diff with one tool, in order, and back; what is wrong goes into the columns."""
    trees = [_tree(copy)]
    for part, diff in diffs.items():
        try:
            for command in TOOLS[tool]:
                _run(*command, cwd=copy, stdin=diff)
        except Failure as failure:
            problems[tool].append(f"{diff.name}: {failure}")
            for column in COLUMNS[4:]:
                problems[column].append(f"{tool}: {diff.name} not applied")
            return
        trees.append(_tree(copy))
        found = {
            tool: _names(_changed(*trees[-2:]) ^ _expected(trees[0], part)),
            "compiles": _not_compiling(*trees[-2:]),
            COLUMNS[-1]: _not_as_made(stock, trees[-1], part),
        }
        for column, problem in found.items():
            problems[column] += [f"{tool}: {diff.name}: {problem}"] * bool(problem)
    for diff in reversed(diffs.values()):
        trees.pop()
        try:
            for command in TOOLS[tool]:
                _run(*command[:2], "-R", *command[2:], cwd=copy, stdin=diff)
            problem = _names(_changed(trees[-1], _tree(copy)))
        except Failure as failure:
            problem = str(failure)
        problems["reversed"] += [f"{tool}: {diff.name}: {problem}"] * bool(problem)


def _unpacked(release: str, place: Path) -> Path:
    """A folder with the release, which is only read: what make has unpacked, or else downloaded to `place`."""
    there = ROOT / ".venv" / "unpacked" / f"nemo-{release}"
    if (there / "ready").is_file():
        return there
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-compile")
    _run(*pip, "--target", str(place), f"nemo_toolkit=={release}", timeout=300)
    return place


def _copy(source: Path, to: Path) -> None:
    for folder in FOLDERS:
        if (source / folder).is_dir():
            shutil.copytree(source / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "nemo" / "package_info.py", to / "nemo")


def _tree(folder: Path) -> Tree:
    paths = sorted(folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes() for path in paths}


def _changed(before: Tree, after: Tree) -> set[str]:
    """What is new, gone or different."""
    missing = object()
    return {path for path in before | after if before.get(path, missing) != after.get(path, missing)}


def _expected(stock: Tree, part: Part) -> set[str]:
    """What a part should change in a release: the encoders' files that it has; or our folder's, which are new."""
    if part is Part.NEMO:
        return TARGET_FILES & stock.keys()
    return {f"{FOLDER}/{part.value}", *parts.own_files(part)} | ({FOLDER} if part is Part.SYNC else set())


def _not_compiling(before: Tree, after: Tree) -> str:
    for path in sorted(_changed(before, after)):
        source = after.get(path)
        if source is not None:
            try:
                compile(source, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                return f"{path}: {error}"
    return ""


def _not_as_made(stock: Path, after: Tree, part: Part) -> str:
    try:
        made = checkouts.read(stock).edits(frozenset({part}))
    except DiffError as error:
        return str(error)
    return _names({edit.path for edit in made if after.get(edit.path) != edit.after})


def _run(*command: str, cwd: Path | None = None, stdin: Path | None = None, timeout: float = 60) -> str:
    """What it prints. Raises Failure if it fails, does not end in time or is not there."""
    environment = os.environ | {"LC_ALL": "C", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    if cwd:
        environment["GIT_CEILING_DIRECTORIES"] = str(cwd.resolve().parent)  # no repository around it matters
    try:
        with open(stdin or os.devnull, "rb") as given:
            done = subprocess.run(
                command,
                cwd=cwd,
                env=environment,
                stdin=given,
                capture_output=True,
                timeout=timeout,
                text=True,
                errors="replace",
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(str(error)) from error
    if done.returncode:
        lines = (done.stderr + done.stdout).splitlines()
        telling = [line for line in lines if re.search("error|failed", line, re.IGNORECASE)] or lines
        raise Failure(" ".join(" ".join(telling).split()) or f"exit code {done.returncode}")
    return done.stdout


def _is_of(series: str, release: str) -> bool:
    return release.startswith(f"{series}.")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _names(paths: set[str]) -> str:
    return f"not as expected: {', '.join(sorted(paths))}" if paths else ""


def _row(series: str, release: str, problem: str) -> tuple[str, ...]:
    return (series, release, _cell(problem), *("",) * (len(COLUMNS) - 3))


def _cell(*problems: str) -> str:
    said = "; ".join(problem for problem in problems if problem)
    return "no: " + said[:400].replace("|", "\\|") if said else "yes"


if __name__ == "__main__":
    sys.exit(main())
