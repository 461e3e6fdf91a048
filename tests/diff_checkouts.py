"""A checkout for `nemo-patches diff`: the installed NeMo's files, the command on them, and what it left."""

from __future__ import annotations

import importlib.util
import shutil
import stat
import subprocess
from pathlib import Path

from typer.testing import CliRunner, Result

from nemo_patches.cli import app
from nemo_patches.patching.targets import TARGETS
from nemo_patches.vendoring import checkouts, parts
from nemo_patches.vendoring.edit import path_of

SPEC = importlib.util.find_spec("nemo")  # finds the files, imports nothing
SITE = Path(next(iter((SPEC and SPEC.submodule_search_locations) or ["."]))).parent
CONFORMER = "nemo/collections/asr/modules/conformer_encoder.py"
CONV = "nemo/collections/asr/modules/conv_asr.py"
RUNTIME = parts.FOLDER
OWN_DIFF = f"nemo-{'.'.join(checkouts.read(SITE).version.split('.')[:2])}.diff"
Tree = dict[str, tuple[int, bytes]]


def copied_nemo(folder: Path) -> Path:
    """What the command looks at of the installed NeMo, outside any repository."""
    for path in ("nemo/package_info.py", "nemo/collections/asr/parts/__init__.py", *map(path_of, TARGETS)):
        if (SITE / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(SITE / path, folder / path)  # not its mode, nor a hard link of it
    return folder


def diff(checkout: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["diff", "--nemo", str(checkout), *filter(None, options)])


def tree(checkout: Path) -> Tree:
    """Every file with its mode, but for a repository's own."""
    files = (path for path in checkout.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(checkout)): (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) for path in files}


def contents(found: Tree) -> dict[str, bytes]:
    return {path: content for path, (_, content) in found.items()}


def git(folder: Path, *arguments: str) -> str:
    config = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
    command = ["git", *config, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True, timeout=60).stdout


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
    before = tree(checkout)
    done = diff(checkout, *options.split())
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for words in said:
        assert words in done.stderr
    assert tree(checkout) == before
