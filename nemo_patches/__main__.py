"""`python -m nemo_patches`: the same as the `nemo-patches` command, for a checkout that is not installed."""

from nemo_patches.tools.cli import main

main()
