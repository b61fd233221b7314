"""Reading request bodies, which together have so much room.

What counts is what has arrived, so that who announces much and sends little takes nothing from
others. A body takes its room until its request has ended: until then it may be sent again.
"""

import asyncio
from typing import Self

from aiohttp import web

from nearkv.ingress.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    RequestError,
    TooManyRequestsError,
)
from nearkv.ingress.settings import IngressSettings


class BodyRoom:
    """The memory that the bodies of requests in flight take."""

    def __init__(self, settings: IngressSettings) -> None:
        self._limits = settings.limits
        self._seconds = settings.deadlines.body_seconds
        self._retry_after_seconds = settings.gate.retry_after_seconds
        self.taken_bytes = 0

    def hold(self) -> "HeldRoom":
        """Return what one request takes, nothing at first."""
        return HeldRoom(self)

    async def read(self, request: web.Request, held: "HeldRoom") -> bytes:
        """Return a request's whole body.

        Raises ``BodyTooLargeError``, ``BodyTimeoutError``, ``TooManyRequestsError`` where there
        is no room left, and ``RequestError`` for a body that breaks off.
        """
        limit, declared = self._limits.max_body_bytes, request.content_length
        if declared is not None and declared > limit:
            raise BodyTooLargeError(f"the body has {declared} bytes, the limit is {limit}")
        if request.content.is_eof():  # all of it is here, as nearly always
            return await self._collect(request, held)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._collect(request, held)
        except TimeoutError as error:
            raise BodyTimeoutError(f"the body did not arrive within {self._seconds:g} s") from error

    async def _collect(self, request: web.Request, held: "HeldRoom") -> bytes:
        parts: list[bytes] = []
        limit = self._limits.max_body_bytes
        try:
            while part := await request.content.readany():
                held.take(len(part))
                if held.taken_bytes > limit:
                    raise BodyTooLargeError(f"the body is over the limit of {limit} bytes")
                parts.append(part)
        except (web.RequestPayloadError, ConnectionError) as error:
            raise RequestError(f"the body did not arrive whole: {error}") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check(self, size_bytes: int) -> None:
        """Raise ``TooManyRequestsError`` where so much more finds no room."""
        if self.taken_bytes + size_bytes > self._limits.max_bodies_bytes:
            raise TooManyRequestsError(
                f"the bodies of requests in flight take {self.taken_bytes} of "
                f"{self._limits.max_bodies_bytes} bytes (limits.max_bodies_bytes)",
                retry_after_seconds=self._retry_after_seconds,
            )


class HeldRoom:
    """What one request takes of the room."""

    __slots__ = ("_room", "taken_bytes")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.taken_bytes = 0

    def __enter__(self) -> Self:
        """Return the room, released with the block's end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self.release()

    def take(self, size_bytes: int) -> None:
        """Take so much more; raises ``TooManyRequestsError`` where it finds no room."""
        self._room.check(size_bytes)
        self._room.taken_bytes += size_bytes
        self.taken_bytes += size_bytes

    def release(self) -> None:
        """Give it back, when the request has ended."""
        self._room.taken_bytes -= self.taken_bytes
        self.taken_bytes = 0
