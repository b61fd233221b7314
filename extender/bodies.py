"""Reading request bodies and sending answers that may be tens of megabytes.

A NodeList of 5,000 nodes is 92 MB. aiohttp's own way to read a body holds it twice for a
moment; here it is read into one buffer of the announced size, and answers are sent in pieces
of that same buffer.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aiohttp import web

from nearkv.extender.errors import (
    BadRequestError,
    BodyTooLargeError,
    BodyTooSlowError,
    EncodedBodyError,
)
from nearkv.extender.wire import Buffer
from nearkv.serving import cut_connection

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The largest body, and how long it may take to arrive, or an answer to be taken."""

    max_bytes: int
    arrive_seconds: float
    take_seconds: float


async def read_body(request: web.Request, limits: BodyLimits) -> bytearray:
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
            return await _collect(request, announced, limits)
    except TimeoutError as error:
        raise BodyTooSlowError(
            f"the body did not arrive within {limits.arrive_seconds:g} s", reason="too_slow"
        ) from error
    except web.RequestPayloadError as error:
        raise BadRequestError(f"the body broke off: {error}", reason="broken_off") from error


async def _collect(request: web.Request, announced: int | None, limits: BodyLimits) -> bytearray:
    # Zeroed pages are the kernel's until they are written, so announcing much takes nothing.
    body, size = bytearray(announced or 0), 0
    while chunk := await request.content.readany():
        end = size + len(chunk)
        if end > limits.max_bytes:
            raise _too_large(limits)
        # Beyond what was announced (chunked encoding announces nothing) the buffer grows.
        body[size:end] = chunk
        size = end
    if announced is not None and size < announced:
        raise BadRequestError(
            f"the body broke off after {size} of {announced} bytes", reason="broken_off"
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
