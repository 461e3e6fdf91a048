"""One cluster for all tests of this folder, and the folder that its hosts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    for each in (folder, folder.parent):
        each.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def cluster(shared: Path) -> Iterator[Cluster]:
    with Cluster(shared) as made:
        yield made


@pytest.fixture
def tmp_folder(shared: Path, request: pytest.FixtureRequest) -> Path:
    """A folder that all hosts see."""
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)
    folder = shared / name
    folder.mkdir()
    return folder
