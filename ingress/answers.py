"""Answers that the ingress gives itself: OpenAI's error envelope, and response headers."""

import msgspec
from aiohttp import web

from nearkv.ingress.errors import IngressError, NoRoomError, RequestError

ENGINE_HEADER = "x-nearkv-engine"
PREFILL_ENGINE_HEADER = "x-nearkv-prefill-engine"
REASON_HEADER = "x-nearkv-reason"
PREDICTED_HEADER = "x-nearkv-predicted-cached-tokens"
REQUEST_ID_HEADER = "X-Request-Id"
NO_ENGINE = "none"


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class _Envelope(msgspec.Struct):
    error: _Error


def error_body(error: IngressError) -> bytes:
    """Return OpenAI's error envelope for an error."""
    param = error.param if isinstance(error, RequestError) else None
    return msgspec.json.encode(_Envelope(_Error(str(error), error.kind, param, error.status)))


def error_response(error: IngressError, *, request_id: str) -> web.Response:
    """Return the HTTP answer for an error."""
    headers = {
        ENGINE_HEADER: NO_ENGINE,
        REASON_HEADER: error.reason,
        REQUEST_ID_HEADER: request_id,
    }
    if isinstance(error, NoRoomError):
        headers["Retry-After"] = str(error.retry_after_seconds)
    return web.Response(
        status=error.status,
        body=error_body(error),
        content_type="application/json",
        headers=headers,
    )


def error_event(error: IngressError) -> bytes:
    """Return a server-sent event that ends a broken stream with its cause.

    A leading blank line closes whatever event the engine left unfinished.
    """
    return b"\n\ndata: " + error_body(error) + b"\n\n"


def is_event_stream(content_type: str) -> bool:
    """Tell whether a response is a stream of server-sent events."""
    return content_type.startswith("text/event-stream")
