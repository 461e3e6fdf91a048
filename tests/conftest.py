"""Before any test: Ctrl-C works in whatever a test starts, dumps go where they can be removed, hypothesis draws the
same examples each time, and the longest files come first.

A test that fails then fails for the change that broke it. `HYPOTHESIS_PROFILE=free pytest ...` draws anew, for more.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
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

# xdist gives out files in this order: no worker is left with a long one at the end. First those with tests that wait.
LONGEST = (
    *("stragglers", "gallery", "diagnose_real", "new_passes", "job_watch", "stall_exit", "diagnose_running"),
    *("checkpoints", "stop_together", "auto_apply", "diagnose_killed", "deferred_metrics", "upstream", "partition"),
    *("vendored", "doctor_streams", "hydra_exceptions", "demo", "trace_records", "as_stock", "uneven_evaluation"),
    *("protocol_bound", "trace_sigterm", "private_growth", "apply", "code_of_nemo"),
)
PLACES = {f"test_{name}": place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACES.get(item.path.stem, len(PLACES)))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Garbage collection takes a quarter of the time that importing NeMo does, and later goes through all of NeMo."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
