"""From a store's address to its tier, and whether that tier works."""

import secrets
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from nearkv.transfer.backends.contract import Stop
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.store.contract import Tier
from nearkv.transfer.store.files import FileTier
from nearkv.transfer.store.link import DEFAULT_SEGMENT_BLOCKS
from nearkv.transfer.store.redis_store import RedisSettings, RedisTier

FILES, REDIS = "files", "redis"
_TIERS = {"file": FILES, "redis": REDIS, "rediss": REDIS, "unix": REDIS}
_CANARY_BYTES = 64


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a store is and how it is used, as plain data; sizes in bytes, times in seconds.

    ``max_bytes`` bounds a tier of files, ``ttl_seconds`` is for Redis. ``secret`` signs what
    is stored; all who share a store share it, and ``segment_blocks``.
    """

    url: str
    max_bytes: int = 64 << 30
    ttl_seconds: float = 3600.0
    segment_blocks: int = DEFAULT_SEGMENT_BLOCKS
    secret: bytes = b""


def tier_of(url: str) -> str:
    """Return the name of the tier that a URL is for; raises ``ValueError`` with the reason.

    The reason never repeats the URL, which may hold a password.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError("the url cannot be read") from None
    tier = _TIERS.get(parts.scheme)
    if tier is None:
        raise ValueError(f"not a store: write {', '.join(f'{scheme}://' for scheme in _TIERS)}")
    if parts.scheme in ("file", "unix") and (parts.hostname or not parts.path.startswith("/")):
        raise ValueError(f"write {parts.scheme}:///absolute/path")
    if parts.scheme in ("redis", "rediss") and not parts.hostname:
        raise ValueError(f"the host is missing: write {parts.scheme}://host:port/db")
    return tier


def shown_url(url: str) -> str:
    """Return a URL for people: without user, password and options."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def open_tier(options: StoreOptions) -> Tier:
    """Return the tier; raises :class:`PullError` when a folder cannot be used.

    Redis is not asked before the first call.
    """
    if tier_of(options.url) == FILES:
        folder = Path(unquote(urlsplit(options.url).path))
        return FileTier(folder, max_bytes=options.max_bytes)
    return RedisTier(RedisSettings(url=options.url, ttl_seconds=options.ttl_seconds))


def check_tier(tier: Tier, stop: Stop) -> None:
    """Keep a small value, read it, remove it; raises :class:`PullError` where that fails."""
    key, value = secrets.token_hex(20), secrets.token_bytes(_CANARY_BYTES)
    tier.put(key, [value], stop)
    found = tier.get(key, _CANARY_BYTES, stop)
    tier.remove(key, stop)
    if found != value:
        raise PullError(Reason.CORRUPT, "the store gives back other bytes than it was given")


def try_store(options: StoreOptions, stop: Stop) -> None:
    """Open a store and see whether it works; raises :class:`PullError` where it does not."""
    tier = open_tier(options)
    try:
        check_tier(tier, stop)
    finally:
        if isinstance(tier, FileTier):
            tier.close()
