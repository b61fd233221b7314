"""How an engine can fail a request before the first byte."""

from enum import StrEnum


class FailureKind(StrEnum):
    """Why another engine may be tried, as it is counted."""

    UNREACHABLE = "unreachable"
    """No connection came about: the engine knows nothing of the request."""
    BROKEN = "broken"
    """The connection broke, or what came was no HTTP."""
    STATUS = "status"
    """It answered 500, 502, 503 or 504."""
    SILENT = "silent"
    """It was silent for much longer than predicted."""
    LOST = "lost"
    """Its agent could not reach it either."""

    @property
    def reached(self) -> bool:
        """Whether the engine had the request, so that the request may be at fault."""
        return self is not FailureKind.UNREACHABLE
