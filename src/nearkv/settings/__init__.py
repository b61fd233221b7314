"""Settings of the components: declared once, read from flags, environment and a file.

A component declares its settings as a class::

    class IngressSettings(ComponentSettings):
        listen: Address = Field(Address("0.0.0.0", 8080), description="Where to listen.")

and its ``__main__`` reads them with ``load_settings``. Importing this package imports
pydantic, which takes about 0.2 s; code that only prints help must import it lazily.
"""

from nearkv.settings.address import Address, parse_address
from nearkv.settings.base import ComponentSettings, ServiceSettings, SettingsGroup
from nearkv.settings.loading import load_settings
from nearkv.settings.rendering import render_config, render_help, render_table
from nearkv.settings.resolving import Resolved, resolve_settings
from nearkv.settings.tls import ClientTlsSettings, StateTlsSettings, TlsSettings
from nearkv.settings.values import (
    ClusterSecret,
    FreshnessSettings,
    HttpUrl,
    Secret,
    secret_bytes,
    unique_ids,
)

__all__ = [
    "Address",
    "ClientTlsSettings",
    "ClusterSecret",
    "ComponentSettings",
    "FreshnessSettings",
    "HttpUrl",
    "Resolved",
    "Secret",
    "ServiceSettings",
    "SettingsGroup",
    "StateTlsSettings",
    "TlsSettings",
    "load_settings",
    "parse_address",
    "render_config",
    "render_help",
    "render_table",
    "resolve_settings",
    "secret_bytes",
    "unique_ids",
]
