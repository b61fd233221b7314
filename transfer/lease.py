"""Leases: the promise that blocks stay as they are while somebody copies them (pure).

vLLM has no generation on its blocks, so a reader cannot tell whether what it copied was still
what it asked for: reads of freed blocks look like success. The fence is a table of 16-byte
slots in memory that the engine and its readers share::

    generation u32 | state u32 | expiry u64 (milliseconds of the engine's monotonic clock)

The engine opens a slot, hands out (slot, generation), and closes the slot, which also raises
the generation, *before* it may reuse the blocks. A reader checks the slot before the copy and
again after it: only when both times it was open with the right generation is the data good.
Copy and second check must happen in that order; on x86 they do.

The engine keeps the expiry itself, so that a dead agent strands nothing.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from nearkv.transfer.errors import LeaseError, Reason

SLOT_BYTES = 16
_SLOT = struct.Struct("<IIQ")
_GENERATIONS = 1 << 32


class SlotState(IntEnum):
    """Whether the blocks behind a slot may be read."""

    FREE = 0
    OPEN = 1
    CLOSED = 2


@dataclass(frozen=True, slots=True)
class Slot:
    """What a slot says."""

    generation: int
    state: int
    expiry_ms: int


class SlotTable:
    """The shared table. One writer, the engine; any number of readers."""

    def __init__(self, memory: bytearray | memoryview) -> None:
        view = memoryview(memory).cast("B")
        if not len(view) or len(view) % SLOT_BYTES:
            raise LeaseError(Reason.MALFORMED, f"a lease table is a multiple of {SLOT_BYTES} bytes")
        self._view = view

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._view) // SLOT_BYTES

    def read(self, index: int) -> Slot:
        """Return what a slot says now; raises :class:`LeaseError` when there is none."""
        return Slot(*_SLOT.unpack_from(self._view, self._offset(index)))

    def open(self, index: int, *, expiry_ms: int) -> int:
        """Open a slot for reading; returns the generation that readers must find."""
        held = self.read(index)
        if held.state == SlotState.OPEN:
            raise LeaseError(Reason.RANGE, f"slot {index} is open already")
        self._write(index, Slot(held.generation, SlotState.OPEN, expiry_ms))
        return held.generation

    def extend(self, index: int, generation: int, *, expiry_ms: int) -> None:
        """Move the expiry of an open slot; raises :class:`LeaseError` when it is not open."""
        held = self.read(index)
        if held.state != SlotState.OPEN or held.generation != generation:
            raise LeaseError(Reason.STALE, f"slot {index} is not open with {generation}")
        self._write(index, Slot(generation, SlotState.OPEN, expiry_ms))

    def close(self, index: int) -> None:
        """Close a slot: from here on, no copy that is under way can count."""
        held = self.read(index)
        generation = (held.generation + 1) % _GENERATIONS
        self._write(index, Slot(generation, SlotState.CLOSED, 0))

    def _write(self, index: int, slot: Slot) -> None:
        packed = _SLOT.pack(slot.generation, slot.state, slot.expiry_ms)
        offset = self._offset(index)
        self._view[offset : offset + SLOT_BYTES] = packed

    def _offset(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise LeaseError(Reason.RANGE, f"slot {index} is outside 0..{len(self) - 1}")
        return index * SLOT_BYTES


def check_fence(table: SlotTable, index: int, generation: int, *, now_ms: int) -> None:
    """Make sure that a slot is open with this generation; raises :class:`LeaseError`.

    Call it before a copy and again after it; the data counts only when both pass.
    """
    slot = table.read(index)
    if slot.state != SlotState.OPEN or slot.generation != generation:
        raise LeaseError(Reason.STALE, f"slot {index} changed: the blocks may be another's now")
    if now_ms >= slot.expiry_ms:
        raise LeaseError(Reason.EXPIRED, f"slot {index} expired")


@dataclass(slots=True)
class Lease:
    """A lease as the agent of the engine's node keeps it."""

    id: str
    engine: str
    epoch: str
    slot: int
    generation: int
    expires_at: float


class LeaseBook:
    """All leases of a node's engines, with their ends (pure; ``now`` in monotonic seconds).

    What ends, and why, comes back from the calls, so that the shell can tell engines to free
    blocks and count the reasons.
    """

    def __init__(self, *, ttl_seconds: float = 30.0, limit: int = 65_536) -> None:
        self._ttl_seconds = ttl_seconds
        self._limit = limit
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        """Return how many leases are open."""
        return len(self._leases)

    def open(
        self, lease_id: str, *, engine: str, epoch: str, slot: int, generation: int, now: float
    ) -> Lease:
        """Note a lease that an engine opened; raises :class:`LeaseError` for a repeated id."""
        if lease_id in self._leases:
            raise LeaseError(Reason.RANGE, f"lease {lease_id!r} is open already")
        if len(self._leases) >= self._limit:
            raise LeaseError(Reason.RANGE, f"{self._limit} leases are open already")
        lease = Lease(lease_id, engine, epoch, slot, generation, now + self._ttl_seconds)
        self._leases[lease_id] = lease
        return lease

    def use(self, lease_id: str, *, epoch: str, now: float) -> Lease:
        """Return a lease for a reader; raises :class:`LeaseError` with the reason it has none."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseError(Reason.UNKNOWN_LEASE, f"lease {lease_id!r} is not known")
        if lease.epoch != epoch:
            raise LeaseError(Reason.EPOCH, f"lease {lease_id!r} belongs to another boot")
        if now >= lease.expires_at:
            raise LeaseError(Reason.EXPIRED, f"lease {lease_id!r} expired")
        return lease

    def renew(self, lease_id: str, *, epoch: str, now: float) -> Lease:
        """Give a lease its full time again, from now."""
        lease = self.use(lease_id, epoch=epoch, now=now)
        lease.expires_at = now + self._ttl_seconds
        return lease

    def release(self, lease_id: str) -> Lease | None:
        """End a lease; returns it, or ``None`` when it had ended before (which is fine)."""
        return self._leases.pop(lease_id, None)

    def expire(self, now: float) -> list[Lease]:
        """End and return all leases whose time is up."""
        ended = [lease for lease in self._leases.values() if now >= lease.expires_at]
        for lease in ended:
            del self._leases[lease.id]
        return ended

    def drop_engine(self, engine: str) -> list[Lease]:
        """End and return all leases of an engine that is gone."""
        ended = [lease for lease in self._leases.values() if lease.engine == engine]
        for lease in ended:
            del self._leases[lease.id]
        return ended
