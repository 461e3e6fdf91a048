"""A checkout for `nemo-patches diff`: the installed NeMo's files, the command on them, and git."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from interpreters import CHECKOUT
from typer.testing import CliRunner, Result

from nemo_patches.cli import app
from nemo_patches.vendoring import checkouts

SPEC = importlib.util.find_spec("nemo")  # finds the files, imports nothing
SITE = Path(next(iter((SPEC and SPEC.submodule_search_locations) or ["."]))).parent
CONFORMER = "nemo/collections/asr/modules/conformer_encoder.py"
CONV = "nemo/collections/asr/modules/conv_asr.py"
SERIES = ".".join(checkouts.read(SITE).version.split(".")[:2])
OWN_DIFF = CHECKOUT / "patches" / f"nemo-{SERIES}.diff"


def copied_nemo(folder: Path) -> Path:
    """What the command looks at of the installed NeMo, outside any repository."""
    for path in ("nemo/package_info.py", *checkouts.PATHS):
        if (SITE / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            # Not its mode, nor a hard link of it.
            shutil.copyfile(SITE / path, folder / path)
    return folder


def diff(checkout: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["diff", "--nemo", str(checkout), *options])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, but for a repository's own."""
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def git(folder: Path, *arguments: str | Path) -> str:
    """git in a folder, in which a repository around it has no say."""
    config = (
        "-c",
        "user.name=A",
        "-c",
        "user.email=a@example.org",
        "-c",
        "init.defaultBranch=main",
    )
    outside = {
        **os.environ,
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    command = ["git", *config, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=outside, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "stock")


def change(file: Path, old: str, new: str) -> None:
    text = file.read_bytes().decode()
    assert text.count(old) == 1, (old, text.count(old))
    file.write_bytes(text.replace(old, new).encode())


def assert_refused(checkout: Path, options: str, *said: str, code: int = 2) -> None:
    """One line on stderr, with these words, and nothing changed."""
    before = contents(checkout)
    done = diff(checkout, *options.split())
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for words in said:
        assert words in done.stderr
    assert contents(checkout) == before
