"""The import hook on real NeMo: modules imported early, late, lazily, again or by others' finders,
and every refusal.

Each test runs in a process that is forked with NeMo imported, and imports one of its modules again,
as a first time.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

import pytest
import wrapt
from ranks import Result, run_ranks, wait_until

import nemo_patches
from nemo_patches.patching import (
    COLLECTION,
    TARGET_MODULES,
    monkeypatch,
    start_lines,
    start_up,
)
from nemo_patches.patching.metric_targets import METRIC_TARGETS
from nemo_patches.patching.replacements import Replacement
from nemo_patches.patching.targets import CHECKPOINT_TARGETS

CONFORMER = "nemo.collections.asr.modules.conformer_encoder"
CONV = "nemo.collections.asr.modules.conv_asr"


def alone(function: Callable[..., Any], *args: Any) -> Result:
    """Run function(*args) in a process of its own."""
    (result,) = run_ranks(_call, 1, function, args, group=False)
    return result


def _call(
    rank: int, size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    return function(*args)


def start(**variables: str) -> None:
    """What auto-apply does at start-up, in a process that has imported nothing of NeMo's encoders
    yet.
    """
    for name in (*TARGET_MODULES, COLLECTION):
        modules[name] = sys.modules.pop(name, None)
    os.environ.update(variables)
    start_up.install()
    for name, module in modules.items():
        if module is not None:
            sys.modules[name] = module


modules: dict[str, ModuleType | None] = {}


def replacements() -> list[Replacement]:
    return monkeypatch.this_process.replacements.made


def first_import(name: str = CONFORMER) -> ModuleType:
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def come_first(finder: Any) -> None:
    """A finder that is installed after ours; something that it does not answer for is imported
    before NeMo is.
    """
    sys.meta_path.insert(0, finder)
    sys.modules.pop("colorsys", None)
    importlib.import_module("colorsys")


def complete() -> None:
    """The end of the collection's import, which every process of NeMo's comes to."""
    importlib.reload(sys.modules[COLLECTION])


def is_patched(module: ModuleType) -> bool:
    owner = getattr(module, "ConformerEncoder", None) or module.ConvASREncoder
    return nemo_patches.status().patched != () and any(
        patch.owner is owner for patch in replacements()
    )


def at_first_import() -> list[bool]:
    start()
    states = [bool(replacements())]
    for name in (CONFORMER, CONV):
        states.append(is_patched(first_import(name)))
    complete()
    return states


@pytest.mark.matrix
def test_a_target_is_patched_when_and_only_when_its_module_is_imported() -> None:
    result = alone(at_first_import)
    assert result.value == [False, True, True]
    (line,) = result.lines()
    assert "INFO" in line
    assert "patched ConformerEncoder, ConvASREncoder (nemo " in line


def imported_already() -> tuple[str, ...]:
    start_up.install()
    return nemo_patches.status().patched


def test_a_module_that_was_imported_already_is_patched_at_once() -> None:
    result = alone(imported_already)
    assert "ConformerEncoder.update_max_seq_length" in result.value
    assert len(result.lines()) == 1


def reloaded(by_hand: bool) -> list[bool]:
    if by_hand:
        nemo_patches.apply()
    else:
        start_up.install()
    module = sys.modules[CONFORMER]
    old = module.ConformerEncoder
    importlib.reload(module)
    states = [module.ConformerEncoder is not old, is_patched(module)]
    nemo_patches.revert()
    states += [
        hasattr(cls.update_max_seq_length, "__wrapped__")
        for cls in (old, module.ConformerEncoder)
    ]
    importlib.reload(module)
    return [
        *states,
        hasattr(module.ConformerEncoder.update_max_seq_length, "__wrapped__"),
    ]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_reloaded_module_is_patched_again_and_after_revert_it_is_not(
    by_hand: bool,
) -> None:
    assert alone(reloaded, by_hand).value == [True, True, False, False, False]


def lazily() -> tuple[bool, bool, bool]:
    start()
    sys.modules.pop(CONFORMER)
    spec = importlib.util.find_spec(CONFORMER)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[CONFORMER] = module
    spec.loader.exec_module(module)
    before = bool(replacements())
    owner = module.ConformerEncoder  # loads it
    return (
        before,
        is_patched(module),
        any(patch.owner is owner for patch in replacements()),
    )


def lazily_by_a_finder() -> tuple[bool, bool, bool]:
    class Lazy:
        @staticmethod
        def find_spec(
            name: str, path: Any = None, target: Any = None
        ) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path) if name == CONFORMER else None
            if spec is not None and spec.loader is not None:
                spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec

    start()
    come_first(Lazy)
    module = first_import()
    before = bool(replacements())
    owner = module.ConformerEncoder
    return (
        before,
        is_patched(module),
        any(patch.owner is owner for patch in replacements()),
    )


@pytest.mark.parametrize("how", [lazily, lazily_by_a_finder])
def test_a_lazily_loaded_module_is_patched_when_it_is_loaded(
    how: Callable[..., Any],
) -> None:
    assert alone(how).value == (False, True, True)


def foreign_finder(when: str) -> tuple[bool, bool]:
    class Foreign:
        asked = False

        @classmethod
        def find_spec(
            cls, name: str, path: Any = None, target: Any = None
        ) -> ModuleSpec | None:
            cls.asked = cls.asked or name == CONFORMER
            return PathFinder.find_spec(name, path) if name.startswith("nemo") else None

    if when == "before":
        sys.meta_path.insert(0, Foreign)
    start()
    if when == "after":
        come_first(Foreign)
    return is_patched(first_import()), Foreign.asked


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_finder_that_answers_for_nemo(when: str) -> None:
    assert alone(foreign_finder, when).value == (True, True)


def beside_wrapt() -> tuple[bool, list[str]]:
    told: list[str] = []
    wrapt.register_post_import_hook(
        lambda module: told.append(module.__name__), CONFORMER
    )
    start()
    told.clear()
    wrapt.register_post_import_hook(
        lambda module: told.append("after " + module.__name__), CONV
    )
    sys.modules.pop(CONV)
    return is_patched(first_import(CONV)), told


def beside_a_second_hook_of_ours() -> tuple[bool, list[str]]:
    start()
    importlib.reload(start_up)
    start()
    return is_patched(first_import()), sorted(start_up._finder._asking)


def test_two_hooks_of_ours_ask_each_other_once() -> None:
    assert alone(beside_a_second_hook_of_ours).value == (True, [])


def applied_while_a_thread_imports() -> bool:
    """The thread has Python's lock of a module that apply() wants, and imports an encoder
    meanwhile.
    """
    start()
    first_import()  # so that our hook is in force
    asr_model, begun, imported = (
        METRIC_TARGETS[0].module,
        threading.Event(),
        threading.Event(),
    )

    from nemo_patches.watch.frames import stack

    def wants_metrics() -> bool:
        lines = stack(threading.main_thread().ident or 0)
        return any(code.co_name == "import_targets" for code, _ in lines)

    class Slow(SourceFileLoader):
        """Waits in the module's code: in a finder it would hold Python's one lock of all imports."""

        def exec_module(self, module: ModuleType) -> None:
            begun.set()
            wait_until(wants_metrics)
            first_import(CONV)
            imported.set()
            super().exec_module(module)

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: Any) -> ModuleSpec | None:
            slow = importlib.util.spec_from_file_location(
                name, file, loader=Slow(name, file)
            )
            return slow if name == asr_model else None

    file = str(sys.modules.pop(asr_model).__file__)
    sys.meta_path.insert(0, Finder)
    thread = threading.Thread(target=importlib.import_module, args=(asr_model,))
    thread.start()
    begun.wait(60)
    nemo_patches.apply(metrics="deferred")
    thread.join()
    return imported.is_set() and is_patched(sys.modules[CONV])


def test_apply_does_not_wait_for_a_thread_that_imports_and_waits_for_it() -> None:
    assert alone(applied_while_a_thread_imports).value


def test_beside_wrapts_own_import_hooks() -> None:
    patched, told = alone(beside_wrapt).value
    assert patched
    assert f"after {CONV}" in told


def faces(module: ModuleType) -> dict[str, Any]:
    """What inspect and everybody else see of the module, of its class and of the patched methods."""
    assert module.__spec__ is not None
    found: dict[str, Any] = {
        "loader": (
            type(module.__loader__),
            type(module.__spec__.loader),
            module.__loader__ is module.__spec__.loader,
        ),
        "module": (
            module.__name__,
            module.__file__,
            module.__doc__,
            inspect.getsource(module),
            sorted(vars(module)),
        ),
    }
    owner = module.ConformerEncoder
    for thing in (
        owner,
        owner.update_max_seq_length,
        owner.set_max_audio_length,
        owner.forward,
    ):
        found[thing.__qualname__] = (
            thing.__name__,
            thing.__module__,
            thing.__doc__,
            str(inspect.signature(thing)),
            inspect.getsource(thing),
            inspect.getsourcelines(thing)[1],
        )
    return found


def seen_from_outside() -> tuple[dict[str, Any], dict[str, Any]]:
    stock = faces(first_import())
    start()
    module = first_import()
    assert is_patched(module)
    return stock, faces(module)


@pytest.mark.matrix
def test_what_is_patched_looks_like_stock_through_inspect() -> None:
    stock, patched = alone(seen_from_outside).value
    assert patched == stock
    assert stock["loader"] == (SourceFileLoader, SourceFileLoader, True)


def error_of_ours() -> list[str]:
    start()
    monkeypatch.this_process.on_import = None  # type: ignore[assignment,method-assign]  # any bug of ours
    return [first_import(name).__name__ for name in (CONFORMER, CONV)]


def test_an_error_of_ours_never_fails_nemos_import_and_is_said_once() -> None:
    result = alone(error_of_ours)
    assert result.value == [CONFORMER, CONV]
    (line,) = [
        line
        for line in result.stderr.splitlines()
        if line.startswith("nemo_patches ERROR")
    ]
    assert "[rank 0/1" in line
    assert "not patched, NeMo runs as stock: TypeError" in line


def late_error_of_ours() -> bool:
    start()
    first_import(CONFORMER)
    monkeypatch.this_process.on_import = None  # type: ignore[assignment,method-assign]  # any bug of ours
    first_import(CONV)
    return is_patched(sys.modules[CONFORMER])


def test_an_error_of_ours_later_does_not_say_that_what_is_patched_is_not() -> None:
    result = alone(late_error_of_ours)
    assert result.value
    assert "patching has ended, what is patched stays so: TypeError" in result.stderr
    assert "runs as stock" not in result.stderr


def no_words() -> bool:
    start_lines.find_overrides = None  # type: ignore[assignment]  # any bug of ours
    nemo_patches.apply()
    return is_patched(sys.modules[CONFORMER])


def test_an_error_in_what_is_only_said_leaves_nemo_patched_and_says_so() -> None:
    result = alone(no_words)
    assert result.value
    assert "patched: ConformerEncoder" in result.stderr
    assert "please report it: TypeError" in result.stderr
    assert "runs as stock" not in result.stderr


def interrupted() -> str:
    def handler(*_: object) -> None:
        raise RuntimeError("the user's own")

    signal.signal(signal.SIGUSR1, handler)
    start()
    monkeypatch.this_process.on_import = lambda name: os.kill(
        os.getpid(), signal.SIGUSR1
    )
    with pytest.raises(RuntimeError, match="the user's own"):
        first_import()
    return "raised"


def test_what_a_signal_handler_raises_meanwhile_is_not_swallowed() -> None:
    result = alone(interrupted)
    assert result.value == "raised"
    assert "runs as stock" not in result.stderr


def without_wrapt() -> str:
    start()
    for name in [
        name
        for name in sys.modules
        if name.startswith("wrapt") or name == monkeypatch.__name__
    ]:
        sys.modules[name] = None  # type: ignore[assignment]
    del nemo_patches.patching.monkeypatch
    return first_import().__name__


def test_a_missing_requirement_is_said_and_nemo_runs() -> None:
    result = alone(without_wrapt)
    assert result.value == CONFORMER
    assert "not patched, NeMo runs as stock: ModuleNotFoundError" in result.stderr


class Edited(SourceFileLoader):
    """NeMo's own file with something changed, as a later release may have it."""

    def get_code(self, name: str) -> Any:
        text = self.get_source(name) or ""
        assert "seq_length: int, device" in text
        return compile(
            text.replace("seq_length: int, device", "seq_length: int, more, device"),
            self.path,
            "exec",
        )


def drifted(first: str, second: str) -> tuple[bool, int]:
    class Finder:
        @staticmethod
        def find_spec(
            name: str, path: Any = None, target: Any = None
        ) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path) if name == CONFORMER else None
            if spec is not None and spec.origin is not None:
                spec.loader = Edited(name, spec.origin)
            return spec

    start()
    come_first(Finder)
    for name in (first, second):
        first_import(name)
    complete()
    return bool(replacements()), len(nemo_patches.status().patched)


@pytest.mark.parametrize("order", [(CONFORMER, CONV), (CONV, CONFORMER)])
def test_a_drifted_target_leaves_all_of_nemo_as_stock_and_is_said_once(
    order: tuple[str, str],
) -> None:
    result = alone(drifted, *order)
    assert result.value == (False, 0)
    (line,) = result.lines()
    assert "ERROR" in line
    assert "[rank 0/1" in line
    assert "runs as stock" in line
    assert "found (self, seq_length, more, device)" in line


def refused(variables: dict[str, str], version: str) -> tuple[int, list[str]]:
    import nemo.package_info

    start(**variables)
    if version:
        nemo.package_info.__shortversion__ = version
    for name in (CONFORMER, CONV):
        first_import(name)
    complete()
    status = nemo_patches.status()
    return len(status.patched), [skipped.reason for skipped in status.skipped]


@pytest.mark.parametrize(
    ("variables", "version", "said"),
    [
        (
            {"NEMO_PATCHES_TIMEOUT": "soon"},
            "",
            "NEMO_PATCHES_TIMEOUT='soon' is not allowed; allowed: a number",
        ),
        (
            {"NEMO_PATCHES_SYNC": "x"},
            "",
            "NEMO_PATCHES_SYNC='x' is not allowed; allowed: 'bounded'",
        ),
        (
            {"NEMO_PATCHES_DISABLE": "yes"},
            "",
            "NEMO_PATCHES_DISABLE='yes' is not allowed; allowed: '1' (on), '0'",
        ),
        (
            {},
            "9.9.0",
            (
                "NeMo 9.9.0 is not supported; supported: 2.1, 2.2, 2.3, 2.4, 2.5, 2.6,"
                " 2.7, 3.0. With"
                " NEMO_PATCHES_UNSUPPORTED=1"
            ),
        ),
        ({}, "1.23.0", "NeMo 1.23.0 is not supported"),
        ({}, "3.01.0", "NeMo 3.01.0 is not supported"),
        ({}, "main", "NeMo main is not supported"),
        (
            {"NEMO_PATCHES_UNSUPPORTED": "sure"},
            "",
            "NEMO_PATCHES_UNSUPPORTED='sure' is not allowed",
        ),
    ],
)
def test_a_refusal_is_one_line_and_nemo_runs_as_stock(
    variables: dict[str, str], version: str, said: str
) -> None:
    result = alone(refused, variables, version)
    patched, reasons = result.value
    assert patched == 0
    (line,) = result.lines()
    assert "runs as stock" in line
    assert said in line
    assert reasons and all(said in reason for reason in reasons)


def test_an_unsupported_nemo_is_patched_on_demand_if_its_targets_look_right() -> None:
    result = alone(refused, {"NEMO_PATCHES_UNSUPPORTED": "1"}, "9.9.0")
    assert result.value[0] == 2 + len(CHECKPOINT_TARGETS)
    (line,) = result.lines("INFO", "nemo 9.9.0")
    assert "ConformerEncoder" in line
    (line,) = result.lines("WARNING")
    assert (
        "NeMo 9.9.0 is newer than any that was tested" in line
        and "no difference (looked at: Conf" in line
    )


def apply_of_an_unsupported_nemo() -> str:
    import nemo.package_info

    nemo.package_info.__shortversion__ = "9.9.0"
    with pytest.raises(RuntimeError) as caught:
        nemo_patches.apply()
    assert not replacements()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_apply_refuses_an_unsupported_nemo() -> None:
    assert alone(apply_of_an_unsupported_nemo).value.startswith(
        "UnsupportedNeMo: NeMo 9.9.0 is not supported"
    )


def one_without_a_reduce() -> tuple[list[str], list[str], str]:
    start()
    sys.modules[CONFORMER].ConformerEncoder.update_max_seq_length = without_a_reduce
    monkeypatch.this_process.on_import(CONFORMER)
    first_import(CONV)
    complete()
    status = nemo_patches.status()
    reasons = [
        one.reason
        for one in status.skipped
        if one.target.startswith("ConformerEncoder")
    ]
    return [*status.patched], reasons, status.state


def without_a_reduce(self: Any, seq_length: int, device: object) -> None:
    """As patches/upstream/ leaves it."""
    if seq_length > self.max_audio_length:
        self.set_max_audio_length(seq_length)


def test_of_two_encoders_that_with_a_reduce_is_patched_and_the_other_is_said_to_be_left() -> (
    None
):
    result = alone(one_without_a_reduce)
    patched, reasons, state = result.value
    assert "ConvASREncoder.update_max_sequence_length" in patched
    assert not any(title.startswith("ConformerEncoder") for title in patched)
    assert (reasons, state) == (["no reduce here: nothing to bound"], "on")
    (line,) = result.lines(
        "left as it is: ConformerEncoder: no reduce here: nothing to bound"
    )
    assert line.endswith("; stall reports watch the job")
    assert result.lines("patched ConvASREncoder")


def disabled_by_hand() -> int:
    os.environ["NEMO_PATCHES_DISABLE"] = "1"
    nemo_patches.apply()
    return len(nemo_patches.status().patched)


def test_disabled_apply_patches_nothing_and_says_so() -> None:
    result = alone(disabled_by_hand)
    assert result.value == 0
    assert result.lines(
        "WARNING", "not patched, NeMo runs as stock: NEMO_PATCHES_DISABLE=1"
    )


def apply_as_well() -> tuple[list[str], int]:
    start(NEMO_PATCHES_TIMEOUT="7")
    first_import()
    first_import(CONV)
    complete()
    count = len(replacements())
    before = str(nemo_patches.status().settings)
    nemo_patches.apply(timeout=3)
    return [before, str(nemo_patches.status().settings)], len(replacements()) - count


def test_apply_in_a_script_under_auto_apply_changes_the_settings_and_says_so() -> None:
    result = alone(apply_as_well)
    (before, after), more = result.value
    assert "timeout=7 s" in before
    assert "timeout=3 s" in after
    assert more == 0
    assert result.lines("settings changed", "timeout=3 s", "before:")


def misspelt(by_hand: bool) -> bool:
    if by_hand:
        os.environ["NEMO_PATCHES_TIMEOUTS"] = "3"
    else:
        start(NEMO_PATCHES_TIMEOUTS="3")
        first_import()
        first_import(CONV)
        complete()
    nemo_patches.apply(timeout=5)
    nemo_patches.revert()
    nemo_patches.apply()
    return nemo_patches.status().patched != ()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_misspelt_variable_is_said_once_in_a_process_that_is_patched(
    by_hand: bool,
) -> None:
    result = alone(misspelt, by_hand)
    assert result.value
    (line,) = result.lines("WARNING")
    assert line.endswith(
        "NEMO_PATCHES_TIMEOUTS is not a setting, and has no effect; did you mean"
        " NEMO_PATCHES_TIMEOUT?"
    )
    assert "[rank 0/1 " in line


def hook_after_apply(disabled: str) -> list[bool]:
    os.environ["NEMO_PATCHES_DISABLE"] = disabled
    before = start_up.is_installed()
    nemo_patches.apply()
    return [before, start_up.is_installed()]


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_apply_installs_the_hook_only_if_it_patches(disabled: str) -> None:
    assert alone(hook_after_apply, disabled).value == [False, disabled == "0"]


def worker_says(pipe: Any) -> None:
    # Misspelt: the rank says it, its workers do not.
    os.environ["NEMO_PATCHES_TIMEOUTS"] = "3"
    start_up.install()
    pipe.send(nemo_patches.status().patched)


def in_a_loader_worker() -> Any:
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(
        target=worker_says, args=(theirs,), daemon=True
    )
    worker.start()
    try:
        assert ours.poll(60)
        return ours.recv()
    finally:
        worker.kill()
        worker.join()


def test_a_data_loaders_worker_is_patched_without_a_line_of_its_own() -> None:
    result = alone(in_a_loader_worker)
    assert "ConformerEncoder.update_max_seq_length" in result.value
    assert result.lines() == []
