"""`nemo-patches` and `python -m nemo_patches`. What is not installed is one line; the exit code is 2."""

from __future__ import annotations

import sys

from nemo_patches.tools import NEEDED


def main() -> None:
    """Run the command that was typed."""
    try:
        from nemo_patches import cli

        cli.main()
    except ModuleNotFoundError as error:
        lacks = f"{error.name} is not installed for {sys.executable}"
        print(f"nemo-patches: {lacks}; the commands need: {NEEDED}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
