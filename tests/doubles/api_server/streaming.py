"""One WATCH: the events after a version, bookmarks, and the end after its timeout."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from aiohttp import web

from tests.doubles.api_server.faults import Faults, FaultState
from tests.doubles.api_server.resources import Target
from tests.doubles.api_server.selecting import Matches
from tests.doubles.api_server.store import ApiProblemError, Entry, ObjectStore, Stored, expired


@dataclass(frozen=True)
class WatchQuery:
    """What a watch asks for; ``version`` 0 asks for the present objects first."""

    target: Target
    matches: Matches
    version: int
    bookmarks: bool
    timeout_seconds: float


class WatchStream:
    """Writes one watch's events until its time is over."""

    def __init__(
        self,
        store: ObjectStore,
        query: WatchQuery,
        *,
        faults: FaultState,
        bookmark_seconds: float,
    ) -> None:
        self._store = store
        self._query = query
        self._faults = faults
        self._bookmark_seconds = bookmark_seconds
        self._changed = asyncio.Event()
        self._at = query.version
        self._loop = asyncio.get_running_loop()

    async def run(self, response: web.StreamResponse, request_faults: Faults) -> None:
        """Write until the timeout, a fault or the client ends it."""
        ends_at = self._loop.time() + self._query.timeout_seconds
        bookmark_at = self._loop.time() + self._bookmark_seconds
        if request_faults.close_at_once:
            return
        if await self._refused(response, request_faults):
            return
        self._store.listeners.add(self._changed.set)
        try:
            await self._write_present(response)
            while (now := self._loop.time()) < ends_at:
                self._changed.clear()
                if not self._present_faults.stall:
                    # A bookmark must not tell of events that come while these are written.
                    version = self._store.version
                    if not await self._write_events(response):
                        return
                    if now >= bookmark_at:
                        bookmark_at = now + self._bookmark_seconds
                        await self._write_bookmark(response, version)
                await self._wait(min(ends_at, bookmark_at) - now)
        finally:
            self._store.listeners.discard(self._changed.set)

    @property
    def _present_faults(self) -> Faults:
        return self._faults.for_watch(self._query.target.resource.plural)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _refused(self, response: web.StreamResponse, faults: Faults) -> bool:
        problem: ApiProblemError | None = None
        if faults.error_event is not None:
            code, reason = faults.error_event
            problem = ApiProblemError(
                code, reason, "injected", retry_after_seconds=faults.retry_after_seconds
            )
        elif self._query.version and self._store.is_gone(self._query.version):
            problem = expired(
                f"too old resource version: {self._query.version} ({self._store.version})"
            )
        if problem is None:
            return False
        await response.write(_line("ERROR", msgspec.json.encode(problem.status())))
        return True

    async def _write_present(self, response: web.StreamResponse) -> None:
        if self._query.version:
            return
        self._at = self._store.version
        target = self._query.target
        for item in self._store.all(target.resource, target.namespace):
            if self._query.matches(item.value):
                await response.write(_line("ADDED", item.whole))

    async def _write_events(self, response: web.StreamResponse) -> bool:
        """Write what happened; False when the watch must end."""
        lines: list[bytes] = []
        for entry in self._store.entries_after(self._query.target.resource, self._at):
            self._at = entry.version
            for line in self._lines_of(entry):
                faults = self._present_faults
                odd = faults.truncate_event or faults.garbage_line or faults.unknown_type
                if odd and self._faults.take_once():
                    if faults.truncate_event:
                        await response.write(b"".join(lines) + line[: len(line) // 2])
                        return False
                    lines.append(b"}{ no event\n" if faults.garbage_line else _renamed(line))
                    if faults.garbage_line:
                        continue
                lines.append(line)
        if lines:
            await response.write(b"".join(lines))
        return True

    async def _write_bookmark(self, response: web.StreamResponse, version: int) -> None:
        # A version from the future is waited for without a word, as Kubernetes' watch cache does.
        behind = version < self._query.version
        if not self._query.bookmarks or behind or self._present_faults.without_bookmarks:
            return
        resource = self._query.target.resource
        metadata = {"resourceVersion": str(version), "creationTimestamp": None}
        bookmark = Stored(resource, {"metadata": metadata}, version)
        await response.write(_line("BOOKMARK", bookmark.whole))

    def _lines_of(self, entry: Entry) -> Iterator[bytes]:
        """Yield the event as this watch sees it: objects may enter and leave its selection."""
        if self._query.target.namespace not in {"", entry.after.key[0]}:
            return
        matches = self._query.matches
        was = entry.before is not None and matches(entry.before.value)
        is_now = not entry.is_deletion and matches(entry.after.value)
        if was or is_now:
            kind = "MODIFIED" if was and is_now else "ADDED" if is_now else "DELETED"
            yield _line(kind, entry.after.whole)


def _line(kind: str, body: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), body)


def _renamed(line: bytes) -> bytes:
    return b'{"type":"NOVELTY"' + line[line.index(b",") :]
