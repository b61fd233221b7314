"""Errors of the extender, each with the answer that the scheduler gets.

ExtenderError               500
├── BadRequestError         400  the request cannot be answered; ``reason`` says why, for counting
│   ├── BodyTooLargeError   413
│   ├── BodyTooSlowError    408
│   ├── EncodedBodyError    415
│   └── NoRoomError         503
└── QueryError              400  a question of a person (``/v1/explain``) is not understood
    └── NotKnownError       404
"""

from nearkv.errors import NearkvError


class ExtenderError(NearkvError):
    """Base of everything the extender raises."""

    status = 500


class BadRequestError(ExtenderError):
    """The scheduler's request cannot be answered as it is."""

    status = 400

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BodyTooLargeError(BadRequestError):
    """The body is over the limit."""

    status = 413


class BodyTooSlowError(BadRequestError):
    """The body did not arrive in time."""

    status = 408


class EncodedBodyError(BadRequestError):
    """The body is compressed, which kube-scheduler never does."""

    status = 415


class NoRoomError(BadRequestError):
    """The bodies that are here already take all the room there is."""

    status = 503


class QueryError(ExtenderError):
    """A parameter of a question is missing or malformed."""

    status = 400


class NotKnownError(QueryError):
    """What is asked for is not known, or not any more."""

    status = 404
