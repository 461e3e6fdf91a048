"""`python -m nemo_patches`: the same as the `nemo-patches` command, for a checkout that is not installed."""

import sys

from nemo_patches.tools import NEEDED

try:
    from nemo_patches.cli import main
except ModuleNotFoundError as error:  # an installed package has brought them
    print(f"python -m nemo_patches: {error.name} is not installed; needed: {NEEDED}", file=sys.stderr)
    sys.exit(2)

main()
