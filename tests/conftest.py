"""Before any test: Ctrl-C works in whatever a test starts, jobs' folders are removed, hypothesis
draws the same examples each time, and the longest files come first. After them: how to run again
what failed.

A test that fails then fails for the change that broke it. `HYPOTHESIS_PROFILE=free pytest ...`
draws anew, for more.
"""

import atexit
import gc
import itertools
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# What `make test-matrix` and `make test-vendored` tell the tests.
ENVIRONMENT = ("TEST_NEMO", "TEST_VENDORED", "PYTHONPATH")
OWN_FOLDER = "nemo_patches-tests-"

# A script's background job (`make test &`) starts with SIGINT ignored, and all its processes
# inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A job has its folder in the temporary one: not in the system's, where nobody would remove it.
# Workers inherit it.
if not os.path.basename(tempfile.gettempdir()).startswith(OWN_FOLDER):
    # Where pytest keeps its tmp_path.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=OWN_FOLDER)
    # A test starts a program of its own as another user.
    os.chmod(tempfile.tempdir, 0o755)
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

# Neither of hypothesis' own limits is on: a busy machine exceeds them, and pytest's holds.
NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **NO_CLOCK)
settings.register_profile("free", **NO_CLOCK)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# xdist gives out files in this order: no worker is left with a long one at the end. First those
# with tests that wait.
LONGEST = (
    "watch_begins",
    "stall_exit",
    "trace",
    "gallery",
    "stop_together",
    "stacks",
    "diagnose_running",
    "new_passes",
    "vendored",
    "diagnose_real",
    "auto_apply",
    "lost_host",
    "upstream",
    "job_stalls",
    "stragglers",
    "job_watch",
    "doctor_ranks",
    "who_waited",
    "checkpoints",
    "late_modules",
    "plain_jobs",
    "stall_reports",
    "diagnose_killed",
    "unpatched_rank",
    "exit",
    "requests",
    "partition",
    "exchange",
    "demo",
    "examples",
    "logs_of_real_jobs",
    "stall_decisions",
    "private_growth",
    "hydra_exceptions",
    "as_stock",
    "uneven_evaluation",
    "doctor_streams",
    "code_of_nemo",
    "trainer_callbacks",
    "trace_records",
    "flight_recorder",
    "on_stall",
    "motion",
    "apply",
)
PLACES = {f"test_{name}": place for place, name in enumerate(LONGEST)}


def pytest_configure(config: pytest.Config) -> None:
    """What ranks are forked from imports NeMo, for some seconds: once for all of xdist's processes."""
    if config.getoption("numprocesses", None) and find_spec("nemo"):
        from ranks import share_server

        share_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACES.get(item.path.stem, len(PLACES)))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Garbage collection takes a quarter of the time that importing NeMo does, and later goes
    through all of NeMo.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A command for each test that failed; also for the end of `make test`, whose stage this is."""
    if hasattr(terminalreporter.config, "workerinput"):
        return  # one of xdist's processes: the one that started it tells all
    reports = terminalreporter.getreports("failed") + terminalreporter.getreports(
        "error"
    )
    failed = dict.fromkeys(report.nodeid for report in reports)
    given = [f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ]
    program = [*given, sys.executable, "-m", "pytest", "-q"]
    commands = [
        f"cd {shlex.quote(os.getcwd())} && {shlex.join([*program, nodeid])}"
        for nodeid in failed
    ]
    if not commands:
        return
    terminalreporter.section("again")
    terminalreporter.write_line("\n".join(commands))
    if "STAGE_LOG" in os.environ:
        with open(os.environ["STAGE_LOG"], "a") as stages:
            stages.writelines(f"  again: {command}\n" for command in commands)


@pytest.fixture(scope="module")
def jobs_of_this_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Any, Any]]:
    from ranks import at_once

    base = tmp_path_factory.mktemp("jobs")
    numbers = itertools.count()

    def run(job: Any) -> Any:
        folder = base / str(next(numbers))
        folder.mkdir()
        return job.run(folder), folder

    with at_once(request, "results", run) as running:
        yield running


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Any:
    """What `@beside_others` has given this test (tests/ranks.py)."""
    return request.node.callspec.params["results"]


@pytest.fixture
def results(job: Any, jobs_of_this_file: dict[Any, Any]) -> Any:
    """Of its ranks."""
    return jobs_of_this_file[job].result()[0]


@pytest.fixture
def folder(job: Any, jobs_of_this_file: dict[Any, Any]) -> Any:
    """Which it was given."""
    return jobs_of_this_file[job].result()[1]


@pytest.fixture
def said() -> Iterator[list[str]]:
    """nemo_patches' own lines, in this process."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()
    logger = logging.getLogger("nemo_patches")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
