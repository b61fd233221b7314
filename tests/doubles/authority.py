"""A certificate authority for tests, by the openssl program; its keys live as long as a folder."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

MISSING = "" if shutil.which("openssl") else "the openssl program is not installed"
_EXTENSIONS = """\
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
subjectAltName = {names}
"""
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate, its key, and the authority that signed it: PEM files."""

    cert: Path
    key: Path
    ca: Path

    def shown(self) -> dict[str, str]:
        """Return the settings of a client that shows this and trusts its authority."""
        return {"ca": str(self.ca), "cert": str(self.cert), "key": str(self.key)}

    def served(self, *, readers: "Authority | None" = None) -> dict[str, str]:
        """Return the settings of a server with this, asking readers for a certificate or not."""
        files = {"cert": str(self.cert), "key": str(self.key)}
        return files if readers is None else {**files, "client_ca": str(readers.cert)}

    def copy_to(self, folder: Path) -> "Issued":
        """Put the files where cert-manager would: tls.crt, tls.key, ca.crt, each swapped in."""
        made = Issued(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        for source, target in ((self.ca, made.ca), (self.key, made.key), (self.cert, made.cert)):
            fresh = target.with_suffix(".new")
            fresh.write_bytes(source.read_bytes())
            fresh.replace(target)
        return made


class Authority:
    """Signs certificates, also such as nobody should take."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.cert = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl(
            *("req", "-x509", *_CURVE, "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "keyUsage=critical,keyCertSign"),
            *("-keyout", self._key, "-out", self.cert),
        )

    def issue(self, name: str, *, names: str = "IP:127.0.0.1", days: int = 2) -> Issued:
        """Make a certificate for ``names``; with negative ``days`` it has run out."""
        made = Issued(
            self._folder / f"{self._name}-{name}.pem",
            self._folder / f"{self._name}-{name}.key",
            self.cert,
        )
        request = made.key.with_suffix(".csr")
        extensions = made.key.with_suffix(".ext")
        extensions.write_text(_EXTENSIONS.format(names=names), encoding="utf-8")
        _openssl("req", *_CURVE, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key),
            *("-CAcreateserial", "-days", days, "-extfile", extensions, "-out", made.cert),
        )
        return made


def _openssl(*arguments: object) -> None:
    program = shutil.which("openssl") or "openssl"
    subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, timeout=30)
