"""The source distribution and the wheel: what is in them, and that the wheel's files are those that
its tests run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from interpreters import CHECKOUT, environment, run

import nemo_patches

pytestmark = pytest.mark.one_nemo

PACKAGE = Path(nemo_patches.__file__).parent
NOT_SOURCES = (".*", "__pycache__", "*.egg-info", "build", "dist")
BUILD_LIMIT_S = 120.0
WAYS = {  # both without the network, which an isolated build needs; `make test-wheel` has one
    "build": ("build", "--no-isolation", "--outdir"),
    "pip": ("pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir"),
}


@dataclass(frozen=True)
class Built:
    """A copy of the checkout, and what was built from it."""

    source: Path
    sdist: Path
    wheels: dict[str, Path]  # by the way that it was built


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory, a_rank: subprocess.Popen[str]
) -> Built:
    """Meanwhile the rank waits: `stacks` looks at one until it has waited for half a minute."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    shutil.copytree(
        CHECKOUT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCES)
    )
    # As an earlier build leaves a module, since removed.
    stray = source / "build" / "lib" / "nemo_patches" / "stray.py"
    stray.parent.mkdir(parents=True)
    stray.touch()
    for way, command in WAYS.items():
        done = run(
            [sys.executable, "-m", *command, folder / way, "."],
            environment(),
            BUILD_LIMIT_S,
            cwd=source,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = (folder / "build").glob("*.tar.gz")
    wheels = {way: next((folder / way).glob("*.whl")) for way in WAYS}
    return Built(source, sdist, wheels)


def files_below(folder: Path) -> set[str]:
    """By path from the folder's parent, also those behind the symbolic link to patches/."""
    walked = os.walk(folder, followlinks=True)
    return {
        Path(at, name).relative_to(folder.parent).as_posix()
        for at, _, names in walked
        for name in names
    }


def contents(folder: Path) -> dict[Path, bytes]:
    """Without what pip, or a test's import, has compiled."""
    files = (
        path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    return {path.relative_to(folder): path.read_bytes() for path in files}


def metadata(built: Built) -> PathDistribution:
    wheel = zipfile.Path(built.wheels["build"])
    (folder,) = (path for path in wheel.iterdir() if path.name.endswith(".dist-info"))
    return PathDistribution(folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_wheel_has_the_packages_files_and_none_of_an_earlier_build(
    built: Built, way: str
) -> None:
    names = {
        name
        for name in zipfile.ZipFile(built.wheels[way]).namelist()
        if ".dist-info/" not in name
    }
    assert names == files_below(built.source / "nemo_patches")


def test_the_source_distribution_has_what_it_takes_to_read_test_and_build_it(
    built: Built,
) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {
            member.name.split("/", 1)[1]
            for member in archive.getmembers()
            if member.isfile()
        }
    for folder in (
        "nemo_patches",
        "tests",
        "docs",
        "examples",
        "benchmarks",
        "patches",
    ):
        assert files_below(built.source / folder) <= names, folder
    assert {page.name for page in built.source.glob("*.md")} <= names
    assert {
        "LICENSE",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
        "sitecustomize.py",
        "pyproject.toml",
        "setup.py",
    } <= names


def test_the_licence_is_an_spdx_expression_with_its_text(built: Built) -> None:
    found = metadata(built).metadata
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("License-File") == ["LICENSE"]
    assert (
        metadata(built).read_text("licenses/LICENSE")
        == (CHECKOUT / "LICENSE").read_text()
    )
    assert found["Version"] == nemo_patches.__version__


def test_every_link_of_the_readme_works_on_a_package_index(built: Built) -> None:
    readme = metadata(built).metadata["Description"]
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", readme) == []
    assert "docs/pictures/" not in readme
    assert "`docs/design.md`" in readme


def test_a_checkout_that_is_not_installed_names_all_that_is_needed(
    built: Built,
) -> None:
    program = (
        "import runpy, sys; sys.modules['typer'] = None;"
        " runpy.run_module('nemo_patches', run_name='__main__')"
    )
    said = run([sys.executable, "-c", program], environment()).stderr
    needed = [
        one for one in metadata(built).requires or () if 'extra == "tools"' in one
    ]
    assert set(said.split("pip install ")[1].split()) == {
        re.split(r"[<>=;]", name)[0].strip() for name in needed
    }


def test_what_trains_needs_wrapt_alone(built: Built) -> None:
    assert [one for one in metadata(built).requires or () if "extra ==" not in one] == [
        "wrapt>=1.14"
    ]


@pytest.fixture(scope="module")
def a_rank() -> Iterator[subprocess.Popen[str]]:
    """A process that a launcher could have started."""
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    yield process
    process.communicate("\n", timeout=60)


def only_rank(printed: str) -> int:
    """The pid of the one rank in what `stacks --json` prints."""
    ((found,),) = (job["ranks"] for job in json.loads(printed)["jobs"])
    return int(found["rank"]["pid"])


def test_a_bare_environment_has_the_version_the_launcher_and_the_stacks(
    built: Built, tmp_path: Path, a_rank: subprocess.Popen[str]
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    programs = tmp_path / "bare" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    wheel = built.wheels["pip"]
    done = run([*pip, "install", "-q", "--no-index", "--no-deps", wheel], environment())
    assert done.returncode == 0, done.stderr
    command = programs / "nemo-patches"
    script = "import os; print('started', 'NEMO_PATCHES_SYNC' in os.environ)"
    for arguments, said in (
        (["--version"], f"nemo-patches {nemo_patches.__version__}\n"),
        (["run", "--", programs / "python", "-c", script], "started False\n"),
    ):
        done = run([command, *arguments], environment())
        assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    done = run([command, "stacks", "--json", "--pids", str(a_rank.pid)], environment())
    assert done.returncode == 0, done.stderr
    assert only_rank(done.stdout) == a_rank.pid
    done = run([command, "diagnose"], environment())
    assert done.returncode == 2
    assert "pip install typer" in done.stderr


def test_stacks_pyz_runs_on_a_bare_python(
    tmp_path: Path, a_rank: subprocess.Popen[str]
) -> None:
    """Without site-packages, variables and the folder it is in, as in a container that has
    nothing else.
    """
    folder = tmp_path / "stacks"
    made = run(
        ["make", "-s", "stacks.pyz", f"PYZ={folder}", f"PYTHON={sys.executable}"],
        environment(),
        cwd=CHECKOUT,
    )
    assert made.returncode == 0, made.stderr
    pyz = folder.with_suffix(".pyz")
    assert pyz.stat().st_size < 40_000
    command = [sys.executable, "-I", "-S", "-E", pyz, "--pids", str(a_rank.pid)]
    done = run(command, {"PATH": os.environ["PATH"]}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"stacks\.pyz: looks at .*, for up to \d+ s\n", done.stderr)
    assert only_rank(done.stdout) == a_rank.pid


def test_the_citation_has_this_version() -> None:
    citation = (CHECKOUT / "CITATION.cff").read_text()
    assert f"\nversion: {nemo_patches.__version__}\n" in citation


@pytest.mark.wheel
def test_what_is_imported_is_this_checkouts_or_else_installed() -> None:
    assert (PACKAGE == CHECKOUT / "nemo_patches") == (
        CHECKOUT / "nemo_patches"
    ).is_dir()


@pytest.mark.wheel
def test_the_files_that_are_no_modules_are_there() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "patching" / "boot" / "sitecustomize.py").is_file()
    assert contents(PACKAGE / "patches") == contents(CHECKOUT / "patches") != {}


@pytest.mark.wheel
def test_the_console_script_is_the_command() -> None:
    done = run(
        [Path(sys.executable).with_name("nemo-patches"), "--help"], environment()
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "doctor" in done.stdout
