"""Classes with a length sync of their own: named at apply(), when the class is made and by status(); no other is."""

from __future__ import annotations

import abc
import copy
import functools
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import encoders
import pytest
import torch
import torch.distributed as dist
from interpreters import CHECKOUT, environment, run
from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder
from nemo.collections.asr.modules.conv_asr import ConvASREncoder
from torch.distributed import all_reduce as largest_of_all

import nemo_patches
from nemo_patches.sync import own_syncs, rank_log

METHOD = "update_max_seq_length"
NAMED = "has a length sync of its own, which is not bounded: "
UNKNOWN = "replaces the bounded length sync, and whether it waits for other ranks is not known: "


Said = Callable[[str], list[str]]
NUMBERS = itertools.count()


@pytest.fixture
def title() -> str:
    """A class name that no other test has: classes live until the garbage collector finds them."""
    return f"Encoder{next(NUMBERS)}"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Said]:
    """The warnings about a class; nothing is patched at the beginning."""
    nemo_patches.revert()
    rank_log.enable()
    rank_log.logger.addHandler(caplog.handler)
    yield lambda title: [record.getMessage() for record in caplog.records if f".{title}." in record.getMessage()]
    rank_log.logger.removeHandler(caplog.handler)
    nemo_patches.revert()


def line_of(function: Any) -> str:
    code = function.__code__
    return f"({code.co_filename}:{code.co_firstlineno})"


def own_reduce(self: Any, seq_length: int, device: Any) -> None:
    """As NeMo's."""
    longest = torch.tensor([seq_length], dtype=torch.float32, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    self.set_max_audio_length(int(longest.item()))


def renamed(self: Any, seq_length: int, device: Any) -> None:
    longest = torch.tensor([seq_length])
    largest_of_all(longest)
    self.set_max_audio_length(int(longest))


def by_getattr(self: Any, seq_length: int, device: Any) -> None:
    getattr(torch.distributed, "all_reduce")(torch.tensor([seq_length]))  # noqa: B009


def broadcasts(self: Any, seq_length: int, device: Any) -> None:
    dist.broadcast(torch.tensor([seq_length]), 0)


def in_an_inner_function(self: Any, seq_length: int, device: Any) -> None:
    def agree(length: int) -> int:
        lengths = [0]
        dist.all_gather_object(lengths, length)
        return max(lengths)

    self.set_max_audio_length(agree(seq_length))


def helper(length: int) -> int:
    longest = torch.tensor([length])
    torch.distributed.all_reduce(longest)
    return int(longest)


def by_a_helper(self: Any, seq_length: int, device: Any) -> None:
    self.set_max_audio_length(helper(seq_length))


class Comm:
    def agree(self, length: int) -> int:
        return helper(length)


COMM = Comm()


def by_an_object(self: Any, seq_length: int, device: Any) -> None:
    self.set_max_audio_length(COMM.agree(seq_length))


def by_a_method(self: Any, seq_length: int, device: Any) -> None:
    self.set_max_audio_length(self.agree(seq_length))


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def unwrapped_name(function: Any) -> Any:
    def wrapper(self: Any, *args: Any) -> Any:
        return function(self, *args)

    return wrapper


OWN: dict[str, Any] = {
    "own": own_reduce,
    "renamed": renamed,
    "getattr": by_getattr,
    "broadcast": broadcasts,
    "inner function": in_an_inner_function,
    "helper": by_a_helper,
    "object": by_an_object,
    "method": by_a_method,
    "no_grad": torch.no_grad()(own_reduce),
    "wraps": logged(own_reduce),
    "closure": unwrapped_name(own_reduce),
    "partial": functools.partialmethod(own_reduce),
    "nemo's, taken before apply()": vars(ConformerEncoder)[METHOD],
}


def without_reduce(self: Any, seq_length: int, device: Any) -> None:
    if seq_length > self.max_audio_length:
        self.max_audio_length = seq_length
        self.pos_enc.extend_pe(seq_length, device, torch.float32)


def of_tensors(self: Any, seq_length: int, device: Any) -> None:
    torch.arange(seq_length).gather(0, torch.zeros(1, dtype=torch.long))
    self.set_max_audio_length(functools.reduce(max, [seq_length]))


def notes(self: Any, seq_length: int, device: Any) -> None:
    self.lengths.append(seq_length)
    self.lengths.setdefault(seq_length)
    super(type(self), self).update_max_seq_length(seq_length, device)


def by_name(self: Any, seq_length: int, device: Any) -> None:
    getattr(super(type(self), self), METHOD)(seq_length, device)


def of_the_base(self: Any, seq_length: int, device: Any) -> None:
    ConformerEncoder.update_max_seq_length(self, seq_length, device)


def through_a_helper(self: Any, seq_length: int, device: Any) -> None:
    of_the_base(self, seq_length, device)


FINE: dict[str, Any] = {
    "none": without_reduce,
    "of tensors": of_tensors,
    "super": notes,
    "super by name": by_name,
    "base": of_the_base,
    "helper": through_a_helper,
    "wraps": logged(notes),
    "no_grad": torch.no_grad()(without_reduce),
    "lambda": lambda self, seq_length, device: self.set_max_audio_length(seq_length),
}


def both(self: Any, seq_length: int, device: Any) -> None:
    dist.all_reduce(torch.tensor([seq_length]))
    super(type(self), self).update_max_seq_length(seq_length, device)


def with_a_limit(self: Any, seq_length: int, device: Any) -> None:
    dist.all_reduce(torch.tensor([seq_length]), async_op=True).wait(timedelta(seconds=5))


def of_an_object_to_come(self: Any, seq_length: int, device: Any) -> None:
    self.comm.agree(seq_length)


def by_the_strategy(self: Any, seq_length: int, device: Any) -> None:
    longest = self.trainer.strategy.reduce(torch.tensor(seq_length), reduce_op="max")
    self.set_max_audio_length(int(longest))


def of_a_broadcast_to_come(self: Any, seq_length: int, device: Any) -> None:
    self.set_max_audio_length(self.fabric.broadcast(seq_length))


NOT_KNOWN: dict[str, Any] = {
    "Lightning's strategy": by_the_strategy,
    "Fabric": of_a_broadcast_to_come,
    "both": both,
    "limit": with_a_limit,
    "object": of_an_object_to_come,
    "mock": mock.MagicMock(),
    "C": torch.tensor,
}
each_own = pytest.mark.parametrize("name", OWN)


def subclass(name: str, override: Any, base: Any = ConformerEncoder, **others: Any) -> Any:
    def agree(self: Any, length: int) -> int:
        return helper(length)

    return types.new_class(
        name, (base,), exec_body=lambda body: body.update({METHOD: override, "agree": agree, "__module__": __name__})
    )


@each_own
@pytest.mark.parametrize("when", ["before apply()", "after apply()"])
def test_a_reduce_of_its_own_is_named_once(name: str, when: str, title: str, said: Said) -> None:
    if when == "after apply()":
        nemo_patches.apply()
    made = subclass(title, OWN[name])
    if when == "before apply()":
        assert said(title) == []
        nemo_patches.apply()
    (line,) = said(title)
    assert f"test_own_syncs.{title}.{METHOD} (" in line and NAMED in line, line
    assert line.endswith(
        f" waits without limit for a missing rank; call super().{METHOD}(...) there instead, or delete it"
    )
    if name in ("own", "no_grad", "wraps"):
        assert f"{title}.{METHOD} {line_of(own_reduce)} has" in line
    if name in ("helper", "object", "method"):
        assert f": all_reduce in test_own_syncs.helper {line_of(helper)} waits" in line
    nemo_patches.apply(timeout=3)
    again = subclass(title, OWN[name])  # as by a reload, or a decorator that makes a class anew
    status = nemo_patches.status()
    assert len(said(title)) == 1
    first = str(status).splitlines()[0]
    assert first.startswith(f"on: {len(status.patched)} of NeMo's methods patched, but not these length syncs: ")
    assert first.count(f"test_own_syncs.{title}.{METHOD}") == 1
    assert line.partition("] ")[2] in status.own_syncs and line.partition("] ")[2] in str(status)
    assert made is not again


@pytest.mark.parametrize("name", FINE)
def test_an_override_that_does_not_reduce_or_calls_super_is_not_named(name: str, title: str, said: Said) -> None:
    nemo_patches.apply()
    made = subclass(title, FINE[name])
    assert said(title) == []
    assert not [text for text in nemo_patches.status().own_syncs if made.__name__ in text]


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_cannot_be_told_is_said_to_be_not_known(name: str, title: str, said: Said) -> None:
    nemo_patches.apply()
    made = subclass(title, NOT_KNOWN[name])
    (line,) = said(title)
    assert UNKNOWN in line and NAMED not in line
    assert [text for text in nemo_patches.status().own_syncs if made.__name__ in text]


def test_an_alias_of_ours_is_fine_and_a_module_of_the_users_own_is_read(title: str, said: Said) -> None:
    nemo_patches.apply()
    ours = [
        subclass(title, ConformerEncoder.update_max_seq_length),
        subclass(title, unwrapped_name(ConformerEncoder.update_max_seq_length)),
    ]
    assert said(title) == []
    comm = types.ModuleType("comm")
    comm.agree = helper  # type: ignore[attr-defined]
    override = types.FunctionType(with_a_module.__code__, {**globals(), "comm": comm})
    ours.append(subclass(title, override))
    assert len(said(title)) == len(ours) - 2


def with_a_module(self: Any, seq_length: int, device: Any) -> None:
    self.set_max_audio_length(comm.agree(seq_length))  # type: ignore[name-defined] # noqa: F821


def test_the_method_that_grows_and_a_mixin_and_every_target_are_looked_at(title: str, said: Said) -> None:
    class Mixin:
        update_max_seq_length = own_reduce

    nemo_patches.apply()
    made = [type(title, (Mixin, ConformerEncoder), {})]
    (line,) = said(title)
    assert f"{title}.{METHOD} {line_of(own_reduce)} has" in line
    made.append(type(title + "Below", (made[0],), {}))
    assert said(title + "Below") == []  # it is the class above's

    def set_max_audio_length(self: Any, max_audio_length: int) -> None:
        self.pos_enc.something(max_audio_length)

    made.append(type(title + "Set", (ConformerEncoder,), {"set_max_audio_length": set_max_audio_length}))
    assert said(title + "Set") == []
    made.append(type(title + "Own", (ConformerEncoder,), {"set_max_audio_length": broadcasts}))
    assert NAMED in said(title + "Own")[0]
    made.append(type(title + "Conv", (ConvASREncoder,), {"update_max_sequence_length": own_reduce}))
    (line,) = said(title + "Conv")
    assert "call super().update_max_sequence_length(...) there instead" in line
    assert len(made) == 5


def test_a_copy_of_nemos_class_is_named_though_no_subclass(title: str, said: Said) -> None:
    made = [
        type(title, (torch.nn.Module,), {METHOD: own_reduce}),
        type(title + "Fine", (torch.nn.Module,), {METHOD: notes}),
    ]
    nemo_patches.apply()
    (line,) = said(title)
    assert NAMED in line and line.endswith("inherit from NeMo's encoder instead, without this method")
    assert said(title + "Fine") == []
    made.append(type(title + "Later", (torch.nn.Module,), {METHOD: own_reduce}))
    assert [text for text in nemo_patches.status().own_syncs if made[-1].__name__ in text]
    assert not [text for text in nemo_patches.status().own_syncs if ".ConformerEncoder." in text]


class Registered(type(ConformerEncoder)):  # type: ignore[misc]
    """A user's metaclass, with opinions."""

    def __eq__(cls, other: object) -> bool:
        raise TypeError("never compared")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(cls, name: str) -> Any:
        raise RuntimeError(f"never asked for {name}")


def test_users_class_statements_are_as_without_us(title: str, said: Said) -> None:
    nemo_patches.apply()
    kwargs: list[Any] = []

    class Plugin:
        def __init_subclass__(cls, /, name: str = "", **others: Any) -> None:
            kwargs.append(name)
            super().__init_subclass__(**others)

    class Before(Plugin, ConformerEncoder, name="before"):
        update_max_seq_length = own_reduce

    class After(ConformerEncoder, Plugin, name="after"):
        update_max_seq_length = notes

    class Refuses:
        def __init_subclass__(cls) -> None:
            raise LookupError("the user's own")

    assert kwargs == ["before", "after"]
    with pytest.raises(TypeError, match="takes no keyword arguments"):
        type("Unknown", (ConformerEncoder,), {}, name="x")
    with pytest.raises(LookupError, match="the user's own"):
        type("Refused", (ConformerEncoder, Refuses), {})
    with_metaclass = Registered(title, (ConformerEncoder,), {METHOD: own_reduce})
    assert len(said(title)) == 1
    assert nemo_patches.status().own_syncs
    abstract = abc.ABCMeta(title + "Abc", (ConformerEncoder, abc.ABC), {METHOD: abc.abstractmethod(own_reduce)})
    assert len(said(title + "Abc")) == 1
    assert {Before.__mro__[1], After.__mro__[1]} == {Plugin, ConformerEncoder}
    assert abstract is not with_metaclass


class Closed(type(ConformerEncoder)):  # type: ignore[misc]
    """A metaclass that tells nobody anything, once it has made its class."""

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("__") and type.__getattribute__(cls, "closed"):
            raise RuntimeError(f"{name} is nobody's business")
        return super().__getattribute__(name)


class Silent:
    """An override that raises whatever it is asked, but for what abc asks."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__isabstractmethod__":
            return False
        raise RuntimeError(f"{name} is nobody's business")


@pytest.mark.parametrize("when", ["before apply()", "after apply()"])
def test_neither_a_metaclass_nor_an_override_that_raises_breaks_apply_or_status(
    when: str, title: str, said: Said
) -> None:
    if when == "after apply()":
        nemo_patches.apply()
    closed: Any = Closed(title, (ConformerEncoder,), {METHOD: own_reduce, "closed": False})
    other: Any = Closed(title + "Other", (torch.nn.Module,), {METHOD: own_reduce, "closed": False})
    silent = type(title + "Silent", (ConformerEncoder,), {METHOD: Silent()})
    closed.closed = other.closed = True
    try:
        nemo_patches.apply()
        status = nemo_patches.status()
        assert [line for line in status.own_syncs if f".{title}.{METHOD} {line_of(own_reduce)} {NAMED}" in line]
        assert [line for line in status.own_syncs if f".{title}Other.{METHOD} {line_of(own_reduce)} {NAMED}" in line]
        (line,) = said(title + "Silent")
        assert "its code cannot be read: RuntimeError: " in line and silent
    finally:
        closed.closed = other.closed = False


def test_an_error_of_ours_does_not_reach_a_class_statement(
    title: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    nemo_patches.apply()
    monkeypatch.setattr(own_syncs, "_names", lambda code: 1 / 0)
    made = [type(title, (ConformerEncoder,), {METHOD: own_reduce})]
    (line,) = said(title)
    assert f"{UNKNOWN}its code cannot be read: ZeroDivisionError" in line
    monkeypatch.setattr(own_syncs, "_of", lambda *_: 1 / 0)
    made.append(type(title + "Other", (ConformerEncoder,), {METHOD: own_reduce}))
    assert len(made) == 2


class Pickled(ConformerEncoder):
    update_max_seq_length = notes


def test_instances_and_the_class_are_copied_pickled_and_scripted_as_before(said: Said) -> None:
    nemo_patches.apply()
    encoder = Pickled(**encoders.CONFORMER)
    for again in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder)), copy.copy(encoder)):
        assert type(again) is Pickled
    assert pickle.loads(pickle.dumps(Pickled)) is Pickled

    class Scripted(ConvASREncoder):
        __jit_unused_properties__ = sorted({name for base in ConvASREncoder.__mro__ for name in vars(base)})

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward(self, audio_signal: torch.Tensor) -> torch.Tensor:
            return audio_signal + 1

    assert torch.equal(torch.jit.script(Scripted())(torch.zeros(2)), torch.ones(2))


def test_after_revert_nothing_is_said_and_an_own_init_subclass_is_kept(title: str, said: Said) -> None:
    seen: list[type] = []

    def __init_subclass__(cls: type) -> None:
        seen.append(cls)

    users = classmethod(__init_subclass__)
    assert "__init_subclass__" not in vars(ConformerEncoder)
    ConformerEncoder.__init_subclass__ = users  # type: ignore[assignment]
    try:
        nemo_patches.apply()
        made = [subclass(title, own_reduce)]
        assert seen == made and len(said(title)) == 1
        ours = vars(ConformerEncoder)["__init_subclass__"]
        nemo_patches.revert()
        assert vars(ConformerEncoder)["__init_subclass__"] is users
    finally:
        del ConformerEncoder.__init_subclass__
    ConformerEncoder.__init_subclass__ = ours  # kept by somebody
    try:
        made.append(subclass(title + "Later", own_reduce))
    finally:
        del ConformerEncoder.__init_subclass__
    assert said(title + "Later") == [] and seen == made
    assert nemo_patches.status().own_syncs == ()


PROGRAM = """
import torch
import torch.distributed as dist
from nemo.collections.asr.modules import ConformerEncoder


class Mine(ConformerEncoder):
    def update_max_seq_length(self, seq_length, device):
        longest = torch.tensor([seq_length], device=device)
        dist.all_reduce(longest)
        self.set_max_audio_length(longest.item())


class Polite(ConformerEncoder):
    def update_max_seq_length(self, seq_length, device):
        super().update_max_seq_length(seq_length + 1, device)


import nemo_patches
print(str(nemo_patches.status()).splitlines()[0])
"""


@pytest.mark.one_nemo
def test_under_auto_apply_it_is_named_when_the_class_is_made(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = run([sys.executable, script], environment(CHECKOUT, RANK="3", WORLD_SIZE="4"), 300)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "nemo_patches WARNING" in line]
    assert "[rank 3/4 " in line and f"__main__.Mine.update_max_seq_length ({script}:8) {NAMED}" in line
    first = done.stdout.splitlines()[-1]
    assert first.startswith("on: ")
    assert first.endswith(" methods patched, but not these length syncs: __main__.Mine.update_max_seq_length")
