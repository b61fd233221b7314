"""What every entry of the ingress asks of a request before it looks any further."""

import itertools
import re
import secrets

from nearkv.ingress.errors import NotRoutedError, RequestError, TooManyRequestsError
from nearkv.ingress.settings import IngressSettings

_OF_ONE_ENGINE = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class RequestIds:
    """Names requests: as the client did, where that is a sound name, else by number."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(5)
        self._numbers = itertools.count(1)

    def of(self, given: str) -> str:
        """Return the id of a request whose client gave ``given``, which may be empty."""
        if _REQUEST_ID.fullmatch(given):
            return given
        return f"{self._prefix}-{next(self._numbers):x}"


def check_room(in_flight: int, settings: IngressSettings) -> None:
    """Raise ``TooManyRequestsError`` where more requests are in flight than may be."""
    limit = settings.limits.max_in_flight
    if in_flight > limit:
        raise TooManyRequestsError(
            f"{limit} requests are being served already",
            retry_after_seconds=settings.gate.retry_after_seconds,
        )


def check_path(path: str) -> None:
    """Raise ``RequestError`` for a path that leads upwards, ``NotRoutedError`` for some others.

    Whoever resolves the former behind us must not be led out of /v1 to an engine's own paths.
    The latter change one engine: any client could, and nobody would know which.
    """
    if path in _OF_ONE_ENGINE:
        raise NotRoutedError("adapters are loaded at each engine by itself, not through here")
    if ".." in path and ".." in path.split("/"):
        raise RequestError("the path must not contain ..")
