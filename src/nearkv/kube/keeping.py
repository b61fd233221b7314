"""Keeping the objects of a watch by their names."""

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from nearkv.kube.events import ChangeKind


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


class KeptObjects(Generic[T]):
    """The objects of one namespace, as a watch told of them last; calls ``on_news`` after each.

    :meth:`replace` and :meth:`change` are what :class:`nearkv.kube.watching.Watch` calls. While it
    has nothing to tell, what is known stays.
    """

    def __init__(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news
        self._by_name: dict[str, T] = {}
        self.was_read = False
        """Whether a list was ever complete."""

    def __iter__(self) -> Iterator[T]:
        return iter(self._by_name.values())

    def replace(self, objects: list[T]) -> None:
        """Take a complete list."""
        self._by_name = {each.name: each for each in objects}
        self.was_read = True
        self._on_news()

    def change(self, kind: ChangeKind, changed: T) -> None:
        """Take one object that is new, has changed, or is gone."""
        if kind == "DELETED":
            self._by_name.pop(changed.name, None)
        else:
            self._by_name[changed.name] = changed
        self._on_news()
