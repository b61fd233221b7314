"""Reading request bodies and sending answers that may be tens of megabytes.

A NodeList of 5,000 nodes is 92 MB. aiohttp's own way to read a body holds it twice for a
moment; here it is read into one buffer that grows with it, and answers are sent in pieces of
that same buffer. All bodies together have so much room: what counts is what has arrived, so
that who announces much and sends little takes nothing from others.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from nearkv.extender.errors import (
    BadRequestError,
    BodyTooLargeError,
    BodyTooSlowError,
    EncodedBodyError,
    NoRoomError,
)
from nearkv.extender.wire import Buffer
from nearkv.serving import cut_connection

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The largest body, all bodies together, and how long they may take to arrive or be taken."""

    max_bytes: int
    max_bodies_bytes: int
    arrive_seconds: float
    take_seconds: float


class BodyRoom:
    """The memory that bodies take, from their first bytes until they were answered."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.taken_bytes = 0

    @contextmanager
    def held(self) -> Iterator["HeldRoom"]:
        """Hold what one body takes for the length of the block; nothing at first."""
        held = HeldRoom(self)
        try:
            yield held
        finally:
            self.taken_bytes -= held.taken_bytes

    def take(self, size_bytes: int) -> None:
        """Take more; raises :class:`NoRoomError` when it is not there."""
        if self.taken_bytes + size_bytes > self._limit_bytes:
            raise NoRoomError(
                f"bodies take {self.taken_bytes} of {self._limit_bytes} bytes already "
                "(limits.max_bodies_bytes)",
                reason="no_room",
            )
        self.taken_bytes += size_bytes


class HeldRoom:
    """What one body takes of the room."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Take more for this body; see :meth:`BodyRoom.take`."""
        self._room.take(size_bytes)
        self.taken_bytes += size_bytes


async def read_body(request: web.Request, limits: BodyLimits, held: HeldRoom) -> bytearray:
    """Return a request's whole body; raises :class:`BadRequestError` where there is none."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise EncodedBodyError(
            f"Content-Encoding {encoding[:40]!r} is not understood; send the body plain",
            reason="content_encoding",
        )
    announced = request.content_length
    if announced is not None and announced > limits.max_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.arrive_seconds):
            return await _collect(request, announced, limits, held)
    except TimeoutError as error:
        raise BodyTooSlowError(
            f"the body did not arrive within {limits.arrive_seconds:g} s", reason="too_slow"
        ) from error
    except web.RequestPayloadError as error:
        raise BadRequestError(f"the body broke off: {error}", reason="broken_off") from error


async def _collect(
    request: web.Request, announced: int | None, limits: BodyLimits, held: HeldRoom
) -> bytearray:
    # It grows with what arrives: a buffer of the announced size would be zeroed, and so take
    # that much memory, before a single byte is here. Large ones grow without being copied.
    body = bytearray()
    while chunk := await request.content.readany():
        if len(body) + len(chunk) > limits.max_bytes:
            raise _too_large(limits)
        held.take(len(chunk))
        body += chunk
    if announced is not None and len(body) < announced:
        raise BadRequestError(
            f"the body broke off after {len(body)} of {announced} bytes", reason="broken_off"
        )
    return body


def _too_large(limits: BodyLimits) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is over the limit of {limits.max_bytes} bytes (limits.max_body_bytes); with "
        "nodeCacheCapable: true it would hold names only",
        reason="too_large",
    )


async def send_json(
    request: web.Request, pieces: Iterable[Buffer], limits: BodyLimits
) -> web.StreamResponse:
    """Send status 200 and a body in pieces, none of them copied as a whole.

    A client that takes nothing is cut off after a while; raises ``TimeoutError`` then.
    """
    whole = list(pieces)
    response = web.StreamResponse()
    response.content_type = "application/json"
    response.content_length = sum(map(len, whole))
    try:
        async with asyncio.timeout(limits.take_seconds):
            await response.prepare(request)
            for part in _cut(whole):
                await response.write(part)
            await response.write_eof()
    except TimeoutError:
        cut_connection(request)
        raise
    return response


def _cut(pieces: Sequence[Buffer]) -> Iterable[Buffer]:
    """Yield pieces no larger than a transport may have to copy into its own buffer."""
    for piece in pieces:
        if len(piece) <= _PIECE_BYTES:
            yield piece
            continue
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
