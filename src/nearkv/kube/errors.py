"""Errors of talking to the API server.

KubeError
├── AccessError    kubeconfig, service account or credentials cannot be used
├── ApiError       a request failed; its ``trouble`` is a short name to count
└── PatchError     a patch was refused, or did not get through in time
"""

from enum import StrEnum

from nearkv.errors import NearkvError


class Trouble(StrEnum):
    """Why talking to the API server failed, as a name to count."""

    CREDENTIALS = "credentials"  # kubeconfig, token file or exec plugin cannot be used
    UNAUTHORIZED = "unauthorized"  # 401
    FORBIDDEN = "forbidden"  # 403: RBAC
    NOT_FOUND = "not_found"  # 404: e.g. the CRD is not installed
    EXPIRED = "expired"  # 410: the resource version or the page's token is too old
    CONFLICT = "conflict"  # 409
    THROTTLED = "throttled"  # 429
    REFUSED = "refused"  # any other 3xx or 4xx
    SERVER_ERROR = "server_error"  # 5xx
    UNREACHABLE = "unreachable"  # no connection, or it broke
    SILENT = "silent"  # nothing came in time
    CLOSED_EARLY = "closed_early"  # a watch ended as soon as it began
    TRUNCATED = "truncated"  # a watch ended within a line
    GARBAGE = "garbage"  # an answer that is no list, or a line that is no event
    TOO_LARGE = "too_large"  # a page or a line over its limit
    REGRESSED = "regressed"  # resource versions went back: the store behind the API is another one
    UNREADABLE_OBJECT = "unreadable_object"  # an object that does not decode; it is left out


class KubeError(NearkvError):
    """Base of what goes wrong with the API server."""


class AccessError(KubeError):
    """A kubeconfig, a service account or its credentials cannot be used."""


class ApiError(KubeError):
    """A request failed. ``status`` is HTTP's, 0 where there was no answer.

    ``retry_after_seconds`` is what the server asked for, ``None`` where it did not.
    """

    def __init__(
        self,
        trouble: Trouble,
        message: str,
        *,
        status: int = 0,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.trouble = trouble
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class PatchError(KubeError):
    """A patch was refused or did not get through in time; ``status`` is HTTP's, 0 without one."""

    def __init__(self, trouble: Trouble, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.trouble = trouble
        self.status = status
