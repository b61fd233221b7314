"""Responses of the bare aiohttp server, and hanging up instead of one."""

from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from tests.doubles.engine import answers
from tests.doubles.engine.faults import NO_FAULTS, Faults
from tests.doubles.engine.requests import ApiError

VARY = {"Vary": "Origin"}
STREAM_HEADERS = VARY | {"Content-Type": "text/event-stream; charset=utf-8"}


@dataclass(slots=True)
class Call:
    """One request with its body read, and the faults to act out on the way."""

    request: web.BaseRequest
    body: bytes
    chunks_until_death: int | None = None
    faults: Faults = NO_FAULTS


def json_response(
    body: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Return ``body`` as JSON with the headers every vLLM answer carries."""
    return web.Response(
        body=answers.encode(body),
        status=status,
        headers=VARY | headers if headers else VARY,
        content_type="application/json",
    )


def error_response(error: ApiError) -> web.Response:
    """Return vLLM's error envelope."""
    return json_response(answers.error_body(error), status=error.status)


def status_error(status: HTTPStatus) -> ApiError:
    """Return the error for a bare status, as FastAPI words it."""
    return ApiError(status.value, status.phrase, status.phrase)


def hang_up(request: web.BaseRequest) -> None:
    """Break the connection after what was written, without another byte."""
    if request.transport is not None:
        request.transport.close()


class ChunkWriter:
    """Writes server-sent events, dying where a fault says so."""

    def __init__(self, call: Call, response: web.StreamResponse) -> None:
        self._call = call
        self._response = response
        self._left = call.chunks_until_death

    async def write(self, data: bytes) -> None:
        """Send one event.

        Raises:
            ConnectionResetError: when the client is gone or the fault strikes.
        """
        self._count()
        await self._response.write(b"data: " + data + b"\n\n")

    async def write_raw(self, data: bytes) -> None:
        """Send bytes that are a whole event; raises as :meth:`write` does."""
        self._count()
        await self._response.write(data)

    def _count(self) -> None:
        if self._left == 0:
            hang_up(self._call.request)
            raise ConnectionResetError("a fault cut the stream")
        if self._left is not None:
            self._left -= 1
