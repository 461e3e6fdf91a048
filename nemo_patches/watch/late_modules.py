"""Modules that are needed at a stall alone:
read when the watch begins, executed when there is something to judge.

At a stall a process may have no file descriptor left, its checkout may have been replaced, and its
file system may not answer: then no module can be imported any more.
"""
# Part of nemo_patches. SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import CodeType
from typing import Any

# What late modules import is late, too, or imported in every rank, as this is here.
from ..sync import places  # noqa: F401

_PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]
# Each after those that it imports.
_LATE = """
    judging judging.kinds judging.waits judging.missing_rank judging.read_facts judging.found
    judging.answer judging.rank_groups judging.verdict judging.judgement
    watch.process_id watch.libraries watch.kernel_call watch.requests watch.occupation watch.stacks
    watch.motion watch.descendants watch.loader_workers watch.torch_knows watch.last_batch
    watch.at_work watch.place watch.on_stall watch.report_file
"""
NAMES = tuple(f"{_PACKAGE}.{name}" for name in _LATE.split())


class LateModules:
    """Those of this process. Their importers are functions, which run after `run`."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[ModuleSpec, CodeType]] = {}
        self._lock = threading.RLock()
        self.are_there = False  # all; any thread may read it

    def read(self) -> None:
        """Read the code of all, and execute none. What cannot be read is imported by `run`."""
        folders: dict[str, Any] = {}
        for name in NAMES:
            if name in sys.modules or name in self._read:
                continue
            with contextlib.suppress(Exception):  # another's loader
                parent = name.rpartition(".")[0]
                folder = folders.get(parent) or sys.modules[parent].__path__
                spec = PathFinder.find_spec(name, folder)
                loader: Any = spec.loader if spec is not None else None
                code = loader.get_code(name)
                if spec is not None and code is not None:
                    folders[name] = spec.submodule_search_locations
                    self._read[name] = (spec, code)

    def run(self) -> None:
        """Execute those that are not imported yet. What that raises, it raises."""
        with self._lock:
            if self.are_there:
                return
            for name in NAMES:
                if name not in sys.modules:
                    self._import(name)
            self.are_there = True
            self._read.clear()

    def in_forked_child(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent's may have held it

    def _import(self, name: str) -> None:
        if name not in self._read:
            importlib.import_module(name)
            return
        spec, code = self._read[name]
        module = module_from_spec(spec)
        sys.modules[name] = module
        try:
            exec(code, vars(module))
        except BaseException:
            del sys.modules[name]
            raise
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, module)
