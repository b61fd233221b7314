"""The number of files and connections that the process may have open at once."""

import resource
import sys
from contextlib import suppress


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one, as programs in Go do by themselves.

    Container runtimes set 1,024 for programs that use ``select``, and leave the rest to those
    that do not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS takes less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """Return the soft limit that is in force."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
