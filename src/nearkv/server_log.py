"""What the HTTP server library says, without what clients sent.

A request that cannot be read is reported by the library at level error, with a traceback and the
offending line: an API key with a stray character in it, or a prompt. Whoever can reach the port
could so fill the log, and put secrets of others' there.
"""

import logging
from collections.abc import MutableMapping
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """The library's logger; of unreadable requests it says at level info that there was one."""

    def __init__(self) -> None:
        super().__init__(server_logger)

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """Return a message and its values as they are."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401 (as the library has it)
        """Log, without the line of a request that could not be read."""
        error = kwargs.get("exc_info")
        if isinstance(error, HttpProcessingError):
            kwargs["exc_info"] = None
            level, msg, args = min(level, logging.INFO), f"{msg}: %s", (*args, type(error).__name__)
        super().log(level, msg, *args, **kwargs)
