"""Following a collection of objects for ever: a LIST, then WATCHes from its version.

The traps, and what is done about each: a watch without a version makes the server send everything
(never done); a socket may stay open without a word (a deadline for each piece of data); the server
closes watches on purpose (resumed at once); versions grow too old (listed anew, after a random
pause); a list that failed is not an empty list (nothing is replaced before the last page is
there). What to do after a failure is decided in
:mod:`nearkv.kube.resuming`.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, NoReturn, TypeVar

import aiohttp
import msgspec
import structlog

from nearkv.kube.access import ApiAccess
from nearkv.kube.errors import ApiError, Trouble
from nearkv.kube.events import Change, ChangeKind, EventReader, LineSplitter, name_of
from nearkv.kube.failing import naming_failures
from nearkv.kube.listing import Lister, ListLimits, Selection
from nearkv.kube.resuming import Course, PauseLimits

T = TypeVar("T")
_log = structlog.get_logger(__name__)
_CACHE_CANNOT = frozenset({410, 504})
"""Statuses of a list from a cache that will not reach the version asked for."""
_DECODED_AT_ONCE = 100
"""Objects decoded before others get their turn: about a millisecond of full Nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Bounds of a watch, in seconds and bytes.

    The server is asked to end each watch after once to twice ``watch_seconds``, so that with
    ``silence_seconds`` above that silence is always a fault: of a collection in which nothing
    changes a Kubernetes API server may not send a single bookmark (seen with 1.36). Thousands of
    clients should ask for longer watches; connections whose other end is gone are noticed anyway,
    by TCP keep-alive.
    """

    watch_seconds: float = 45.0
    silence_seconds: float = 100.0
    line_bytes: int = 16 << 20
    listing: ListLimits = field(default_factory=ListLimits)
    pauses: PauseLimits = field(default_factory=PauseLimits)


class Watch(Generic[T]):
    """One collection, followed; everything it calls is called from its own task.

    ``on_replace`` gets all objects after each complete LIST, ``on_change`` each later event; where
    the former returns something to wait for, no event comes before it is done. What
    they raise ends :meth:`run`. ``decode`` makes an object of its JSON; one that does not decode
    (``ValueError``, which msgspec's errors are) is counted and left out, its last state stays.
    """

    def __init__(  # noqa: PLR0913 (keyword-only, and most have a default)
        self,
        access: ApiAccess,
        path: str,
        *,
        decode: Callable[[bytes], T],
        on_replace: Callable[[list[T]], Awaitable[None] | None],
        on_change: Callable[[ChangeKind, T], None],
        label_selector: str = "",
        field_selector: str = "",
        cached: bool = False,
        limits: WatchLimits | None = None,
        count_failure: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Make a watch of ``path``, such as ``/api/v1/nodes``.

        ``count_failure`` takes each failure's name (:class:`nearkv.kube.errors.Trouble`).
        ``cached``: see :class:`nearkv.kube.listing.Selection`.
        """
        self._access = access
        self._selection = Selection(
            path=path, label_selector=label_selector, field_selector=field_selector, cached=cached
        )
        self._decode = decode
        self._on_replace = on_replace
        self._on_change = on_change
        self._limits = limits or WatchLimits()
        self._count_failure = count_failure
        self._now = now
        self._draw = draw
        self._reader = EventReader()
        self._lister = Lister(
            access, self._selection, limits=self._limits.listing, reader=self._reader
        )
        self._course = Course(self._limits.pauses)
        self._at_least = "0"
        self._synced = asyncio.Event()
        self._failures: Counter[str] = Counter()
        self._unreadable_text = ""
        self._log = _log.bind(path=path)
        self.last_heard_at = float("-inf")
        """When the server last said anything that keeps the objects current (by ``now``)."""
        self.problem = ""
        """What is wrong at present, for people; empty while all is well."""
        self.lists = 0
        """How many lists were complete."""

    @property
    def synced(self) -> bool:
        """Whether a list was ever complete."""
        return self._synced.is_set()

    async def wait_until_synced(self) -> None:
        """Return once a list was complete."""
        await self._synced.wait()

    @property
    def failures(self) -> Mapping[str, int]:
        """How often each kind of failure happened, by its name."""
        return MappingProxyType(self._failures)

    async def run(self) -> NoReturn:
        """Follow until cancelled."""
        # Begun anew after a defect: an event may have been lost with it.
        self._course = Course(self._limits.pauses)
        while True:
            try:
                if self._course.version is None:
                    await self._list()
                await self._watch()
            except ApiError as error:
                await asyncio.sleep(self._after(error))

    def _after(self, error: ApiError) -> float:
        """Count and tell a failure; return how many seconds to wait."""
        self._count(error.trouble)
        pause_seconds = self._course.failed(error, self._draw())
        # Once for each trouble: an API server may be away for long.
        level = self._log.debug if self.problem == str(error) else self._log.warning
        self.problem = str(error)
        level(
            "kube_watch_failed",
            trouble=str(error.trouble),
            detail=str(error),
            relist=self._course.version is None,
            pause_seconds=round(pause_seconds, 3),
        )
        return pause_seconds

    def _count(self, trouble: Trouble) -> None:
        self._failures[str(trouble)] += 1
        self._count_failure(str(trouble))

    def _heard(self) -> None:
        self.last_heard_at = self._now()
        self.problem = ""

    async def _list(self) -> None:
        objects: list[T] = []
        seen = 0

        async def take(items: list[msgspec.Raw]) -> None:
            nonlocal seen
            for raw in items:
                seen += 1
                self._keep_decoded(objects, raw)
                if seen % _DECODED_AT_ONCE == 0:
                    await asyncio.sleep(0)

        try:
            version = await self._lister.pages(take, at_least=self._at_least)
        except ApiError as error:
            if error.status in _CACHE_CANNOT:
                self._at_least = ""
            raise
        if seen and not objects:
            raise ApiError(Trouble.GARBAGE, f"none of {seen} objects could be read")
        self.lists += 1
        self._course.listed(version)
        self._at_least = version
        self._heard()
        replaced = self._on_replace(objects)
        if isinstance(replaced, Awaitable):
            await replaced
        self._synced.set()

    def _keep_decoded(self, objects: list[T], raw: msgspec.Raw) -> None:
        try:
            # A copy, lest one object that keeps its JSON keep its whole page.
            objects.append(self._decode(bytes(raw)))
        except ValueError as error:
            self._unreadable(raw, error)

    def _unreadable(self, raw: msgspec.Raw, error: ValueError) -> None:
        self._count(Trouble.UNREADABLE_OBJECT)
        # Once for each kind of mistake: thousands of objects may share it.
        level = self._log.debug if self._unreadable_text == str(error) else self._log.warning
        self._unreadable_text = str(error)
        level("kube_object_unreadable", object=name_of(raw), error=str(error))

    async def _watch(self) -> None:
        version = self._course.version
        assert version is not None  # noqa: S101 (a list came before)
        seconds = self._limits.watch_seconds * (1 + self._draw())
        opened_at = self._now()
        heard = False
        async with self._access.request(
            "GET",
            self._selection.path,
            params={
                **self._selection.params(),
                "watch": "true",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(max(int(seconds), 1)),
            },
            silence_seconds=self._limits.silence_seconds,
        ) as response:
            self.last_heard_at = self._now()
            async for line in self._lines(response):
                heard |= self._take_line(line)
        self._course.ended(open_seconds=self._now() - opened_at, heard=heard)
        self._heard()

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yield the lines of a watch; a last one without an end is an error, never an event."""
        splitter = LineSplitter(self._limits.line_bytes)
        while True:
            with naming_failures():
                data = await response.content.readany()
            if not data:
                break
            for line in splitter.feed(data):
                yield line
            # Data may be there already, whole caches of it: others get their turn.
            await asyncio.sleep(0)
        if splitter.is_within_line:
            raise ApiError(Trouble.TRUNCATED, "the watch ended within a line")

    def _take_line(self, line: bytes) -> bool:
        """Take an event; False when it was of a kind that is not known."""
        event = self._reader.event(line)
        if event is None:
            self._count(Trouble.GARBAGE)
            return False
        self._course.moved(event.version)
        self._at_least = event.version
        self._heard()
        if isinstance(event, Change):
            try:
                decoded = self._decode(bytes(event.raw))
            except ValueError as error:
                self._unreadable(event.raw, error)
            else:
                self._on_change(event.kind, decoded)
        return True
