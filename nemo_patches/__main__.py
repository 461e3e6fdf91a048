"""`nemo-patches` and `python -m nemo_patches`.

What is not installed is one line; the exit code is 2.

--version, `run -- COMMAND` and `stacks --json` need only the standard library: a job's container
  may lack the rest.
"""

from __future__ import annotations

import os
import sys

from nemo_patches.tools import NAMES, NEEDED

_OPTIONS_OF_STACKS = ("--json", "--job", "--pids")


def main() -> None:
    """Run the command that was typed."""
    try:
        from nemo_patches import cli

        cli.main()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        package = NAMES.get(module, module)
        advice = f": `pip install {package}`"
        if package in NEEDED.split():
            _without_packages(sys.argv[1:])
            advice = f"; the commands need: {NEEDED}"
        print(
            f"nemo-patches: {module} is not installed for {sys.executable}{advice}",
            file=sys.stderr,
        )
        sys.exit(2)


def _without_packages(given: list[str]) -> None:
    """Do what needs none of the packages that the commands need; return if that is not wanted."""
    if given == ["--version"]:
        import nemo_patches

        print(f"nemo-patches {nemo_patches.__version__}")
        sys.exit(0)
    if given[:2] == ["run", "--"] and len(given) > 2:
        _run(given[2:])
    options = [one.partition("=")[0] for one in given[1:] if one.startswith("-")]
    if (
        given[:1] == ["stacks"]
        and "--json" in options
        and set(options) <= set(_OPTIONS_OF_STACKS)
    ):
        from nemo_patches.tools.diagnose.collect import host_jobs

        sys.argv = [
            "nemo-patches stacks",
            *(one for one in given[1:] if one != "--json"),
        ]
        host_jobs.main()
        sys.exit(0)


def _run(command: list[str]) -> None:
    from nemo_patches.tools import launch

    try:
        launch.become(command, launch.with_auto_apply(os.environ))
    except OSError as error:
        line, code = launch.cannot_start(command, error)
        print(line, file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
