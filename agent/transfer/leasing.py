"""The leases of one engine, from its scheduler's word to their end (pure).

A lease is *open*, then *closing* from when the engine was told to close it until it says that
it has, then ended. Ended ones are remembered for a while: a reader that comes late learns
why, and a release that overtook its lease still counts. ``now`` is in monotonic seconds.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from nearkv.transfer.errors import LeaseError, Reason
from nearkv.transfer.lease import Lease, LeaseBook
from nearkv.transfer.manifest import Prefix
from nearkv.transfer.messages import OpenLease

EXPIRED = "expired"
UNACKNOWLEDGED = "unacknowledged"
ENGINE_GONE = "engine_gone"
REFUSED = "refused"
OTHER = "other"
WHYS = (
    "pulled",
    "stored",
    "unused",
    "aborted",
    "cancelled",
    "reader_gone",
    EXPIRED,
    REFUSED,
    ENGINE_GONE,
    UNACKNOWLEDGED,
    "unknown",
    "agent_lost",
    OTHER,
)
"""Why leases end: a metric label, so words of others are mapped to ``other``."""

_LEAST_TTL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLimits:
    """Bounds of one engine's leases."""

    ttl_seconds: float = 30.0
    close_seconds: float = 5.0
    max_open: int = 16_384
    max_bytes: int = 256 << 20
    max_remembered: int = 4096


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease with what it is about; ``ttl_seconds`` is what a renewal gives."""

    lease: Lease
    block_ids: tuple[int, ...]
    prefix: Prefix
    ttl_seconds: float

    @property
    def size_bytes(self) -> int:
        """Memory that it takes here, about."""
        return len(self.prefix.token_ids) + len(self.prefix.block_keys) + 40 * len(self.block_ids)


def known_why(why: str) -> str:
    """Return a word that may be a metric label."""
    return why if why in WHYS else OTHER


class EngineLeases:
    """All leases of one boot of one engine."""

    def __init__(self, engine: str, epoch: str, *, slots: int, limits: LeaseLimits) -> None:
        self._engine = engine
        self._epoch = epoch
        self._slots = slots
        self._limits = limits
        self._book = LeaseBook(ttl_seconds=limits.ttl_seconds, limit=limits.max_open)
        self._held: dict[str, HeldLease] = {}
        self._bytes = 0
        self._closing: dict[str, tuple[str, float]] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        """Return how many leases are open."""
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of open leases."""
        return iter(list(self._held))

    @property
    def closing(self) -> int:
        """How many leases the engine was told to close and has not closed yet."""
        return len(self._closing)

    def open(self, message: OpenLease, *, now: float) -> None:
        """Note a lease that the engine opened.

        Raises :class:`LeaseError` when it cannot be kept, or was released before it came: the
        engine must be told to close it.
        """
        if message.lease in self._ended or message.lease in self._closing:
            raise LeaseError(Reason.UNKNOWN_LEASE, "it was released before it was opened")
        if not 0 <= message.slot < self._slots:
            raise LeaseError(Reason.RANGE, f"slot {message.slot} is outside 0..{self._slots - 1}")
        left = message.expires_at_ms / 1000 - now
        ttl_seconds = max(_LEAST_TTL_SECONDS, min(self._limits.ttl_seconds, left))
        lease = self._book.open(
            message.lease,
            engine=self._engine,
            epoch=self._epoch,
            slot=message.slot,
            generation=message.generation,
            now=now,
        )
        lease.expires_at = now + min(ttl_seconds, left)
        held = HeldLease(lease, message.block_ids, message.prefix, ttl_seconds)
        if self._bytes + held.size_bytes > self._limits.max_bytes:
            self._book.release(message.lease)
            raise LeaseError(Reason.TOO_LARGE, f"leases hold {self._bytes} bytes already")
        self._held[message.lease] = held
        self._bytes += held.size_bytes

    def use(self, lease_id: str, *, now: float) -> HeldLease:
        """Return an open lease; raises :class:`LeaseError` with the reason there is none."""
        why = self._ended.get(lease_id) or self._closing.get(lease_id, ("",))[0]
        if why == EXPIRED:
            raise LeaseError(Reason.EXPIRED, f"lease {lease_id!r} expired")
        if why:
            raise LeaseError(Reason.UNKNOWN_LEASE, f"lease {lease_id!r} ended: {why}")
        self._book.use(lease_id, epoch=self._epoch, now=now)
        return self._held[lease_id]

    def may_come(self, lease_id: str) -> bool:
        """Tell whether a lease that is not known may yet be opened."""
        return not (lease_id in self._held or lease_id in self._ended or lease_id in self._closing)

    def renew(self, lease_id: str, *, now: float) -> HeldLease:
        """Give a lease its time again, from now; raises :class:`LeaseError`."""
        held = self.use(lease_id, now=now)
        held.lease.expires_at = now + held.ttl_seconds
        return held

    def end(self, lease_id: str, why: str, *, now: float) -> bool:
        """Begin to end a lease; True when the engine must be told to close it.

        One that is not known is remembered as ended, in case its opening is still under way.
        """
        if self._book.release(lease_id) is not None:
            self._forget(lease_id)
            self._closing[lease_id] = (why, now + self._limits.close_seconds)
            return True
        if lease_id not in self._closing:
            self._remember(lease_id, why)
        return False

    def closed(self, lease_id: str, why: str) -> str | None:
        """Take the engine's word that a lease is closed; returns why it ended, if that is news."""
        told = self._closing.pop(lease_id, None)
        if told is not None:
            why = told[0]
        elif self._book.release(lease_id) is not None:
            self._forget(lease_id)
        else:
            return None
        self._remember(lease_id, why)
        return why

    def expire(self, now: float) -> list[str]:
        """Begin to end all leases whose time is up; the engine must be told to close them."""
        due = [lease.id for lease in self._book.expire(now)]
        for lease_id in due:
            self._forget(lease_id)
            self._closing[lease_id] = (EXPIRED, now + self._limits.close_seconds)
        return due

    def overdue(self, now: float) -> list[str]:
        """Give up on leases that the engine does not close; it does so in its own time."""
        due = [lease for lease, (_, until) in self._closing.items() if now >= until]
        for lease_id in due:
            self._remember(lease_id, self._closing.pop(lease_id)[0])
        return due

    def _forget(self, lease_id: str) -> None:
        self._bytes -= self._held.pop(lease_id).size_bytes

    def _remember(self, lease_id: str, why: str) -> None:
        self._ended[lease_id] = why
        self._ended.move_to_end(lease_id)
        while len(self._ended) > self._limits.max_remembered:
            self._ended.popitem(last=False)
