"""Before any test: Ctrl-C works in whatever a test starts, dumps go where they can be removed, and hypothesis draws the
same examples each time.

A test that fails then fails for the change that broke it. `HYPOTHESIS_PROFILE=free pytest ...` draws anew, for more.
"""

import atexit
import os
import shutil
import signal
import tempfile

from hypothesis import HealthCheck, settings

# A script's background job (`make test &`) starts with SIGINT ignored, and all its processes inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A rank that stalls dumps by default: not into the system's temporary folder, where nobody would remove it.
if "NEMO_PATCHES_DUMP" not in os.environ:
    os.environ["NEMO_PATCHES_DUMP"] = tempfile.mkdtemp(prefix="nemo_patches-tests-")
    atexit.register(shutil.rmtree, os.environ["NEMO_PATCHES_DUMP"], ignore_errors=True)

# Neither of hypothesis' own limits is on: a busy machine exceeds them, and pytest's holds.
NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **NO_CLOCK)
settings.register_profile("free", **NO_CLOCK)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
