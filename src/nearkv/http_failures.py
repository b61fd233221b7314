"""Why an HTTP request got no answer, in words for people."""

import os

import aiohttp


def explain_failure(error: Exception) -> str:
    """Say in one line what went wrong; the address is left to the caller.

    aiohttp's own texts repeat the address twice and call every plain connection ``ssl:default``.
    """
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(
        error, aiohttp.ClientSSLError
    ):
        return f"cannot connect: {_explain_os_error(error.os_error)}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}"


def _explain_os_error(error: OSError) -> str:
    # Positive numbers are the system's; those of names that do not resolve are another kind.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)
