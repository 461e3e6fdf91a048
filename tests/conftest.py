"""What hypothesis draws: the same each time, so that a test that fails fails for the change that broke it.

`HYPOTHESIS_PROFILE=free pytest ...` draws anew, to look for more.
"""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("free")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
