"""A file system that does not answer, for checkpoints: a FIFO that nobody reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


def path_on_it(folder: Path) -> str:
    """Of a checkpoint, for Lightning; opening it hangs."""

    class DeadMount(LocalFileSystem):  # type: ignore[misc]
        protocol = "dead"

        def _open(self, path: str, *arguments: Any, **settings: Any) -> Any:
            os.mkfifo(folder / "mount")
            return (folder / "mount").open("wb")

    fsspec.register_implementation("dead", DeadMount)
    return f"dead://{folder}/model.ckpt"
