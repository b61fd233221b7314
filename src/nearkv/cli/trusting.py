"""Whom the command line trusts over TLS, and what it shows of itself."""

from nearkv.certificates import ClientCertificates, ClientFiles
from nearkv.errors import CertificateError, NearkvError


class TrustError(NearkvError):
    """The files of --ca, --cert and --key cannot be used."""


def load_trust(files: ClientFiles) -> ClientCertificates:
    """Return what to ask with; raises :class:`TrustError`."""
    if (files.cert is None) != (files.key is None):
        raise TrustError("--cert and --key go together")
    try:
        return ClientCertificates(files)
    except CertificateError as error:
        raise TrustError(f"--ca, --cert, --key: {error}") from error
