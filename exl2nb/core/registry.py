"""A name -> object table that refuses unknown names by listing the known ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from exl2nb.core.errors import Exl2Error

T = TypeVar("T")


class Registry(Generic[T]):
    """Args: `what` names the kind in messages; `error` is the class raised for an unknown name."""

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
