"""apply(), revert() and status() on the installed NeMo: what they change, say and refuse."""

from __future__ import annotations

import functools
import inspect
import logging
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import encoders
import pytest
import torch
import wrapt
from ranks import run_ranks

import nemo_patches
from nemo_patches.patching.targets import TARGETS, DriftError
from nemo_patches.sync.settings import SettingsError


@pytest.fixture(autouse=True)
def reverted() -> Iterator[None]:
    yield
    nemo_patches.revert()


def owners() -> list[type]:
    found = (
        target.find_owner(sys.modules[target.module])
        for target in TARGETS
        if target.module in sys.modules
    )
    return [owner for owner in found if owner is not None]


def attributes() -> dict[tuple[str, str], int]:
    """Every class attribute by identity."""
    return {
        (owner.__qualname__, name): id(value)
        for owner in owners()
        for name, value in vars(owner).items()
    }


def test_importing_the_package_imports_neither_torch_nor_nemo() -> None:
    program = (
        "import sys, nemo_patches; print([m for m in sys.modules if m.split('.')[0] in"
        " ('torch', 'nemo', 'wrapt')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.matrix
def test_revert_restores_every_attribute_to_the_very_object_it_was() -> None:
    nemo_patches.apply()
    nemo_patches.revert()
    before = attributes()
    nemo_patches.apply()
    assert attributes() != before
    nemo_patches.revert()
    assert attributes() == before
    assert nemo_patches.status().patched == ()


def test_threads_that_apply_at_once_patch_once() -> None:
    nemo_patches.apply()
    nemo_patches.revert()
    before, switching = attributes(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(10):
            together = threading.Barrier(4)

            def apply(together: threading.Barrier = together) -> None:
                together.wait(60)
                nemo_patches.apply()

            with ThreadPoolExecutor(4) as threads:
                for done in [threads.submit(apply) for _ in range(4)]:
                    done.result(60)
            nemo_patches.revert()
            assert attributes() == before
    finally:
        sys.setswitchinterval(switching)


def test_apply_is_idempotent_and_a_second_one_changes_the_settings_and_says_so(
    caplog: Any,
) -> None:
    nemo_patches.apply(timeout=3)
    patched = attributes()
    with listening(caplog):
        nemo_patches.apply(timeout=3)
        assert caplog.messages == []
        nemo_patches.apply(timeout=4, sync="local")
    (message,) = caplog.messages
    assert "sync=local, timeout=4 s" in message
    assert "before: sync=bounded, timeout=3 s" in message
    assert attributes() == patched
    assert nemo_patches.status().settings.sync == "local"


class listening:
    """caplog's handler on our logger, which does not propagate."""

    def __init__(self, caplog: Any) -> None:
        self.caplog = caplog

    def __enter__(self) -> None:
        from nemo_patches.sync.rank_log import logger

        self.caplog.clear()
        logger.addHandler(self.caplog.handler)

    def __exit__(self, *_: object) -> None:
        from nemo_patches.sync.rank_log import logger

        logger.removeHandler(self.caplog.handler)


def test_a_traces_hook_for_exceptions_comes_with_the_first_call_and_goes_with_the_trace(
    tmp_path: Path,
) -> None:
    own = sys.excepthook
    nemo_patches.apply()
    encoders.run(encoders.conformer(), 40)
    nemo_patches.apply(trace="-")
    assert sys.excepthook is own
    encoders.run(encoders.conformer(), 40)
    assert sys.excepthook is not own
    nemo_patches.apply(trace="")
    assert sys.excepthook is own


def test_status_prints_well() -> None:
    nemo_patches.apply(timeout=7)
    status = nemo_patches.status()
    text = str(status)
    assert f"torch {torch.__version__}" in text
    assert "sync=bounded, timeout=7 s, on_timeout=fallback" in text
    assert "ConformerEncoder.update_max_seq_length" in text
    for target in TARGETS:
        assert (str(target) in status.patched) != any(
            str(target) == skipped.target for skipped in status.skipped
        )
    assert all(skipped.reason for skipped in status.skipped)


def test_the_first_line_is_short_and_the_rest_is_at_debug(caplog: Any) -> None:
    caplog.set_level(logging.DEBUG, "nemo_patches")
    with listening(caplog):
        nemo_patches.apply(stall_exit=300)
    first, *rest = caplog.records
    message = first.getMessage()
    assert (first.levelno, {record.levelno for record in rest}) == (
        logging.INFO,
        {logging.DEBUG},
    )
    assert len(message) <= 250
    assert "; sync=bounded, timeout=10 s, stall_exit=300 s" in message
    assert "stall_timeout" not in message
    texts = "\n".join(record.getMessage() for record in rest)
    assert "stall_timeout=60 s" in texts
    for skipped in nemo_patches.status().skipped:
        assert f"not patched: {skipped.target}: {skipped.reason}" in texts


def state_in_a_spawned_process() -> tuple[str, str]:
    nemo_patches.apply()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return nemo_patches.status().state, pool.apply_async(_state_here).get(240)


def _state_here() -> str:
    return str(nemo_patches.status()).splitlines()[0]


@pytest.mark.one_nemo
def test_a_spawned_process_is_not_patched_and_both_say_so() -> None:
    (result,) = run_ranks(without_group, 1, state_in_a_spawned_process, group=False)
    parent, child = result.value
    (line,) = result.lines("patched ")
    assert parent == "on"
    assert line.endswith("; a process that this one spawns must call apply() too")
    assert child.startswith(
        "off here: nemo_patches.apply() or `nemo-patches run` switches it on"
    )


def without_group(rank: int, size: int, function: Any) -> Any:
    return function()


def test_status_has_one_of_three_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> str:
        return nemo_patches.status().state

    assert state() == "off here"
    monkeypatch.setenv("NEMO_PATCHES_DISABLE", "1")
    nemo_patches.apply()
    assert str(nemo_patches.status()).startswith("off here: NEMO_PATCHES_DISABLE=1")
    monkeypatch.setenv("NEMO_PATCHES_DISABLE", "x")
    assert str(nemo_patches.status()).startswith(
        "cannot be: NEMO_PATCHES_DISABLE='x' is not allowed"
    )
    monkeypatch.setattr("nemo.package_info.__shortversion__", "9.9.0")
    monkeypatch.setenv("NEMO_PATCHES_DISABLE", "1")
    # Switching it on would not help, and `nemo-patches status` says the same.
    assert state() == "cannot be"
    monkeypatch.delenv("NEMO_PATCHES_DISABLE")
    assert str(nemo_patches.status()).startswith(
        "cannot be: NeMo 9.9.0 is not supported"
    )
    monkeypatch.undo()
    nemo_patches.apply()
    assert str(nemo_patches.status()).startswith(
        f"on: {len(nemo_patches.status().patched)} of NeMo's methods patched"
    )
    nemo_patches.revert()
    assert state() == "off here"


@pytest.mark.matrix
def test_every_target_that_this_nemo_has_is_patched() -> None:
    nemo_patches.apply()
    patched = " ".join(nemo_patches.status().patched).lower()
    for name in encoders.makers():
        assert name.replace("_", "") in patched


def test_a_class_in_a_wrapper_is_found_whatever_pythons_own_unwrap_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NeMo's @experimental wraps TransformerEncoder; this Python's unwrap may be an older one."""
    nemo_patches.apply()
    # As from Python 3.11.8 on: wrapt's wrapper of a class says that it is a class.
    monkeypatch.setattr(inspect, "unwrap", lambda wrapper: wrapper)
    assert all(issubclass(type(owner), type) for owner in owners())
    assert nemo_patches.status().patched


def test_a_bad_setting_patches_nothing() -> None:
    before = attributes()
    with pytest.raises(SettingsError, match="sync='quick'"):
        nemo_patches.apply(sync="quick")  # type: ignore[arg-type]
    assert attributes() == before


def changed_signature(owner: Any) -> None:
    def update_max_seq_length(
        self: Any, seq_length: int, device: Any, extra: int = 0
    ) -> None: ...

    owner.update_max_seq_length = update_max_seq_length


def changed_body(owner: Any) -> None:
    def update_max_seq_length(self: Any, seq_length: int, device: Any) -> None:
        self.something_else(seq_length)

    owner.update_max_seq_length = update_max_seq_length


def wrapped_by_others(owner: Any) -> None:
    original = owner.update_max_seq_length

    @functools.wraps(original)
    def update_max_seq_length(self: Any, seq_length: int, device: Any) -> None:
        original(self, seq_length, device)

    owner.update_max_seq_length = update_max_seq_length


def removed(owner: Any) -> None:
    del owner.set_max_audio_length


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("drift", "said"),
    [
        (
            changed_signature,
            (
                r"expected a plain function \(self, seq_length, device\), found"
                r" \(.*extra\)"
            ),
        ),
        (changed_body, "without .*'all_reduce'.* and with .*'something_else'"),
        (wrapped_by_others, "expected a plain function .*found <function"),
        (removed, "set_max_audio_length.*found None"),
    ],
)
def test_drift_is_shown_with_what_was_expected_and_found_and_patches_nothing(
    drift: Any, said: str
) -> None:
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

    before = attributes()
    saved = {
        name: vars(ConformerEncoder)[name]
        for name in ("update_max_seq_length", "set_max_audio_length")
    }
    try:
        drift(ConformerEncoder)
        with pytest.raises(DriftError, match=f"(?s)nothing was patched.*{said}"):
            nemo_patches.apply()
        assert nemo_patches.status().patched == ()
    finally:
        for name, function in saved.items():
            setattr(ConformerEncoder, name, function)
    assert attributes() == before


def by_wraps(original: Any) -> Any:
    @functools.wraps(original)
    def logged(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    return logged


def by_closure(original: Any) -> Any:
    def logged(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

    return logged


def by_wrapt(original: Any) -> Any:
    def logged(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, logged)


def by_a_bound_method(original: Any) -> Any:
    class Logger:
        def logged(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
            wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, Logger().logged)


def by_partial(original: Any) -> Any:
    def logged(self: Any, inner: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)

    return functools.partialmethod(logged, original)


def by_two(original: Any) -> Any:
    return by_wrapt(by_wraps(original))


WRAPPERS = [by_wraps, by_closure, by_wrapt, by_a_bound_method, by_partial, by_two]
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS)


def at(function: Any) -> str:
    """Where its inner function stands: the line below its own, or one further down for a decorator
    or a class.
    """
    lines = Path(__file__).read_text().splitlines()
    line = next(
        i
        for i in range(function.__code__.co_firstlineno, len(lines))
        if "def logged(" in lines[i]
    )
    return f"({__file__}:{line + 1 - lines[line - 1].strip().startswith('@')})"


@pytest.fixture
def conformer_class() -> Iterator[Any]:
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

    saved = dict(vars(ConformerEncoder))
    yield ConformerEncoder
    nemo_patches.revert()
    for name in ("update_max_seq_length", "set_max_audio_length"):
        setattr(ConformerEncoder, name, saved[name])


@each_wrapper
@pytest.mark.parametrize("method", ["update_max_seq_length", "set_max_audio_length"])
def test_a_wrapper_that_came_first_is_named(
    wrap: Any, method: str, conformer_class: Any
) -> None:
    original = vars(conformer_class)[method]
    setattr(conformer_class, method, wrap(original))
    with pytest.raises(DriftError) as raised:
        nemo_patches.apply()
    assert f"ConformerEncoder.{method} is test_apply." in str(raised.value)
    assert at(wrap if wrap is not by_two else by_wrapt) in str(raised.value)
    if wrap in (by_wraps, by_wrapt, by_a_bound_method, by_two):
        assert (
            ", around NeMo's own; take that off before apply(), or put it on after"
            " apply(): " in str(raised.value)
        )
    if wrap is by_two:
        assert (
            f"{at(by_wrapt)}, around test_apply.by_wraps.<locals>.logged"
            f" {at(by_wraps)}, " in str(raised.value)
        )
    setattr(conformer_class, method, original)
    nemo_patches.apply()


@each_wrapper
def test_a_wrapper_around_ours_is_named_by_revert_and_by_the_next_apply(
    wrap: Any, conformer_class: Any, caplog: Any
) -> None:
    nemo_patches.apply()
    ours = vars(conformer_class)["update_max_seq_length"]
    conformer_class.update_max_seq_length = wrap(ours)
    place = at(wrap if wrap is not by_two else by_wrapt)
    with listening(caplog):
        nemo_patches.revert()
    (message,) = caplog.messages
    assert (
        "ConformerEncoder.update_max_seq_length was patched again by others,"
        " test_apply." in message
    )
    assert place in message and "acts as NeMo's own from now on" in message
    encoder = encoders.conformer()
    with torch.inference_mode():
        encoder.update_max_seq_length(seq_length=500, device=torch.device("cpu"))
    # As in stock.
    assert encoder.max_audio_length == 500 and encoder.pos_enc.pe.is_inference()
    with pytest.raises(DriftError) as raised:
        nemo_patches.apply()
    assert "ConformerEncoder.update_max_seq_length is test_apply." in str(raised.value)
    assert place in str(raised.value)
    if wrap in (by_wraps, by_wrapt, by_a_bound_method, by_two):
        assert ", around nemo_patches' own, of before revert(); take that off " in str(
            raised.value
        )
    # Who takes a wrapper off puts back what was there.
    conformer_class.update_max_seq_length = ours
    nemo_patches.apply()
    assert vars(conformer_class)["update_max_seq_length"] is not ours
    nemo_patches.revert()
    assert not hasattr(vars(conformer_class)["update_max_seq_length"], "__wrapped__")


def patched_again_by_others(rank: int, size: int) -> tuple[int, int]:
    from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder

    nemo_patches.apply()
    ours = ConformerEncoder.update_max_seq_length
    ConformerEncoder.update_max_seq_length = lambda self, seq_length, device: ours(
        self, seq_length, device
    )
    nemo_patches.revert()
    encoder = encoders.conformer()
    encoder.update_max_seq_length(
        seq_length=100 * (rank + 1), device=torch.device("cpu")
    )
    return encoder.max_audio_length, len(nemo_patches.status().encoders)


def test_ours_inside_somebody_elses_wrapper_does_nothing_after_revert() -> None:
    for result in run_ranks(patched_again_by_others, 2):
        assert result.value == (200, 0)  # stock's own reduce
        assert result.lines("patched again by others")


def errors_of_ours(rank: int, size: int) -> int:
    from nemo_patches.sync import length_sync

    nemo_patches.apply()
    encoder = encoders.conformer()
    length_sync.EncoderSync.call = None  # type: ignore[method-assign, assignment]  # any bug of ours
    for step in range(3):
        encoder.update_max_seq_length(
            seq_length=100 * (step + 1), device=torch.device("cpu")
        )
    return encoder.max_audio_length


def test_an_error_of_ours_is_said_once_and_never_reaches_training() -> None:
    for rank, result in enumerate(run_ranks(errors_of_ours, 2)):
        assert result.value == 300
        (line,) = result.lines("ERROR")
        assert f"rank {rank}/2" in line


@pytest.mark.one_nemo
def test_importing_the_encoders_without_nemo_says_so(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['nemo'] = None; import nemo_patches;"
        " nemo_patches.apply()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_lines_are_visible_once_whatever_logging_is_set_up_to() -> None:
    program = (
        "import contextlib, io, logging, logging.config\nfrom"
        " nemo_patches.sync.rank_log import report\nwith"
        " contextlib.redirect_stderr(io.StringIO()) as before:  # as people do around a"
        " noisy import\n    report(logging.INFO, 'into a stream that is"
        " gone')\nbefore.close()\nreport(logging.INFO, 'without any"
        " set-up')\nlogging.config.dictConfig({'version': 1})  # disables every logger"
        " that it is not told of\nreport(logging.INFO, 'after"
        " dictConfig')\nlogging.basicConfig(level=logging.INFO,"
        " force=True)\nreport(logging.INFO, 'beside a root handler')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for said in ("without any set-up", "after dictConfig", "beside a root handler"):
        assert done.stderr.count(said) == 1, done.stderr
    assert done.stderr.count("[rank ") == 3


def test_two_threads_that_say_their_first_line_at_once_say_it_once() -> None:
    program = (
        "import logging, sys, threading\n"
        "from nemo_patches.sync.rank_log import logger, report\n"
        "sys.setswitchinterval(1e-6)\n"
        "for attempt in range(300):\n"
        "    logger.handlers.clear()  # as before the first line\n"
        "    together = threading.Barrier(4)\n"
        "    def say():\n"
        "        together.wait()\n"
        "        report(logging.INFO, f'attempt {attempt}')\n"
        "    threads = [threading.Thread(target=say) for _ in range(4)]\n"
        "    [thread.start() for thread in threads]\n"
        "    [thread.join() for thread in threads]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr.count("attempt") == 4 * 300
