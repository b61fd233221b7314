"""Values that the settings of several components share, each with its check."""

from collections.abc import Sequence
from typing import Annotated, Protocol, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator

from nearkv.block_keys import MAX_SECRET_BYTES
from nearkv.freshness import FreshnessLimits
from nearkv.settings.base import SettingsGroup


class _Named(Protocol):
    @property
    def id(self) -> str: ...


Elements = TypeVar("Elements", bound=Sequence[_Named])


def _check_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an HTTP URL: {text!r}; write http://host:port")
    _ = parts.port  # raises ValueError where it is no number
    return text.rstrip("/")


def _check_secret(secret: SecretStr) -> SecretStr:
    if not secret.get_secret_value():
        raise ValueError("is empty; leave it out to have none")
    return secret


def _check_cluster_secret(secret: SecretStr) -> SecretStr:
    size_bytes = len(secret_bytes(_check_secret(secret)))
    if size_bytes > MAX_SECRET_BYTES:
        raise ValueError(f"has {size_bytes} bytes, the limit is {MAX_SECRET_BYTES}")
    return secret


HttpUrl = Annotated[str, AfterValidator(_check_url)]
"""Base URL of an HTTP API, kept without a slash at its end."""

Secret = Annotated[SecretStr, AfterValidator(_check_secret)]
"""A secret that was meant to be set: an empty one has failed to arrive."""

ClusterSecret = Annotated[SecretStr, AfterValidator(_check_cluster_secret)]
"""The secret that keys the block keys (DESIGN section 2)."""


def secret_bytes(secret: SecretStr | None) -> bytes:
    """Return a secret as bytes; none is empty."""
    return b"" if secret is None else secret.get_secret_value().encode()


def unique_ids(elements: Elements) -> Elements:
    """Return the elements; raises ``ValueError`` when an id stands twice."""
    ids = [element.id for element in elements]
    repeated = sorted({name for name in ids if ids.count(name) > 1})
    if repeated:
        raise ValueError(f"ids must be unique, repeated: {', '.join(repeated)}")
    return elements


class FreshnessSettings(SettingsGroup):
    """Ages up to which readings of engines are trusted."""

    fresh_seconds: float = Field(3.0, gt=0, description="Readings up to this age are fresh.")
    aged_seconds: float = Field(30.0, gt=0, description="Readings up to this age are aged.")

    @field_validator("aged_seconds")
    @classmethod
    def _not_below_fresh(cls, aged_seconds: float, info: ValidationInfo) -> float:
        fresh_seconds = info.data.get("fresh_seconds", 0.0)
        if aged_seconds < fresh_seconds:
            raise ValueError(f"must not be below fresh_seconds ({fresh_seconds:g})")
        return aged_seconds

    @property
    def limits(self) -> FreshnessLimits:
        """The limits that classify an age."""
        return FreshnessLimits(self.fresh_seconds, self.aged_seconds)
