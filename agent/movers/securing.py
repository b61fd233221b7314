"""TLS for the ``tcp`` backend in a mover: options are plain data, its contexts are not."""

import ssl
from pathlib import Path
from typing import Any

import msgspec

from nearkv.transfer.backends.contract import Backend
from nearkv.transfer.backends.tcp import TcpBackend
from nearkv.transfer.errors import PullError, Reason


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths of PEM files; one certificate serves and asks.

    With ``ca`` both ends must show a certificate of it; without, servers must have one of the
    system's CAs. Offers carry addresses, not names: with ``check_host`` the certificate must
    be valid for the address. Without, any certificate of the ``ca`` will do.
    """

    cert: str
    key: str
    ca: str = ""
    check_host: bool = True


def tcp_backend(
    *,
    tls: dict[str, Any] | None = None,
    **options: Any,  # noqa: ANN401 - whatever the backend takes
) -> Backend:
    """Make the ``tcp`` backend from its options and, in ``tls``, those of :class:`TlsFiles`.

    Raises :class:`PullError` (``AUTH``) when TLS cannot be set up as told.
    """
    if tls is None:
        return TcpBackend(**options)
    try:
        files = msgspec.convert(tls, TlsFiles)
    except msgspec.ValidationError as error:
        raise PullError(Reason.AUTH, f"options of tcp, tls: {error}") from error
    try:
        server, client = _contexts(files)
    except OSError as error:
        names = ", ".join(filter(None, (files.cert, files.key, files.ca)))
        raise PullError(Reason.AUTH, f"options of tcp, tls: {names}: {error}") from error
    return TcpBackend(**options, server_tls=server, client_tls=client)


def _contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return TLS for the server's end and for the reader's."""
    if not files.ca and not files.check_host:
        raise PullError(Reason.AUTH, "options of tcp, tls: check_host is off, but there is no ca")
    # Movers come and go, and most do without TLS: they start sooner so.
    from nearkv.certificates import (  # noqa: PLC0415 (see above)
        CertificateFiles,
        ClientFiles,
        load_client_context,
        load_context,
    )

    cert, key, ca = Path(files.cert), Path(files.key), Path(files.ca) if files.ca else None
    server = load_context(CertificateFiles(cert, key, ca))
    client = load_client_context(ClientFiles(ca, cert, key), check_host=files.check_host)
    return server, client
