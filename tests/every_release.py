"""Every diff in patches/ against every release of its series on PyPI, as a markdown table: `make
patches-table`.

In a copy of NeMo's files the diff goes in, by each tool and without fuzz. It must be what
`nemo-patches diff` makes of that very release, byte for byte where it was made from it, change what
it should and nothing else, compile, and go away again without a trace. A cell is "yes" or says what
is wrong, and then the exit code is 1. No torch and no pytest; nothing of NeMo is run.
`every_release.py RELEASE ...`, as of `make check-patches`, asks no index.
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

from nemo_patches.vendoring import checkouts, diffs
from nemo_patches.vendoring.checkouts import PATHS
from nemo_patches.vendoring.errors import DiffError

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (
    "series",
    "release",
    "git apply",
    "patch -p1",
    "git am",
    "reversed",
    "compiles",
    "as `nemo-patches diff`",
)
# What is copied: more than the diffs touch, so that a file too many would be seen.
FOLDERS = {str(Path(path).parent) for path in PATHS}
PERSON = ("-c", "user.name=A", "-c", "user.email=a@example.org")
IN = {
    "git apply": ("git", "apply", "--whitespace=nowarn"),
    "patch -p1": ("patch", "-p1", "--fuzz=0", "--force", "-i"),
    "git am": ("git", *PERSON, "am", "-q"),
}
OUT = {
    "git apply": ("git", "apply", "--whitespace=nowarn", "-R"),
    "patch -p1": ("patch", "-p1", "--fuzz=0", "--force", "-R", "-i"),
}

Tree = dict[str, bytes]


class Failure(Exception):
    """What is wrong, in a few words."""


def main() -> int:
    numbered = sorted(
        (
            file.stem.removeprefix("nemo-")
            for file in checkouts.DIFFS.glob("nemo-*.diff")
        ),
        key=_numbers,
    )
    try:
        released = sys.argv[1:] or _released()
        todo = [
            (series, release)
            for series in numbered
            for release in released
            if release.startswith(f"{series}.")
        ]
        with ThreadPoolExecutor(4) as pool:
            rows = list(pool.map(lambda one: _row(*one), todo))
        rows += [
            (series, "none", "no")
            for series in numbered
            if series not in {series for series, _ in todo}
        ]
    except Failure as failure:
        rows = [("", "", f"no: found no list of releases: {failure}")]
    for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows):
        print(f"| {' | '.join(cells)} |")
    return 0 if rows and all(cell == "yes" for row in rows for cell in row[2:]) else 1


def _released() -> list[str]:
    """The final releases, oldest first."""
    listed = _run(
        sys.executable, "-m", "pip", "index", "versions", "nemo_toolkit", timeout=120
    )
    versions = re.search(r"^Available versions: (.*)$", listed, re.MULTILINE)
    if not versions:
        raise Failure("pip index names no versions")
    final = [
        version
        for version in versions[1].split(", ")
        if re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", version)
    ]
    return sorted(final, key=_numbers)


def _row(series: str, release: str) -> tuple[str, ...]:
    diff = checkouts.DIFFS / f"nemo-{series}.diff"
    problems: dict[str, list[str]] = {column: [] for column in COLUMNS[2:]}
    with tempfile.TemporaryDirectory() as folder:
        stock = Path(folder, "stock")
        try:
            _copy(_unpacked(release, Path(folder, "unpacked")), stock)
            checkout = checkouts.read(stock)
            if checkout.version != release:
                raise Failure(f"these are the files of {checkout.version}")
            before = _tree(stock)
            planned = before | {edit.path: edit.after for edit in checkout.edits()}
            # Of another release of the series than it was made from, places and hashes may differ,
            # but no file.
            is_same = diff.read_bytes() == diffs.text(checkout) or sys.argv[1:] == []
        except (Failure, DiffError, OSError) as failure:
            return (
                series,
                release,
                _cell(f"no files: {failure}"),
                *["no"] * (len(COLUMNS) - 3),
            )
        for tool in IN:
            copy = shutil.copytree(stock, Path(folder, tool))
            try:
                if tool == "git am":
                    for command in (
                        ("init", "-q"),
                        ("add", "-A"),
                        ("commit", "-qm", "stock"),
                    ):
                        _run("git", *PERSON, *command, cwd=copy)
                _run(*IN[tool], str(diff), cwd=copy)
                after = _tree(copy)
                if tool == "git am":
                    _run("git", *PERSON, "revert", "--no-edit", "HEAD", cwd=copy)
                else:
                    _run(*OUT[tool], str(diff), cwd=copy)
            except Failure as failure:
                problems[tool].append(str(failure))
                continue
            problems["reversed"] += [
                f"{tool}: {path}" for path in _different(before, _tree(copy))
            ]
            problems["compiles"] += [
                problem
                for path in _different(before, after)
                for problem in _broken(path, after)
            ]
            problems[COLUMNS[-1]] += [
                f"{tool}: {path}" for path in _different(planned, after)
            ]
        if not is_same:
            problems[COLUMNS[-1]].append("the text differs: make patches")
    return (series, release, *(_cell("; ".join(found)) for found in problems.values()))


def _unpacked(release: str, place: Path) -> Path:
    """A folder with the release, which is only read: what make has unpacked, or else downloaded to
    `place`.
    """
    there = ROOT / ".venv" / "unpacked" / f"nemo-{release}"
    if (there / "ready").is_file():
        return there
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        "--no-compile",
    )
    _run(*pip, "--target", str(place), f"nemo_toolkit=={release}", timeout=300)
    return place


def _copy(source: Path, to: Path) -> None:
    for folder in FOLDERS:
        if (source / folder).is_dir():
            shutil.copytree(
                source / folder,
                to / folder,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
    shutil.copy(source / "nemo" / "package_info.py", to / "nemo")


def _tree(folder: Path) -> Tree:
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts
    ]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def _different(before: Tree, after: Tree) -> list[str]:
    return sorted(
        path for path in before | after if before.get(path) != after.get(path)
    )


def _broken(path: str, tree: Tree) -> list[str]:
    try:
        compile(tree.get(path, b""), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return [f"{path}: {error}"]
    return []


def _run(*command: str, cwd: Path | None = None, timeout: float = 60) -> str:
    """What it prints. Raises Failure if it fails, does not end in time or is not there."""
    environment = os.environ | {
        "LC_ALL": "C",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    if cwd:
        # No repository around it matters.
        environment["GIT_CEILING_DIRECTORIES"] = str(cwd.resolve().parent)
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(str(error)) from error
    if done.returncode:
        lines = (done.stderr + done.stdout).splitlines()
        telling = [
            line for line in lines if re.search("error|failed", line, re.IGNORECASE)
        ] or lines
        raise Failure(
            " ".join(" ".join(telling).split()) or f"exit code {done.returncode}"
        )
    return done.stdout


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _cell(problem: str) -> str:
    return "no: " + problem[:400].replace("|", "\\|") if problem else "yes"


if __name__ == "__main__":
    sys.exit(main())
