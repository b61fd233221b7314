"""What a report refuses."""

from nearkv.errors import NearkvError


class ReportError(NearkvError):
    """The question cannot be answered as it was put; the message names the option at fault."""


class UnknownFigureError(Exception):
    """A figure cannot be known; the text says why. Answers catch it."""
