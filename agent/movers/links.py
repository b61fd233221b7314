"""Connections inside a mover that wait for the next pull from the same source."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nearkv.transfer.backends.contract import Link

Way = tuple[str, str, bytes]
"""Backend, source key and offer: what a link was made from."""


class LinkShelf:
    """Keeps at most ``limit`` links; a link is with one pull at a time, or here."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._links: OrderedDict[int, tuple[Way, Link]] = OrderedDict()

    def take(self, way: Way) -> Link | None:
        """Return a link for this way, if there is one, which is then the caller's."""
        with self._lock:
            for number in reversed(self._links):
                if self._links[number][0] == way:
                    return self._links.pop(number)[1]
        return None

    def put(self, way: Way, link: Link) -> None:
        """Keep a link; where there are too many, the one unused longest is closed."""
        with self._lock:
            self._links[id(link)] = (way, link)
            oldest = None
            if len(self._links) > self._limit:
                _, (_, oldest) = self._links.popitem(last=False)
        if oldest is not None:
            _close(oldest)

    def drop(self, source_key: str) -> None:
        """Close the links to a source of this node."""
        for link in self._take_all(source_key):
            _close(link)

    def close(self) -> None:
        """Close all links."""
        for link in self._take_all(None):
            _close(link)

    def _take_all(self, source_key: str | None) -> Iterator[Link]:
        with self._lock:
            taken = [
                number
                for number, (way, _) in self._links.items()
                if source_key is None or way[1] == source_key
            ]
            links = [self._links.pop(number)[1] for number in taken]
        # One by one, so that no list holds on to a link that was closed.
        while links:
            yield links.pop()


@contextmanager
def closed_on_error(link: Link) -> Iterator[None]:
    """Close a link when the block fails: nobody knows what state it is in."""
    try:
        yield
    except BaseException:
        _close(link)
        raise


def _close(link: Link) -> None:
    # Closing is the end of a link in any case, and nothing is to be done about a failure.
    with suppress(Exception):
        link.close()
