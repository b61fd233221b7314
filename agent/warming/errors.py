"""Errors of warm-up, each with the answer that a client gets.

WarmingError
├── BadWarmRequestError   400  the request cannot be read; the message names the field
├── UnknownPrefixError    404  no prefix has this id
├── PrefixConflictError   409  the id stands for another prefix
├── WarmingFullError      429  too many prefixes, or too much text, are being kept
└── LoadError                  an engine did not take a prefix; ``reason`` is for counting
"""

from nearkv.agent.errors import AgentError


class WarmingError(AgentError):
    """Base of all errors of warm-up."""

    status = 500


class BadWarmRequestError(WarmingError):
    """The request cannot be read, or names what there is not."""

    status = 400


class UnknownPrefixError(WarmingError):
    """No prefix has this id."""

    status = 404


class PrefixConflictError(WarmingError):
    """The id stands for another prefix."""

    status = 409


class WarmingFullError(WarmingError):
    """There is no room for another prefix."""

    status = 429


class LoadError(WarmingError):
    """An engine did not take a prefix."""

    def __init__(self, message: str, *, reason: str, status: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.engine_status = status
