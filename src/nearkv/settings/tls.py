"""Settings of TLS, for those who serve and for those who ask."""

from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from nearkv.certificates import CertificateFiles, ClientFiles
from nearkv.settings.base import SettingsGroup


class TlsSettings(SettingsGroup):
    """Serving over TLS; the files are looked at again and again, and taken over when renewed."""

    cert: Path = Field(description="Certificate chain (PEM).")
    key: Path = Field(description="Its private key (PEM).")
    client_ca: Path | None = Field(
        None,
        description="CA (PEM) that callers must show a certificate of; probes and scrapers, too.",
    )
    reload_seconds: float = Field(10.0, gt=0, description="Pause between looks at the files.")

    @property
    def files(self) -> CertificateFiles:
        """The files; every client has to show a certificate where there is a client_ca."""
        return CertificateFiles(self.cert, self.key, self.client_ca)


class StateTlsSettings(TlsSettings):
    """Serving state over TLS; the probes need no certificate."""

    client_ca: Path | None = Field(
        None, description="CA (PEM) that readers must show a certificate of; probes need none."
    )

    @property
    def files(self) -> CertificateFiles:
        """The files; who shows no certificate gets to the probes only."""
        return CertificateFiles(self.cert, self.key, self.client_ca, every_client=False)


class ClientTlsSettings(SettingsGroup):
    """Asking over TLS; renewed files are taken over with the next connection."""

    ca: Path | None = Field(None, description="CA (PEM) of those asked; default: the system's CAs.")
    cert: Path | None = Field(None, description="Certificate chain (PEM) to show; goes with key.")
    key: Path | None = Field(
        None, validate_default=True, description="Its private key (PEM); goes with cert."
    )
    name: str = Field(
        "",
        description="Name to find in the certificates of those asked; empty: the host in the URL.",
    )

    @field_validator("key")
    @classmethod
    def _goes_with_cert(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if (value is None) != (info.data.get("cert") is None):
            raise ValueError("key and cert go together")
        return value

    @property
    def files(self) -> ClientFiles:
        """The files, and the name to find."""
        return ClientFiles(self.ca, self.cert, self.key, self.name)
