"""What runs when Python starts under auto-apply: the import hook, and the sitecustomize that ours shadows.

Every Python process there pays for this, whatever it is for. So nothing is imported that the interpreter has not
loaded already (contextlib, for one), and the syntax is that of Python 3.6. What is heavy is imported when NeMo is.
"""

import os
import sys

# importlib.machinery and importlib.util give the same, but importing them costs more than all the rest here.
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

DISABLE_VARIABLE = "NEMO_PATCHES_DISABLE"
# Most targets are imported by this package; when it is complete, what was patched is said in one line.
COLLECTION = "nemo.collections.asr"
# The modules of targets.TARGETS, which must not be imported at start-up; a test holds the two together.
TARGET_MODULES = (
    "nemo.collections.asr.modules.conformer_encoder",
    "nemo.collections.asr.modules.squeezeformer_encoder",
    "nemo.collections.asr.modules.transformer_encoder",
    "nemo.collections.asr.modules.conv_asr",
    "nemo.collections.nlp.models.token_classification.punctuation_capitalization_lexical_audio_model",
)
_WATCHED = frozenset((*TARGET_MODULES, COLLECTION))


class _Finder:
    """Asks the other finders for a watched module, and has its loader tell us when the module is complete."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if sys.meta_path[0] is not self:
            # A finder that came later and answers for NeMo itself would keep us from being asked.
            sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder is not self)]
        if name not in _WATCHED:
            return None
        for finder in sys.meta_path[1:]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                spec.loader = _telling(name, spec.loader)
                return spec
        return None


class _TellingLoader:
    """A loader that tells when its module is complete, and leaves no trace in it."""

    def __init__(self, name: str, loader: "Any") -> None:
        self._name, self._loader = name, loader

    def __getattr__(self, name: str) -> "Any":
        if name == "_loader":  # an empty copy, before its attributes are there
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        try:  # noqa: SIM105
            # From here on inspect, reload and everybody else see what they would see without us.
            module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        except AttributeError:
            pass  # some other kind of object, to which its loader may give no attributes
        self._loader.exec_module(module)
        _tell(self._name)


def _telling(name: str, loader: "Any") -> "Any":
    util = sys.modules.get("importlib.util")
    if util is not None and isinstance(loader, util.LazyLoader):
        loader.loader = _TellingLoader(name, loader.loader)  # complete is when it is really loaded
        return loader
    return _TellingLoader(name, loader) if hasattr(loader, "exec_module") else loader


_finder = _Finder()
_failed = False
_in_turn: "list[str]" = []  # the folders whose sitecustomize.py of ours is running, one inside the other


def _tell(name: str) -> None:
    """Nothing that goes wrong here may fail NeMo's import."""
    global _failed
    if _failed:
        return
    try:
        from nemo_patches.patching import monkeypatch

        monkeypatch.on_import(name)
    except Exception as error:
        reporting = sys.modules.get("nemo_patches.sync.rank_log")
        if reporting is not None and reporting.raised_by_signal_handler(error):
            raise  # the user's own, not ours
        _failed = True
        say(f"not patched, NeMo runs as stock: {type(error).__name__}: {error}")


def say(text: str) -> None:
    """An error on stderr in the form of the log lines (runtime/reporting.py), without logging."""
    variable = os.environ.get
    rank = variable("RANK") or variable("SLURM_PROCID") or "?"
    size = variable("WORLD_SIZE") or variable("SLURM_NTASKS") or "?"
    try:  # noqa: SIM105
        sys.stderr.write(f"nemo_patches ERROR [rank {rank}/{size} {os.uname().nodename}] {text}\n")
    except Exception:
        pass  # there is nowhere left to say it


def install() -> None:
    """Patch NeMo's target modules when they are imported, or now where they have been."""
    if not installed():
        sys.meta_path.insert(0, _finder)
    for name in (*TARGET_MODULES, COLLECTION):
        if name in sys.modules:
            _tell(name)


def installed() -> bool:
    """Whether the import hook is in force in this process."""
    return _finder in sys.meta_path


def start(own_file: str) -> None:
    """All that a sitecustomize.py of ours does; own_file is its __file__."""
    if os.environ.get(DISABLE_VARIABLE) != "1":
        install()
    _run_shadowed(os.path.abspath(own_file))


def _run_shadowed(own_file: str) -> None:
    """Run the sitecustomize that Python would have run if there were none at own_file.

    It takes over the name in sys.modules, as Python lets a module do. What it raises is left to Python. Where there is
    none, that is what Python is told, and nothing of ours stays under that name.
    """
    name, folder = "sitecustomize", os.path.dirname(own_file)
    _in_turn.append(folder)
    try:
        spec = _shadowed_spec(name, folder)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.modules[name] = module = module_from_spec(spec)
        if spec.loader is not None:  # a folder of that name is a module too
            spec.loader.exec_module(module)
    finally:
        _in_turn.remove(folder)


def _shadowed_spec(name: str, folder: str) -> "Any":
    """From what follows ours on sys.path, then from the finders that Python asks after that."""
    folders = [_absolute(entry) for entry in sys.path]
    if folder not in folders or PathFinder not in sys.meta_path:
        return None  # somebody runs ours in a way of their own: it shadows nothing
    after = range(folders.index(folder) + 1, len(folders))
    spec = PathFinder.find_spec(name, [sys.path[place] for place in after if folders[place] not in _in_turn])
    for finder in sys.meta_path[sys.meta_path.index(PathFinder) + 1 :]:
        if spec is None and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, None)
            if spec is not None and os.path.dirname(spec.origin or "") in folders:
                spec = None  # PathFinder has seen all that is there: this is one that runs already
    return spec


def _absolute(entry: str) -> str:
    try:
        return os.path.abspath(entry)
    except OSError:  # the current folder is gone, and '' with it
        return entry
