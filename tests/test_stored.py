"""What is known of others' objects and wrappers, the same on every Python, and without running any
of their code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import pytest

from nemo_patches.sync.places import layers, stored

pytestmark = [pytest.mark.one_nemo, pytest.mark.wheel]


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("code of the user's was run")


class Refusing(type):
    """A metaclass for which Python 3.13.0's getattr_static raises: that asks for its hash."""

    __getattribute__ = __eq__ = __hash__ = refuse  # type: ignore[assignment]


class Base:
    ids: Any = "of the class"


class Own(Base):
    def __init__(self) -> None:
        self.ids = "its own"

    __getattribute__ = refuse


class Computed(Base):
    ids = property(refuse)

    def __init__(self) -> None:
        vars(self)["ids"] = "hidden by the property"


class OfRefusing(metaclass=Refusing):
    ids = "of the class"


class ItsDict(Base):
    __dict__ = property(refuse)  # type: ignore[assignment]


class Names(dict[str, Any]):
    get = __getitem__ = __contains__ = refuse  # type: ignore[assignment]


class Named(NamedTuple):
    ids: str


@dataclass(slots=True)
class Slotted:
    ids: str


def with_own_names() -> Base:
    found = Base()
    found.__dict__ = Names(ids="its own")
    return found


FOUND: tuple[tuple[Callable[[], Any], Any], ...] = (
    (Base, "of the class"),
    (Own, "its own"),
    (lambda: object.__new__(OfRefusing), "of the class"),
    (ItsDict, "of the class"),
    (with_own_names, "its own"),
    (Computed, "hidden by the property"),
    (lambda: Slotted("a"), vars(Slotted)["ids"]),
    (lambda: Named("a"), vars(Named)["ids"]),
    (object, None),
    (lambda: 3, None),
)


@pytest.mark.parametrize(("make", "expected"), FOUND)
def test_what_is_stored_is_found_and_nothing_is_run(
    make: Callable[[], Any], expected: Any
) -> None:
    assert stored(make(), "ids") is expected


class Wrapper:
    """As wrapt's: it says that it is what it wraps."""

    def __init__(self, wrapped: Any) -> None:
        self.__wrapped__ = wrapped

    @property
    def __class__(self) -> Any:
        return type(self.__wrapped__)


def until_a_class(function: Any) -> Any:
    """As inspect.unwrap from Python 3.11.8 on."""
    while not isinstance(function, type) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def to_the_end(function: Any) -> Any:
    """As inspect.unwrap before."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@pytest.mark.parametrize("unwrap", [to_the_end, until_a_class])
def test_a_class_in_a_wrapper_is_found_whatever_pythons_own_unwrap_finds(
    unwrap: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "unwrap", unwrap)
    outer = Wrapper(functools.wraps(Base)(Wrapper(Base)))
    assert layers(outer)[-1] is Base
    assert layers(outer)[0] is outer
    assert (inspect.unwrap(outer) is Base) == (unwrap is to_the_end)  # noqa: TID251


def test_a_wrapper_around_itself_has_an_end() -> None:
    wrapper = Wrapper(None)
    wrapper.__wrapped__ = wrapper
    assert layers(wrapper)[-1] is wrapper
