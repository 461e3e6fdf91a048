"""`nemo-patches demo --hang NAME`: one reported hang, as stock and with nemo_patches at the same time."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from nemo_patches.tools.demo import processes
from nemo_patches.tools.demo.errors import DemoError
from nemo_patches.tools.demo.hangs import runs
from nemo_patches.tools.demo.hangs.gallery import HANGS_BY_NAME
from nemo_patches.tools.demo.jobs import HANG_STALL_TIMEOUT


def run(name: str) -> int:
    """Print how it comes out; return the exit code: 0 if as it should, else 1. Raises DemoError for a bad name."""
    hang = HANGS_BY_NAME.get(name)
    if hang is None:
        raise DemoError(f"--hang={name} is not allowed; allowed: {', '.join(HANGS_BY_NAME)}")
    processes.prepare()
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"{name}: {hang.job}"))
    console.print(Text(f"Reported as: {', '.join(hang.reports)}"))
    settings = {"stall_timeout": f"{HANG_STALL_TIMEOUT.total_seconds():g}", **hang.settings}
    variables = " ".join(f"NEMO_PATCHES_{setting.upper()}={value}" for setting, value in settings.items())
    console.print(Text(f"With nemo_patches: {variables}"))
    with processes.logs_folder(console) as logs:
        with processes.fork_server(console, logs.path / "import.log"):
            results = [_shown(console, result) for result in runs.run([(hang, False), (hang, True)], logs.path, 2)]
        logs.is_kept = not all(result.as_expected for result in results)
        for result in results:
            if not result.as_expected:
                expected = hang.ours if result.patched else hang.stock
                console.print(Text(f"Not as it should be: {_version(result)} {result.ending}, expected: {expected}"))
    return int(logs.is_kept)


def _shown(console: Console, result: runs.Result) -> runs.Result:
    console.print(Text(f"{_version(result)} {result.ending}:", style="bold"))
    for rank, sentence in enumerate(result.ranks):
        console.print(Text(f"  rank {rank}: {sentence}"))
    if result.lines:
        line = result.lines[0]
        console.print(Text(f"  its line, after {line.after.total_seconds():g} s: {line.text}"))
    return result


def _version(result: runs.Result) -> str:
    return "with nemo_patches it" if result.patched else "stock"
