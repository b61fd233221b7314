"""Why an HTTP request got no answer, in words for people."""

import os
import ssl

import aiohttp

from nearkv.handshakes import name_handshake_failure

DISCONNECTED = "disconnected"


def name_failure(error: Exception) -> str:
    """Return a name to count: ``tls_`` and a handshake's failure, or ``disconnected``."""
    cause = _tls_cause(error)
    return DISCONNECTED if cause is None else f"tls_{name_handshake_failure(cause)}"


def explain_failure(error: Exception) -> str:
    """Say in one line what went wrong; the address is left to the caller.

    aiohttp's own texts repeat the address twice and call every plain connection ``ssl:default``.
    """
    cause = _tls_cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}"
    if cause is not None:
        return f"no TLS with it: {getattr(cause, 'reason', None) or cause}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {_explain_os_error(error.os_error)}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}"


def _tls_cause(error: Exception) -> OSError | None:
    """Return what went wrong with TLS, ``None`` where something else did."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        return cause if isinstance(cause, OSError) else None
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ssl.SSLError):
        return error.os_error
    return error if isinstance(error, ssl.SSLError) else None


def _explain_os_error(error: OSError) -> str:
    # Positive numbers are the system's; those of names that do not resolve are another kind.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)
