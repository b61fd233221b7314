"""Why a TLS handshake failed, as a name to count: at those who serve, and at those who ask.

Only one side learns the reason as a rule: asyncio gives a failed handshake up before the alert
that would tell the other side is sent. So whoever shows a certificate which is not taken sees a
connection break, and the server has to count, too.
"""

import ssl
from collections.abc import Callable
from enum import StrEnum

_EXPIRED = frozenset({9, 10})
_OTHER_NAME = frozenset({62, 63, 64})
"""OpenSSL's X509_V_ERR: not yet valid, has expired; host, mail and address mismatch."""
_REJECTING_ALERTS = ("UNKNOWN_CA", "CERTIFICATE", "ACCESS_DENIED", "DECRYPT_ERROR")


class HandshakeFailure(StrEnum):
    """Why there is no TLS connection."""

    EXPIRED = "expired"  # the other side's certificate has run out, or is not valid yet
    UNTRUSTED = "untrusted"  # it is of no CA of ours
    OTHER_NAME = "other_name"  # it is for another host
    MISSING = "missing"  # the other side showed none
    REJECTED = "rejected"  # the other side does not take ours
    NO_TLS = "no_tls"  # the other side does not speak TLS
    PROTOCOL = "protocol"  # no common version or cipher, or nonsense
    BROKEN_OFF = "broken_off"  # the other side went away


def name_handshake_failure(error: OSError) -> HandshakeFailure:
    """Return why a handshake failed."""
    reason = str(getattr(error, "reason", None) or "")
    if isinstance(error, ssl.SSLCertVerificationError):
        return _of_certificate(error.verify_code)
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return HandshakeFailure.MISSING
    if reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER"):
        return HandshakeFailure.NO_TLS
    if "ALERT" in reason and any(name in reason for name in _REJECTING_ALERTS):
        return HandshakeFailure.REJECTED
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return HandshakeFailure.BROKEN_OFF
    return HandshakeFailure.PROTOCOL


def _of_certificate(verify_code: int) -> HandshakeFailure:
    if verify_code in _EXPIRED:
        return HandshakeFailure.EXPIRED
    if verify_code in _OTHER_NAME:
        return HandshakeFailure.OTHER_NAME
    return HandshakeFailure.UNTRUSTED


def counting_handshakes(count: Callable[[str], None]) -> type[ssl.SSLObject]:
    """Return a class for a server context's ``sslobject_class`` that counts failed handshakes."""

    class Connection(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                count(str(name_handshake_failure(error)))
                raise

    return Connection
