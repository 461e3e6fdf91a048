"""What hypothesis draws: the same each time, so that a test that fails fails for the change that broke it.

`HYPOTHESIS_PROFILE=free pytest ...` draws anew, to look for more.
"""

import os

from hypothesis import HealthCheck, settings

# Neither of hypothesis' own limits is on: a busy machine exceeds them, and pytest's holds.
NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **NO_CLOCK)
settings.register_profile("free", **NO_CLOCK)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
