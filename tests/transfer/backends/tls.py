"""Certificates for tests, made by the openssl program; nothing of them is kept."""

import functools
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path


def missing_openssl() -> str:
    """Return why no certificates can be made, where that is so."""
    return "" if shutil.which("openssl") else "the openssl program is not installed"


@functools.cache
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return contexts for a server and for a client, each with a certificate the other trusts."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.verify_mode = ssl.CERT_REQUIRED
    with tempfile.TemporaryDirectory() as folder:
        for name, own, other in (("server", server, client), ("client", client, server)):
            certificate, key = Path(folder, f"{name}.pem"), Path(folder, f"{name}.key")
            subprocess.run(
                [
                    shutil.which("openssl"),
                    "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2",
                    "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}",
                    "-addext", "subjectAltName=IP:127.0.0.1",
                    "-keyout", str(key), "-out", str(certificate),
                ],
                check=True, capture_output=True, timeout=30,
            )  # fmt: skip
            own.load_cert_chain(certificate, key)
            other.load_verify_locations(certificate)
    return server, client
