"""A tier in Redis, or in a server that speaks its protocol; needs the extra ``store-redis``.

Each call has a connection of its own, whose time limit is what the call has left: redis-py
sets limits per connection only. Setting one up costs a round trip or two, beside megabytes.

Values travel in pieces of a few MiB, each within ``call_seconds``, the slowest network that is
any use. A server that stalls in the middle of a value can hold a call for ``call_seconds``
beyond its deadline, twice that when what was half written is cleared away; looking up the
server's name is bounded by the resolver only. A value appears when all of it is there. One that
is replaced while it is read does not have its digests, and counts as damaged; so writers leave
what is there alone.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from nearkv.transfer.backends.contract import Probe, Stop
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.store.contract import Bytes

if TYPE_CHECKING:
    from redis import Redis

MAX_VALUE_BYTES = 512 << 20
"""Redis takes no longer value (its setting ``proto-max-bulk-len``)."""
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Where Redis is, and how it is used.

    ``url`` is redis-py's: ``redis://user:password@host:6379/0``, ``rediss://`` for TLS, or
    ``unix:///run/redis.sock``. A value is gone ``ttl_seconds`` after it was last put. Nothing
    waits longer than ``call_seconds`` for the server.
    """

    url: str
    ttl_seconds: float = 3600.0
    call_seconds: float = 2.0
    max_value_bytes: int = MAX_VALUE_BYTES
    key_prefix: str = "nearkv:kv:"

    def __post_init__(self) -> None:
        for field in ("ttl_seconds", "call_seconds", "max_value_bytes"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive")
        if self.max_value_bytes > MAX_VALUE_BYTES:
            raise ValueError(f"max_value_bytes: Redis takes at most {MAX_VALUE_BYTES}")

    def __repr__(self) -> str:
        return f"RedisSettings(ttl_seconds={self.ttl_seconds})"  # the URL may hold a password


class RedisTier:
    """Values in Redis. Constructing it connects to nothing."""

    name = "redis"

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings

    @property
    def max_value_bytes(self) -> int:
        """The largest value that is taken."""
        return self._settings.max_value_bytes

    def probe(self, stop: Stop) -> Probe:
        """Say whether the server answers; never raises."""
        try:
            with self._client(stop) as client:
                client.ping()
        except PullError as error:
            return Probe(name=self.name, usable=False, detail=str(error))
        return Probe(name=self.name, usable=True)

    def present(self, keys: Sequence[str], stop: Stop) -> list[bool]:
        """Say of each key whether it has a value; one round trip for all."""
        with self._client(stop) as client:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.exists(self._name(key))
            return [bool(answer) for answer in pipeline.execute()]

    def touch(self, key: str, stop: Stop) -> bool:
        """Say whether a key has a value, and let its time begin anew."""
        with self._client(stop) as client:
            return bool(client.pexpire(self._name(key), self._ttl_ms))

    def get(self, key: str, limit_bytes: int, stop: Stop) -> Bytes | None:
        """Return a value; never asks for more than ``limit_bytes`` of it."""
        name = self._name(key)
        with self._client(stop) as client:
            size = cast("int", client.strlen(name))
            if size > limit_bytes:
                raise PullError(Reason.TOO_LARGE, f"{size} bytes where at most {limit_bytes} fit")
            value = bytearray()
            for at in range(0, size, _PIECE_BYTES):
                stop.check()
                last = min(at + _PIECE_BYTES, size) - 1
                value += cast("bytes", client.getrange(name, at, last))
        return value or None

    def put(self, key: str, parts: Sequence[Bytes], stop: Stop) -> None:
        """Keep a value, unless there is one."""
        size = sum(len(part) for part in parts)
        if size > self._settings.max_value_bytes:
            limit = self._settings.max_value_bytes
            raise PullError(Reason.TOO_LARGE, f"{size} bytes are over the limit of {limit}")
        value = b"".join(parts)
        if size <= _PIECE_BYTES:
            with self._client(stop) as client:
                client.set(self._name(key), value, px=self._ttl_ms, nx=True)
            return
        part = f"{self._name(key)}:{secrets.token_hex(8)}"
        with self._client(stop) as client:
            try:
                self._put_in_pieces(client, part, memoryview(value), stop)
                client.pexpire(part, self._ttl_ms)
                client.renamenx(part, self._name(key))
            finally:
                # Still there when another writer was first, or something went wrong; if this
                # fails, too, the server drops it soon.
                with contextlib.suppress(Exception):
                    client.unlink(part)

    def _put_in_pieces(self, client: "Redis", part: str, value: memoryview, stop: Stop) -> None:
        """Write a value under a name of its own, so that no call sends more than a piece."""
        seconds = stop.seconds_left + 2 * self._settings.call_seconds
        client.set(part, b"", px=int(seconds * 1000) + 1)
        # All of the room at once, so that the server neither copies nor runs out of it later.
        client.setrange(part, len(value) - 1, bytes(value[-1:]))
        for at in range(0, len(value), _PIECE_BYTES):
            stop.check()
            # redis-py's annotation lacks what its encoder takes.
            client.setrange(part, at, cast("str", value[at : at + _PIECE_BYTES]))

    def remove(self, key: str, stop: Stop) -> None:
        """Drop a value."""
        with self._client(stop) as client:
            client.unlink(self._name(key))

    @property
    def _ttl_ms(self) -> int:
        return max(1, int(self._settings.ttl_seconds * 1000))

    def _name(self, key: str) -> str:
        return self._settings.key_prefix + key

    @contextlib.contextmanager
    def _client(self, stop: Stop) -> Iterator["Redis"]:
        """Connect for one call, and turn what goes wrong into a reason."""
        stop.check()
        connect, errors = _load(self._settings, stop)
        try:
            client = connect()
        except ValueError:
            # Its message may hold parts of the URL.
            raise PullError(Reason.NO_PATH, "redis: the url cannot be read") from None
        except errors.Base as error:
            raise _failure(error, errors, stop, lost=Reason.NO_PATH) from error
        try:
            yield client
        except errors.Base as error:
            raise _failure(error, errors, stop, lost=Reason.PEER_LOST) from error
        finally:
            client.close()
            client.connection_pool.disconnect()


@dataclass(frozen=True, slots=True)
class _Errors:
    """redis-py's errors, as far as they are told apart; each group is looked at in turn."""

    Base: type[Exception]
    groups: tuple[tuple[tuple[type[Exception], ...], Reason | None], ...]


def _load(settings: RedisSettings, stop: Stop) -> tuple[Callable[[], "Redis"], _Errors]:
    """Load redis-py; raises :class:`PullError` (``NO_PATH``) where it is not installed."""
    try:
        import redis  # noqa: PLC0415 (optional, for those who use it only)
        from redis import exceptions as e  # noqa: PLC0415 (the same)
        from redis.backoff import NoBackoff  # noqa: PLC0415 (the same)
        from redis.retry import Retry  # noqa: PLC0415 (the same)
    except ImportError as error:
        raise PullError(Reason.NO_PATH, "redis-py is missing: nearkv[store-redis]") from error
    seconds = min(settings.call_seconds, stop.seconds_left)

    def connect() -> "Redis":
        return redis.Redis.from_url(
            settings.url,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=Retry(NoBackoff(), 0),  # the engine computes sooner than a retry helps
            single_connection_client=True,  # connects at once
        )

    groups = (
        ((e.OutOfMemoryError,), Reason.STORE_FULL),
        ((e.BusyLoadingError, e.TryAgainError), Reason.BUSY),
        ((e.AuthenticationError, e.AuthorizationError, e.ResponseError), Reason.PEER_REFUSED),
        ((e.ConnectionError, e.TimeoutError, e.InvalidResponse), None),
    )
    return connect, _Errors(e.RedisError, groups)


def _failure(error: Exception, errors: _Errors, stop: Stop, *, lost: Reason) -> PullError:
    """Return what an error of redis-py means; a lost connection is ``lost``."""
    for kinds, reason in errors.groups:
        if isinstance(error, kinds):
            if reason is None:
                stop.check()  # a wait that the deadline ended is no fault of the server's
            return PullError(reason or lost, f"redis: {error}")
    return PullError(Reason.INTERNAL, f"redis: {error}")
