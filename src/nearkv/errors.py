"""Errors of the shared core.

Every error that nearkv raises on purpose derives from one base, so that a shell can
tell "nearkv refuses, and says why" from a defect::

    NearkvError
    ├── SettingsError     the configuration is wrong; lists every problem at once
    ├── ListenError       an address cannot be listened on
    └── CertificateError  TLS files cannot be used; at start it ends the program

Components add their own families under ``NearkvError`` in their own ``errors.py``.
"""

from collections.abc import Sequence


class NearkvError(Exception):
    """Base of all errors that nearkv raises on purpose; the message is for people."""


class SettingsError(NearkvError):
    """The configuration is wrong.

    ``problems`` holds one line for each mistake, each naming the key's full path, so
    that a user mends a file once and not once for each mistake.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ListenError(NearkvError):
    """An address cannot be listened on: it is in use, not ours, or needs a privilege."""


class CertificateError(NearkvError):
    """Certificate, key or CA cannot be used; the message names the file."""
