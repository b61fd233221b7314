"""Certificates as files, made by the openssl program."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

HAS_OPENSSL = shutil.which("openssl") is not None


@dataclass(frozen=True, slots=True)
class Pair:
    """A self-signed certificate and its key."""

    cert: Path
    key: Path

    def copy_to(self, cert: Path, key: Path) -> None:
        """Put this pair where another one is, as a renewal does: whole files, swapped in."""
        for source, target in ((self.cert, cert), (self.key, key)):
            fresh = target.with_suffix(".new")
            fresh.write_bytes(source.read_bytes())
            fresh.replace(target)


def make_pair(folder: Path, name: str) -> Pair:
    """Make a certificate for 127.0.0.1 with ``name`` as its common name."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    subprocess.run(
        [
            shutil.which("openssl") or "openssl",
            "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2",
            "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}",
            "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", str(pair.key), "-out", str(pair.cert),
        ],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return pair


def trusting(*pairs: Pair, showing: Pair | None = None) -> ssl.SSLContext:
    """Return a client's context that trusts these certificates, and shows one of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for pair in pairs:
        context.load_verify_locations(pair.cert)
    if showing is not None:
        context.load_cert_chain(showing.cert, showing.key)
    return context
