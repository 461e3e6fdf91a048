"""What runs when Python starts under auto-apply: the import hook, and the shadowed sitecustomize.

Every Python process there pays for this, whatever it is for. So nothing is imported that the
interpreter has not loaded already (contextlib, for one), and the syntax is that of Python 3.6. What
is heavy is imported when NeMo is.
"""

import os
import sys

# importlib.machinery and importlib.util give the same, but importing them costs more than all the
# rest here.
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import PathFinder
from _thread import get_ident

from nemo_patches.patching import (
    CALLBACK_CONNECTORS,
    COLLECTION,
    DISABLE_VARIABLE,
    TARGET_MODULES,
    TORCH,
    is_one_of_several_ranks,
    is_ours,
    say_error,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_HOOKED = (*TARGET_MODULES, COLLECTION, *CALLBACK_CONNECTORS, TORCH)
# What of ours imports torch, all but patching/: its own import must be complete before stall
# reports begin.
_IMPORTS_TORCH = ("nemo_patches.sync", "nemo_patches.watch", "nemo_patches.channel")

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_MOST_WORDS = 4  # of a command: Python, options of its own, the program


class _Finder:
    """The import hook: asks the other finders for one of _HOOKED, whose loader then calls patch()
    at the end.
    """

    def __init__(self) -> None:
        self._failed = False
        # A module's name and a thread, while it asks the others.
        self._asking: set[tuple[str, int]] = set()

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if sys.meta_path[0] is not self:
            # A finder that came later and answers for NeMo itself would keep us from being asked.
            sys.meta_path[:] = [
                self,
                *(finder for finder in sys.meta_path if finder is not self),
            ]
        if name not in _HOOKED:
            return None
        asking = (name, get_ident())
        if asking in self._asking:
            # One of the others asks all finders, as we do: of ours, a second one after a reload.
            return None
        self._asking.add(asking)
        try:
            for finder in sys.meta_path[1:]:
                spec = (
                    finder.find_spec(name, path, target)
                    if hasattr(finder, "find_spec")
                    else None
                )
                if spec is not None:
                    spec.loader = self._wrapped(name, spec.loader)
                    return spec
            return None
        finally:
            self._asking.discard(asking)

    def patch(self, name: str, is_rank: bool = False) -> None:
        """Patch the module `name`, which is complete. No error here may fail its import.

        is_rank: for torch, that this process is known to be one of several ranks.
        """
        if self._failed:
            return
        try:
            package = CALLBACK_CONNECTORS.get(name)
            if package is not None:
                from nemo_patches.patching import trainer_callbacks

                trainer_callbacks.hook(sys.modules[name], package, begin_reports)
            if name == TORCH or package is not None:
                # A process that stays alone has no more of ours than the hook.
                if is_rank or _may_be_a_rank(name):
                    from nemo_patches.patching import job_without_nemo

                    job_without_nemo.begin()
                return
            from nemo_patches.patching import monkeypatch

            monkeypatch.this_process.on_import(name)
        except Exception as error:
            if not is_ours(error):
                raise
            self._failed = True
            say_error(f"{_left_as()}: {type(error).__name__}: {error}")

    def _wrapped(self, name: str, loader: "Any") -> "Any":
        util = sys.modules.get("importlib.util")
        if util is not None and isinstance(loader, util.LazyLoader):
            # Complete is when it is really loaded.
            loader.loader = _PatchingLoader(self, name, loader.loader)
            return loader
        return (
            _PatchingLoader(self, name, loader)
            if hasattr(loader, "exec_module")
            else loader
        )


class _PatchingLoader:
    """A loader that patches its module when it is complete, and leaves no trace of itself in the
    module.
    """

    def __init__(self, finder: _Finder, name: str, loader: "Any") -> None:
        self._finder, self._name, self._loader = finder, name, loader

    def __getattr__(self, name: str) -> "Any":
        if name == "_loader":  # an empty copy, before its attributes are there
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        try:  # noqa: SIM105
            # From here on, inspect, reload and all other code see what they would see without us.
            module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        except AttributeError:
            pass  # some other kind of object, to which its loader may give no attributes
        self._loader.exec_module(module)
        self._finder.patch(self._name)


def _may_be_a_rank(name: str) -> bool:
    """Whether stall reports may begin with this import, and their thread.

    Not in what multiprocessing starts, a data loader's worker for one: it has inherited a rank's
    variables. Nor in torchrun, which Slurm has started once a host.
    """
    if (
        not is_one_of_several_ranks()
        or "torch.distributed.distributed_c10d" not in sys.modules
    ):
        return False
    for word in getattr(sys, "orig_argv", [])[:_MOST_WORDS]:  # Python 3.10 and later
        if (
            word.startswith("from multiprocessing.")
            or os.path.basename(word) in _LAUNCHERS
        ):
            return False
    return name != TORCH or not any(module in sys.modules for module in _IMPORTS_TORCH)


def _left_as() -> str:
    """How an error of ours leaves NeMo: as it is, for the other ranks may be so, too."""
    patching = sys.modules.get("nemo_patches.patching.monkeypatch")
    if patching is not None and patching.this_process.patched:
        return "patching has ended, what is patched stays so"
    return "not patched, NeMo runs as stock"


_finder = _Finder()


def install() -> None:
    """Patch NeMo's target modules when they are imported, or now if they have been."""
    if not is_installed():
        sys.meta_path.insert(0, _finder)
    for name in _HOOKED:
        if name in sys.modules:
            _finder.patch(name)


def is_installed() -> bool:
    """Whether the import hook is in force in this process."""
    return _finder in sys.meta_path


def begin_reports() -> None:
    """Report the stalls of this job, whose Lightning trainer has several ranks."""
    _finder.patch(TORCH, is_rank=True)


def start(own_file: str) -> None:
    """Everything that our sitecustomize.py does; own_file is its __file__."""
    if os.environ.get(DISABLE_VARIABLE) != "1":
        install()
    _run_shadowed(os.path.abspath(own_file))


# The folders whose sitecustomize.py of ours is running, one inside the other: Python runs them, so
# no object of ours is there to carry this from one to the next.
_running: "list[str]" = []


def _run_shadowed(own_file: str) -> None:
    """Run the sitecustomize that Python would have run if there were none at own_file.

    It takes over the name in sys.modules, as Python lets a module do. What it raises is left to
    Python. Where there is none, that is what Python is told, and nothing of ours stays under that
    name.
    """
    name, folder = "sitecustomize", os.path.dirname(own_file)
    _running.append(folder)
    try:
        spec = _shadowed_spec(name, folder)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.modules[name] = module = module_from_spec(spec)
        if spec.loader is not None:  # a folder of that name is a module too
            spec.loader.exec_module(module)
    finally:
        _running.remove(folder)


def _shadowed_spec(name: str, folder: str) -> "Any":
    """Searched on sys.path after ours, then with the finders that Python asks after that."""
    folders = [_absolute(entry) for entry in sys.path]
    if folder not in folders or PathFinder not in sys.meta_path:
        return None  # ours was run in another way: it shadows nothing
    after = range(folders.index(folder) + 1, len(folders))
    spec = PathFinder.find_spec(
        name, [sys.path[place] for place in after if folders[place] not in _running]
    )
    for finder in sys.meta_path[sys.meta_path.index(PathFinder) + 1 :]:
        if spec is None and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, None)
            if spec is not None and os.path.dirname(spec.origin or "") in folders:
                spec = None  # PathFinder has seen everything there: this one is already running
    return spec


def _absolute(entry: str) -> str:
    try:
        return os.path.abspath(entry)
    except OSError:  # the current folder is gone, and '' with it
        return entry
