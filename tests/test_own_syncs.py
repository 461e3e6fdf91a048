"""Classes that override a bounded length sync: said at apply(), when the class is made and by
status(); no other is.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nemo.collections.asr.modules.conformer_encoder import ConformerEncoder
from nemo.collections.asr.modules.conv_asr import ConvASREncoder

import nemo_patches
from nemo_patches.sync import own_syncs, rank_log

METHOD = "update_max_seq_length"
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
    yield lambda title: [
        record.getMessage()
        for record in caplog.records
        if f".{title}." in record.getMessage()
    ]
    rank_log.logger.removeHandler(caplog.handler)
    nemo_patches.revert()


def override(self: Any, seq_length: int, device: Any) -> None: ...


def subclass(name: str, base: Any = ConformerEncoder, method: str = METHOD) -> Any:
    return type(name, (base,), {method: override, "__module__": __name__})


@pytest.mark.matrix
@pytest.mark.parametrize("when", ["before apply()", "after apply()"])
def test_an_override_is_said_once_with_its_place(
    when: str, title: str, said: Said
) -> None:
    if when == "after apply()":
        nemo_patches.apply()
    made = subclass(title)
    if when == "before apply()":
        assert said(title) == []
        nemo_patches.apply()
    (line,) = said(title)
    name = f"{__name__}.{title}.{METHOD}"
    place = f"({__file__}:{override.__code__.co_firstlineno})"
    sentence = (
        f"{name} {place} overrides ConformerEncoder's: not bounded, unless it calls"
        f" super().{METHOD}(...)"
    )
    assert line.endswith(f"] {sentence}")
    nemo_patches.apply(timeout=3)
    again = subclass(title)  # as by a reload, or a decorator that makes a class anew
    status = nemo_patches.status()
    assert len(said(title)) == 1
    first = str(status).splitlines()[0]
    assert first.startswith(
        f"on: {len(status.patched)} of NeMo's methods patched; overridden by "
    )
    assert first.count(name) == 1
    assert sentence in status.own_syncs and sentence in str(status)
    assert made is not again


def test_a_mixins_is_said_every_target_is_looked_at_and_an_alias_of_ours_is_fine(
    title: str, said: Said
) -> None:
    mixin = type(title + "Mixin", (), {METHOD: override, "__module__": __name__})
    nemo_patches.apply()
    made = [type(title, (mixin, ConformerEncoder), {})]
    assert len(said(title + "Mixin")) == 1
    made.append(type(title + "Below", (made[0],), {}))
    assert len(said(title + "Mixin")) == 1
    assert said(title) == said(title + "Below") == []
    made.append(subclass(title + "Conv", ConvASREncoder, "update_max_sequence_length"))
    (line,) = said(title + "Conv")
    assert (
        "overrides ConvASREncoder's" in line
        and "calls super().update_max_sequence_length(...)" in line
    )
    made.append(
        type(
            title + "Ours",
            (ConformerEncoder,),
            {METHOD: ConformerEncoder.update_max_seq_length},
        )
    )
    made.append(type(title + "None", (ConformerEncoder,), {}))
    assert said(title + "Ours") == said(title + "None") == []
    assert len(made) == 5


class Closed(type(ConformerEncoder)):  # type: ignore[misc]
    """A metaclass that tells nobody anything, once it has made its class, and whose classes are
    never compared.
    """

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("__") and type.__getattribute__(cls, "closed"):
            raise RuntimeError(f"{name} is nobody's business")
        return super().__getattribute__(name)

    def __eq__(cls, other: object) -> bool:
        raise TypeError("never compared")

    __hash__ = None  # type: ignore[assignment]


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
    closed: Any = Closed(
        title,
        (ConformerEncoder,),
        {METHOD: override, "closed": False, "__module__": __name__},
    )
    silent = type(
        title + "Silent",
        (ConformerEncoder,),
        {METHOD: Silent(), "__module__": __name__},
    )
    closed.closed = True
    try:
        nemo_patches.apply()
        status = nemo_patches.status()
        assert [
            line
            for line in status.own_syncs
            if f".{title}.{METHOD} ({__file__}:" in line
        ]
        assert [
            line
            for line in status.own_syncs
            if f".{title}Silent.{METHOD} overrides" in line
        ]
        assert len(said(title)) == len(said(title + "Silent")) == 1 and silent
    finally:
        closed.closed = False


def test_users_class_statements_are_as_without_us(
    title: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    nemo_patches.apply()
    kwargs: list[Any] = []

    class Plugin:
        def __init_subclass__(cls, /, name: str = "", **others: Any) -> None:
            kwargs.append(name)
            super().__init_subclass__(**others)

    class Before(Plugin, ConformerEncoder, name="before"): ...

    class After(ConformerEncoder, Plugin, name="after"): ...

    class Refuses:
        def __init_subclass__(cls) -> None:
            raise LookupError("the user's own")

    assert kwargs == ["before", "after"]
    assert {Before.__mro__[1], After.__mro__[1]} == {Plugin, ConformerEncoder}
    with pytest.raises(TypeError, match="takes no keyword arguments"):
        type("Unknown", (ConformerEncoder,), {}, name="x")
    with pytest.raises(LookupError, match="the user's own"):
        type("Refused", (ConformerEncoder, Refuses), {})
    abstract = abc.ABCMeta(
        title, (ConformerEncoder, abc.ABC), {METHOD: abc.abstractmethod(override)}
    )
    assert len(said(title)) == 1
    monkeypatch.setattr(own_syncs, "_override", lambda *_: 1 / 0)
    assert subclass(title + "Other") is not abstract


def test_after_revert_nothing_is_said_and_an_own_init_subclass_is_kept(
    title: str, said: Said
) -> None:
    seen: list[type] = []

    def __init_subclass__(cls: type) -> None:
        seen.append(cls)

    users = classmethod(__init_subclass__)
    assert "__init_subclass__" not in vars(ConformerEncoder)
    ConformerEncoder.__init_subclass__ = users  # type: ignore[assignment]
    try:
        nemo_patches.apply()
        made = [subclass(title)]
        assert seen == made and len(said(title)) == 1
        ours = vars(ConformerEncoder)["__init_subclass__"]
        nemo_patches.revert()
        assert vars(ConformerEncoder)["__init_subclass__"] is users
    finally:
        del ConformerEncoder.__init_subclass__
    ConformerEncoder.__init_subclass__ = ours  # kept by somebody
    try:
        made.append(subclass(title + "Later"))
    finally:
        del ConformerEncoder.__init_subclass__
    assert said(title + "Later") == [] and seen == made
    assert nemo_patches.status().own_syncs == ()
