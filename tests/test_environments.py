"""Environments that people have and this machine has not: what `nemo-patches status` says they are,
and that it works, or why it does not.

Simulated by what status reads: an installation's metadata, files and finders. `make test-wrapt` and
`make test-lightning` run real ones.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from interpreters import CHECKOUT
from test_status_command import checkout_of_nemo, report, status

pytestmark = pytest.mark.one_nemo

# As setuptools' own for an editable installation: a finder, and no entry of sys.path.
FINDER = """
import importlib.util, sys

class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "nemo":
            return importlib.util.spec_from_file_location(name, FOLDER + "/nemo/__init__.py")

sys.meta_path.insert(0, Editable)
"""


def installed(folder: Path, **versions: str) -> Path:
    """A folder with the metadata of these packages, as pip leaves it."""
    for name, version in versions.items():
        metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    return folder


def test_nvidias_own_torch_is_named_and_nemo_is_patched(tmp_path: Path) -> None:
    path = installed(tmp_path, torch="2.11.0a0+nv26.02")
    found = report(0, (CHECKOUT, path))
    assert (found["state"], found["reasons"]) == ("on", [])
    assert found["versions"]["torch"] == "2.11.0a0+nv26.02"


def test_a_candidate_of_the_next_nemo_is_refused_and_patched_on_demand(
    tmp_path: Path,
) -> None:
    path = checkout_of_nemo(tmp_path, "3.1.0rc0")
    (reason,) = report(1, (CHECKOUT, path))["reasons"]
    assert "NeMo 3.1.0rc0 is newer than any that was tested" in reason
    assert "no difference (looked at: " in reason
    found = report(0, (CHECKOUT, path), NEMO_PATCHES_UNSUPPORTED="1")
    assert (found["state"], found["versions"]["nemo"]) == ("on", "3.1.0rc0")


def test_an_editable_nemo_is_the_one_that_is_looked_at(tmp_path: Path) -> None:
    """Its code's version counts, and not that of the metadata, which an older one left."""
    folder = checkout_of_nemo(tmp_path / "checkout", "3.0.0+git")
    hook = installed(tmp_path / "site", nemo_toolkit="2.0.0")
    (hook / "sitecustomize.py").write_text(f"FOLDER = {str(folder)!r}\n{FINDER}")
    found = report(0, (CHECKOUT, hook))
    assert (found["state"], found["versions"]["nemo"]) == ("on", "3.0.0+git")
    files = [target["file"] for target in found["targets"] if target["file"]]
    assert files
    assert all(file.startswith(str(folder)) for file in files)


def test_a_nemo_in_a_zip_cannot_be_looked_at_and_that_is_said(tmp_path: Path) -> None:
    folder = checkout_of_nemo(tmp_path / "unpacked", "3.0.0")
    with zipfile.ZipFile(tmp_path / "nemo.zip", "w") as archive:
        for file in folder.rglob("*.py"):
            archive.write(file, file.relative_to(folder))
    done = status(path=(CHECKOUT, tmp_path / "nemo.zip"))
    assert done.returncode == 2
    assert (
        f"NeMo 3.0.0 is at {tmp_path}/nemo.zip/nemo, which is no folder" in done.stderr
    )
    assert "unpack it" in done.stderr
