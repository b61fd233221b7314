"""Answers that the ingress gives itself: each API's error envelope, and response headers."""

import msgspec
from aiohttp import web

from nearkv.ingress.dialects import Dialect, dialect_of
from nearkv.ingress.errors import IngressError, NoRoomError, RequestError

ENGINE_HEADER = "x-nearkv-engine"
PREFILL_ENGINE_HEADER = "x-nearkv-prefill-engine"
REASON_HEADER = "x-nearkv-reason"
PREDICTED_HEADER = "x-nearkv-predicted-cached-tokens"
REQUEST_ID_HEADER = "X-Request-Id"
NO_ENGINE = "none"

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_OTHER = "api_error"


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class _Envelope(msgspec.Struct):
    error: _Error


class _AnthropicError(msgspec.Struct):
    type: str
    message: str


class _AnthropicEnvelope(msgspec.Struct, tag="error"):
    error: _AnthropicError


class _ResponsesEvent(msgspec.Struct, tag="error"):
    """The event that OpenAI documents, and ``error``, at which its client raises."""

    code: str
    message: str
    param: str | None
    error: _Error
    sequence_number: int = 0


def error_body(error: IngressError, dialect: Dialect = Dialect.OPENAI) -> bytes:
    """Return the error envelope of an API for an error."""
    if dialect is Dialect.ANTHROPIC:
        kind = _ANTHROPIC_KINDS.get(error.status, _ANTHROPIC_OTHER)
        return msgspec.json.encode(_AnthropicEnvelope(_AnthropicError(kind, str(error))))
    return msgspec.json.encode(_Envelope(_error(error)))


def error_response(error: IngressError, *, request_id: str, path: str = "") -> web.Response:
    """Return the HTTP answer for an error, in the envelope of the path's API."""
    headers = {
        ENGINE_HEADER: NO_ENGINE,
        REASON_HEADER: error.reason,
        REQUEST_ID_HEADER: request_id,
    }
    if isinstance(error, NoRoomError):
        headers["Retry-After"] = str(error.retry_after_seconds)
    return web.Response(
        status=error.status,
        body=error_body(error, dialect_of(path)),
        content_type="application/json",
        headers=headers,
    )


def error_event(error: IngressError, path: str = "") -> bytes:
    """Return a server-sent event that ends a broken stream with its cause.

    A leading blank line closes whatever event the engine left unfinished. Clients of the
    newer APIs look at the event's name, those of the older one at its data.
    """
    dialect = dialect_of(path)
    if dialect is Dialect.OPENAI:
        return b"\n\ndata: " + error_body(error) + b"\n\n"
    if dialect is Dialect.RESPONSES:
        told = _error(error)
        event = _ResponsesEvent(error.reason, told.message, told.param, told)
        body = msgspec.json.encode(event)
    else:
        body = error_body(error, dialect)
    return b"\n\nevent: error\ndata: " + body + b"\n\n"


def _error(error: IngressError) -> _Error:
    param = error.param if isinstance(error, RequestError) else None
    return _Error(str(error), error.kind, param, error.status)


def is_event_stream(content_type: str) -> bool:
    """Tell whether a response is a stream of server-sent events."""
    return content_type.startswith("text/event-stream")
