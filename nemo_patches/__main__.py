"""`python -m nemo_patches`: the same as the `nemo-patches` command, for a checkout that is not installed."""

import sys

try:
    from nemo_patches.cli import main
except ModuleNotFoundError as error:  # an installed package has brought them
    needed = "pip install typer rich omegaconf hydra-core pyyaml packaging msgspec numpy wrapt"
    sys.exit(f"python -m nemo_patches: {error.name} is not installed; needed: {needed}")

main()
