"""Every test run alike: hypothesis draws the same examples each time, and Ctrl-C's signal is heard.

`HYPOTHESIS_PROFILE=free pytest ...` draws anew, to look for more.
"""

import os
import signal

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("free")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell script's `pytest &` ignores SIGINT, and every process that a test starts, and then interrupts, inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
