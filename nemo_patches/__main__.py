"""`python -m nemo_patches`: the same as the `nemo-patches` command, for a checkout that is not installed."""

import sys

try:
    from nemo_patches.cli import main
except ModuleNotFoundError as error:  # an installed package has brought them
    sys.exit(f"python -m nemo_patches: {error.name} is not installed; needed: pip install typer rich msgspec numpy")

main()
