"""Options and named choices, checked: an unknown name is an error that lists the known ones or the nearest of them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from exl2nb.core.errors import Exl2Error, OptionError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def make(cls: type[T], kwargs: Mapping[str, Any], *, where: str = "") -> T:
    """Build the options dataclass `cls` from keywords.

    Args:
        cls: a frozen dataclass whose `__post_init__` checks ranges.
        kwargs: what the caller gave.
        where: the public call, named in the message.

    Raises:
        OptionError: a keyword that `cls` does not have; the message names the nearest one.
    """
    known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    check_keywords(kwargs, known, where=where or cls.__name__)
    return cls(**kwargs)


def shown(value: object) -> str:
    """A value in a message: its repr, cut where it is long; whole numbers of thousands of digits have none."""
    try:
        text = repr(value)
    except Exception:  # the caller's object, whose repr may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def several(value: object) -> list[Any]:
    """A list of the elements of a collection; a text or any other single value becomes a list of one."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]


def check_keywords(kwargs: Mapping[str, Any], known: list[str], *, where: str) -> None:
    """Raise OptionError for the first keyword that is not in `known`."""
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise OptionError(f"{where}: unknown keyword {shown(name)}; {hint}")


def check_flag(name: str, value: object) -> None:
    """Raise OptionError unless `value` is True or False: a text such as "no" would count as yes."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {shown(value)}; expected True or False")


def check_path(name: str, value: object, expected: str = "a path") -> None:
    """Raise OptionError unless `value` is a text or a path of one."""
    if not isinstance(value, str) and not (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)):
        raise OptionError(f"{name} is {shown(value)}; expected {expected}")


def check_range(name: str, value: float, low: float, high: float, *, where: str = "") -> None:
    """Raise OptionError unless `low <= value <= high` (NaN never passes)."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok:
        raise OptionError(f"{where + ': ' if where else ''}{name} is {shown(value)}; expected a number from {low:g} to {high:g}")


def spelled_out(options: type, defaults: Mapping[str, Any] = {}) -> Callable[[F], F]:
    """Spell out the `**options` of a function in its signature, so that notebooks complete them and `help` lists them.

    Args:
        options: a TypedDict of them.
        defaults: of those that have one; None is shown for the others.
    """

    def decorate(function: F) -> F:
        function.__signature__ = signature_with(inspect.signature(function), options.__annotations__, defaults)  # type: ignore[attr-defined]
        return function

    return decorate


def signature_with(signature: inspect.Signature, annotations: Mapping[str, Any], defaults: Mapping[str, Any]) -> inspect.Signature:
    """A signature whose `**options` are keywords of these names; a keyword that it has already stays as it is."""
    kept = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    names = {one.name for one in kept}
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=getattr(kind, "__forward_arg__", kind)
        )
        for name, kind in annotations.items()
        if name not in names
    ]
    return signature.replace(parameters=[*kept, *more])


class Registry(Generic[T]):
    """A table of named objects that refuses an unknown name by listing the known ones.

    Args:
        what: the kind of object, for messages.
        error: the class that is raised for an unknown name.
    """

    def __init__(self, what: str, error: type[Exl2Error]) -> None:
        self._what, self._error = what, error
        self._items: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: file an object under `names`; a name is given once only."""

        def put(item: T) -> T:
            for name in names:
                assert name not in self._items, f"{self._what} {name!r} registered twice"
                self._items[name] = item
            return item

        return put

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise self._error(f"unknown {self._what} {name!r}; known: {', '.join(sorted(self._items))}")
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))
