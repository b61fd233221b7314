"""From what went wrong to an :class:`ApiError` with a name (pure, apart from reading a body)."""

from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import msgspec

from nearkv.bounded_reading import AnswerTooLargeError
from nearkv.http_failures import explain_failure
from nearkv.kube.errors import ApiError, Trouble

_LONGEST_MESSAGE = 300
_BY_STATUS = (
    (401, Trouble.UNAUTHORIZED),
    (403, Trouble.FORBIDDEN),
    (404, Trouble.NOT_FOUND),
    (409, Trouble.CONFLICT),
    (410, Trouble.EXPIRED),
    (429, Trouble.THROTTLED),
)


class _Details(msgspec.Struct, rename="camel"):
    retry_after_seconds: float | None = None


class ApiStatus(msgspec.Struct):
    """The ``Status`` object with which the API server says what went wrong."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details | None = None

    def as_error(self, *, retry_after_seconds: float | None = None) -> ApiError:
        """Return it as an error; its own wish when to come back wins over the header's."""
        wished = self.details.retry_after_seconds if self.details else None
        expired = self.reason in {"Expired", "Gone"}
        return ApiError(
            Trouble.EXPIRED if expired else trouble_of(self.code),
            f"{self.code} {self.reason}: {self.message[:_LONGEST_MESSAGE]}",
            status=self.code,
            retry_after_seconds=retry_after_seconds if wished is None else wished,
        )


def trouble_of(status: int) -> Trouble:
    """Return the name for an HTTP status that is no success."""
    for known, trouble in _BY_STATUS:
        if status == known:
            return trouble
    return Trouble.SERVER_ERROR if status >= 500 else Trouble.REFUSED  # noqa: PLR2004 (HTTP's)


def refusal(status: int, body: bytes, retry_after: str | None) -> ApiError:
    """Return the error for an answer that is no success.

    ``retry_after`` is the header: seconds, since the API server never sends a date.
    """
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    try:
        said = msgspec.json.decode(body, type=ApiStatus)
    except msgspec.MsgspecError:
        said = ApiStatus(message=body[:_LONGEST_MESSAGE].decode(errors="replace"))
    said.code = status
    return said.as_error(retry_after_seconds=seconds)


@contextmanager
def naming_failures() -> Iterator[None]:
    """Turn what aiohttp and the system raise within the block into :class:`ApiError`."""
    try:
        yield
    except AnswerTooLargeError as error:
        raise ApiError(Trouble.TOO_LARGE, str(error)) from error
    except TimeoutError as error:
        raise ApiError(Trouble.SILENT, "the API server did not answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ApiError(Trouble.UNREACHABLE, explain_failure(error)) from error
