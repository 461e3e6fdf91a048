"""NeMo's code as its files have it, not imported: for a NeMo of a series that was not tested."""

from __future__ import annotations

from pathlib import Path
from types import CodeType

from nemo_patches.patching import UNSUPPORTED_VARIABLE
from nemo_patches.patching.targets import TARGETS, Target


def nothing_to_bound(target: Target, file: Path) -> str:
    """Like Target.nothing_to_bound()."""
    owner = _code_in(_compile(file), target.owner)
    method = _code_in(owner, target.method) if owner else None
    return target.left_in(method) if method else ""


def drift(target: Target, file: Path) -> str:
    """Like Target.drift(). It cannot see what other packages patch at run time."""
    owner = _code_in(_compile(file), target.owner)
    if owner is None:
        return target.no_class(None)
    return target.drift_of(lambda method: _code_in(owner, method) or "None")


def compare(version: str, supported: str, how_unknown: str) -> str:
    """For a NeMo of an unknown series: what was compared in its code, what to run."""
    try:
        files = {target: file for target in TARGETS if (file := target.source_file())}
        differences = [
            text for target, file in files.items() if (text := drift(target, file))
        ]
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        text = f"is {how_unknown}, and its code could not be compared"
        return f"NeMo {version} {text}: {error}"
    return (
        f"NeMo {version} is {how_unknown}. Its length syncs' parameters and the "
        f"names that they read were compared with those of {supported}: "
        f"{' | '.join(differences) or 'no difference'} (looked at: {', '.join(map(str, files))}). "
        "Nothing else was; try it on this machine's CPU: "
        f"{UNSUPPORTED_VARIABLE}=1 nemo-patches demo"
    )


def _compile(file: Path) -> CodeType:
    return compile(file.read_bytes(), str(file), "exec", dont_inherit=True)


def _code_in(code: CodeType, name: str) -> CodeType | None:
    """The code of the class or function `name` that is defined in `code`.

    Of several, the last, which Python keeps.
    """
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    definitions = [one for one in inner if one.co_name == name]
    return definitions[-1] if definitions else None
