"""Tenants: who may ask, by API key, and how much (pure).

Keys come from a file (YAML or JSON), as a Kubernetes Secret is mounted::

    tenants:
      - name: search
        keys: [sk-one, sk-two]
        requests_per_second: 20
        tokens_per_second: 50000
        max_priority: 1

Limits hold for each replica. Keys are kept as digests; a new file keeps the levels of the
buckets whose limits did not change.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from nearkv.errors import NearkvError
from nearkv.ingress.errors import KeyRefusedError, TenantLimitError
from nearkv.ingress.token_bucket import TokenBucket

_BURST_SECONDS = 2.0
_MOST_TENANTS = 10_000


class TenantFileError(NearkvError):
    """The file of tenants cannot be used; the message says why."""


class TenantSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant as the file describes it; a limit left out is none.

    A burst left out is what two seconds bring, at least one request.
    """

    name: str
    keys: tuple[str, ...]
    requests_per_second: float | None = None
    burst_requests: float | None = None
    tokens_per_second: float | None = None
    burst_tokens: float | None = None
    max_priority: int = 0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: tuple[TenantSpec, ...]


@dataclass(slots=True)
class Tenant:
    """A tenant with its buckets; ``None`` is no limit."""

    spec: TenantSpec
    requests: TokenBucket | None
    tokens: TokenBucket | None


def read_tenants(data: bytes) -> tuple[TenantSpec, ...]:
    """Return the tenants that a file describes; raises :class:`TenantFileError`."""
    try:
        specs = msgspec.yaml.decode(data, type=_File).tenants
    except (msgspec.DecodeError, ValueError) as error:
        raise TenantFileError(f"not a list of tenants: {error}") from error
    if len(specs) > _MOST_TENANTS:
        raise TenantFileError(f"more than {_MOST_TENANTS} tenants")
    for field, values in (
        ("name", [spec.name for spec in specs]),
        ("keys", [key for spec in specs for key in spec.keys]),
    ):
        if not all(values):
            raise TenantFileError(f"{field}: is empty")
        if len(set(values)) < len(values):
            raise TenantFileError(f"{field}: one stands twice")
    for spec in specs:
        _check_limits(spec)
    return specs


def _check_limits(spec: TenantSpec) -> None:
    for field in ("requests_per_second", "burst_requests", "tokens_per_second", "burst_tokens"):
        value = getattr(spec, field)
        if value is not None and not 0 < value < math.inf:
            raise TenantFileError(f"{spec.name}.{field}: must be above 0, got {value}")


class Tenants:
    """Admits requests by their key, within their tenant's limits."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._by_key: dict[bytes, Tenant] = {}

    def replace(self, specs: tuple[TenantSpec, ...]) -> None:
        """Take a new list of tenants."""
        old = {tenant.spec.name: tenant for tenant in self._by_key.values()}
        by_key: dict[bytes, Tenant] = {}
        for spec in specs:
            tenant = self._made(spec, old.get(spec.name))
            by_key |= {_digest(key): tenant for key in spec.keys}
        self._by_key = by_key

    def admit(self, key: str) -> Tenant:
        """Return whose key it is, and count a request.

        Raises :class:`KeyRefusedError` or :class:`TenantLimitError`.
        """
        tenant = self._by_key.get(_digest(key)) if key else None
        if tenant is None:
            raise KeyRefusedError("this API key is not known" if key else "an API key is needed")
        self._take(tenant, tenant.requests, 1, "requests")
        return tenant

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Count prompt tokens; raises :class:`TenantLimitError`."""
        self._take(tenant, tenant.tokens, tokens, "tokens")

    def _take(self, tenant: Tenant, bucket: TokenBucket | None, amount: float, what: str) -> None:
        wait_seconds = 0.0 if bucket is None else bucket.take(amount, self._now())
        if wait_seconds:
            raise TenantLimitError(
                tenant.spec.name,
                what=what,
                retry_after_seconds=max(1, math.ceil(wait_seconds)),
            )

    def _made(self, spec: TenantSpec, old: Tenant | None) -> Tenant:
        requests = self._bucket(spec.requests_per_second, spec.burst_requests)
        tokens = self._bucket(spec.tokens_per_second, spec.burst_tokens)
        if old is not None:
            requests, tokens = _kept(requests, old.requests), _kept(tokens, old.tokens)
        return Tenant(spec, requests, tokens)

    def _bucket(self, per_second: float | None, burst: float | None) -> TokenBucket | None:
        if per_second is None:
            return None
        burst = max(1.0, _BURST_SECONDS * per_second) if burst is None else max(1.0, burst)
        return TokenBucket(per_second, burst, burst, self._now())


def _kept(new: TokenBucket | None, old: TokenBucket | None) -> TokenBucket | None:
    """Return the old bucket where its limits are those of the new one."""
    if new is None or old is None:
        return new
    return old if (old.per_second, old.burst) == (new.per_second, new.burst) else new


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
