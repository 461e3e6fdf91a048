"""The doctor's rules need neither torch nor NeMo: their tests are run from the wheel, too."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # of all folders
        if Path(__file__).parent in item.path.parents and item.path.name.startswith(
            "test_np"
        ):
            item.add_marker("wheel")
