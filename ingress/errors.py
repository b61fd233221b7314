"""Errors of the ingress, each with the answer a client gets.

IngressError                500
├── RequestError            400  the request cannot be served as it is
│   ├── UnknownModelError   404
│   ├── ResponseGoneError   404  the engine that made the earlier response is no more
│   ├── NotRoutedError      403  what concerns one engine, and is no request to a model
│   ├── BodyTooLargeError   413
│   ├── BodyTimeoutError    408
│   └── KeyRefusedError     401  no API key, or one that nobody has
├── NoRoomError             429  no engine may take the request now; with Retry-After
│   ├── TooManyRequestsError     this replica serves as many requests as it may
│   ├── QueueFullError           as many requests wait for room as may
│   └── TenantLimitError         the tenant's own limit
├── NoEngineError           503  no engine is known
├── EngineFailedError       502  the engines tried failed before the first byte
├── EngineTimeoutError      504  an engine kept silent past a deadline
└── TokenizationError            no token ids; routing goes on without, no client sees it
"""

from nearkv.errors import NearkvError


class IngressError(NearkvError):
    """Base of everything the ingress raises."""

    status = 500
    kind = "InternalServerError"
    reason = "internal_error"


class RequestError(IngressError):
    """The request cannot be served as it is."""

    status = 400
    kind = "BadRequestError"
    reason = "bad_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(RequestError):
    """No engine serves the model asked for."""

    status = 404
    kind = "NotFoundError"
    reason = "unknown_model"


class ResponseGoneError(RequestError):
    """The engine that made the earlier response is no more."""

    status = 404
    kind = "NotFoundError"
    reason = "response_gone"


class NotRoutedError(RequestError):
    """The path is about one engine, not about a model: it is not routed."""

    status = 403
    kind = "PermissionDeniedError"
    reason = "not_routed"


class BodyTooLargeError(RequestError):
    """The body is over the limit."""

    status = 413
    kind = "RequestTooLargeError"
    reason = "body_too_large"


class BodyTimeoutError(RequestError):
    """The client took too long to send its body."""

    status = 408
    kind = "RequestTimeoutError"
    reason = "body_timeout"


class KeyRefusedError(RequestError):
    """The request has no API key, or one that no tenant has."""

    status = 401
    kind = "AuthenticationError"
    reason = "bad_key"


class NoRoomError(IngressError):
    """Every engine that could serve is below its free-KV threshold."""

    status = 429
    kind = "RateLimitError"
    reason = "no_kv_room"

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class TooManyRequestsError(NoRoomError):
    """This replica serves as many requests as it may."""

    reason = "too_many_requests"


class QueueFullError(NoRoomError):
    """No engine has room, and as many requests wait as may."""

    reason = "queue_full"


class TenantLimitError(NoRoomError):
    """A tenant asks for more than its limit; ``what`` is requests or tokens."""

    def __init__(self, tenant: str, *, what: str, retry_after_seconds: int) -> None:
        super().__init__(
            f"tenant {tenant} is over its limit of {what} per second",
            retry_after_seconds=retry_after_seconds,
        )
        self.tenant = tenant
        self.reason = f"tenant_{what}"


class NoEngineError(IngressError):
    """No engine is known, or none could be reached."""

    status = 503
    kind = "ServiceUnavailableError"
    reason = "no_engine"


class EngineFailedError(IngressError):
    """Engines were tried and failed before the first byte."""

    status = 502
    kind = "BadGatewayError"
    reason = "engine_failed"


class EngineTimeoutError(IngressError):
    """An engine kept silent past a deadline."""

    status = 504
    kind = "GatewayTimeoutError"
    reason = "engine_timeout"


class TokenizationError(IngressError):
    """No token ids could be had for a prompt.

    ``unreachable`` says that the engine was never asked, as no connection came about; only
    then may another one be.
    """

    reason = "no_tokens"

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable
