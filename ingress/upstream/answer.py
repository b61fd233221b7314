"""An engine's answer to one request, from its head to its last byte."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from multidict import CIMultiDict

_PAUSE_AT_BYTES = 256 << 10
"""What may lie unread before the engine has to wait; whole answers of this size fit."""


class Source(Protocol):
    """Where an answer comes from: it can be made to wait, and be left before the end.

    Answers name themselves, since one that has ended may share its source with the next.
    """

    def pause(self, answer: "Answer") -> None:
        """Read no more for now."""

    def resume(self, answer: "Answer") -> None:
        """Read on."""

    def leave(self, answer: "Answer") -> None:
        """Drop what is still to come."""


class Answer:
    """What came of an answer so far; whoever reads faster than the engine sends, waits.

    Filled by its connection, read by one task. ``status``, ``headers`` and ``content_length``
    (``None``: not told) are there once :meth:`begun` has returned.
    """

    __slots__ = (
        "_chunks",
        "_error",
        "_has_begun",
        "_has_ended",
        "_overdue",
        "_size",
        "_source",
        "_waiter",
        "content_length",
        "headers",
        "status",
    )

    def __init__(self, source: Source) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.content_length: int | None = None
        self._source = source
        self._chunks: list[bytes] = []
        self._size = 0
        self._has_begun = self._has_ended = False
        self._error: BaseException | None = None
        self._overdue: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    # -- For its reader ----------------------------------------------------------------

    async def begun(self) -> None:
        """Return once the head is here; raises what ended the wait."""
        while not self._has_begun:
            await self._more()

    async def read_some(self) -> bytes:
        """Return what has come since, ``b""`` at the end.

        What came before a failure is returned first; then it is raised.
        """
        while not self._chunks:
            if self._has_ended:
                return b""
            await self._more()
        return self._take()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield all that has not been read, as it comes; raises as :meth:`read_some`."""
        while part := await self.read_some():
            yield part

    async def read(self) -> bytes:
        """Return all that has not been read; raises what ended the wait."""
        while not self._has_ended:
            if self._size > _PAUSE_AT_BYTES:
                self._source.resume(self)
            await self._more()
        return self._take()

    def be_overdue(self, error: BaseException) -> None:
        """End the wait for anything that is not here yet; the connection goes on until closed."""
        if self._overdue is None:
            self._overdue = error
            self._wake()

    def be_in_time(self) -> None:
        """Take back :meth:`be_overdue`: what was waited for had come just then."""
        self._overdue = None

    def close(self) -> None:
        """Want no more of it: where it has not ended, the engine sees its connection closed."""
        if not self._has_ended:
            self._has_ended = True
            self._source.leave(self)

    def _take(self) -> bytes:
        chunks, size = self._chunks, self._size
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._size = 0
        if size > _PAUSE_AT_BYTES:
            self._source.resume(self)
        return data

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        if self._overdue is not None:
            raise self._overdue
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    # -- For its connection ------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether its head is here."""
        return self._has_begun

    @property
    def has_ended(self) -> bool:
        """Whether all of it is here, or nobody wants it."""
        return self._has_ended

    def begin(self, status: int, headers: CIMultiDict[str], content_length: int | None) -> None:
        """Take the head."""
        self.status, self.headers, self.content_length = status, headers, content_length
        self._has_begun = True
        self._wake()

    def feed(self, data: bytes) -> None:
        """Take a part of the body."""
        self._chunks.append(data)
        self._size += len(data)
        if self._size > _PAUSE_AT_BYTES:
            self._source.pause(self)
        self._wake()

    def end(self) -> None:
        """Note that this was all, unless it failed before."""
        if self._error is None:
            self._has_ended = True
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Note that nothing more can come, and why; the first reason counts."""
        if not self._has_ended and self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
