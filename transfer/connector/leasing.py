"""Leases of the engine's own blocks, as the scheduler's side keeps them (pure).

A finished prefill keeps its blocks for a reader by a lease; the lease ends when the reader is
done, when the agent says so, or when its time is up, whichever comes first. The slot is
closed before the request is handed back to vLLM, which only then may reuse the blocks. The
engine needs nobody for this: a dead agent strands nothing.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from nearkv.transfer.connector.tally import Tally
from nearkv.transfer.lease import SlotTable
from nearkv.transfer.manifest import Prefix
from nearkv.transfer.messages import LeaseClosed, OpenLease


@dataclass(slots=True)
class _Held:
    request_id: str
    opened: OpenLease
    expires_at_ms: int


class LeaseDesk:
    """Opens and ends leases; called by the engine's thread and by the client's.

    Leases that are only for the shared store hold at most ``store_blocks`` blocks at once.
    """

    def __init__(
        self,
        slots: SlotTable,
        *,
        ttl_ms: int,
        now_ms: Callable[[], int],
        tally: Tally,
        store_blocks: int = 0,
    ) -> None:
        self._store_blocks = store_blocks
        self._slots = slots
        self._free = list(range(len(slots)))
        self._ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._tally = tally
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._released: list[str] = []

    def __len__(self) -> int:
        """Return how many leases are open."""
        return len(self._held)

    def open(
        self,
        request_id: str,
        block_ids: Sequence[int],
        prefix: Prefix,
        *,
        for_store: bool = False,
    ) -> OpenLease | None:
        """Open a lease on blocks; ``None`` (and counted) when a bound is reached."""
        with self._lock:
            if for_store and self._kept_blocks() + len(block_ids) > self._store_blocks:
                self._tally.add("lease", "no_room_for_store")
                return None
            if not self._free:
                self._tally.add("lease", "no_slot")
                return None
            slot = self._free.pop()
            expires_at_ms = self._now_ms() + self._ttl_ms
            generation = self._slots.open(slot, expiry_ms=expires_at_ms)
            opened = OpenLease(
                lease=secrets.token_hex(16),
                slot=slot,
                generation=generation,
                expires_at_ms=expires_at_ms,
                block_ids=tuple(block_ids),
                prefix=prefix,
                for_store=for_store,
            )
            self._held[opened.lease] = _Held(request_id, opened, expires_at_ms)
        self._tally.add("lease", "opened")
        return opened

    def renew(self, lease: str, expires_at_ms: int) -> None:
        """Move a lease's expiry; one that has ended stays ended.

        Nobody can hold blocks for ever: at most one full time from now is given.
        """
        with self._lock:
            held = self._held.get(lease)
            if held is not None:
                held.expires_at_ms = min(expires_at_ms, self._now_ms() + self._ttl_ms)
                opened = msgspec.structs.replace(held.opened, expires_at_ms=held.expires_at_ms)
                held.opened = opened
                self._slots.extend(opened.slot, opened.generation, expiry_ms=held.expires_at_ms)

    def end(self, lease: str, why: str) -> LeaseClosed | None:
        """Close a lease's slot and hand its request back; ``None`` when it had ended before."""
        with self._lock:
            return self._end(lease, why)

    def end_kept(self) -> None:
        """End all leases that are only for the store: there is nobody to store them."""
        with self._lock:
            for lease in [i for i, held in self._held.items() if held.opened.for_store]:
                self._end(lease, "agent_lost")

    def _kept_blocks(self) -> int:
        held = self._held.values()
        return sum(len(one.opened.block_ids) for one in held if one.opened.for_store)

    def expire(self) -> list[LeaseClosed]:
        """End all leases whose time is up."""
        now_ms = self._now_ms()
        with self._lock:
            due = [lease for lease, held in self._held.items() if now_ms >= held.expires_at_ms]
            ended = [self._end(lease, "expired") for lease in due]
        return [closed for closed in ended if closed is not None]

    def _end(self, lease: str, why: str) -> LeaseClosed | None:
        held = self._held.pop(lease, None)
        if held is None:
            return None
        self._slots.close(held.opened.slot)
        self._free.append(held.opened.slot)
        self._released.append(held.request_id)
        self._tally.add("lease", why)
        return LeaseClosed(lease=lease, why=why)

    def take_released(self) -> list[str]:
        """Return the requests whose blocks may go since the last call."""
        with self._lock:
            released, self._released = self._released, []
        return released

    def open_leases(self) -> tuple[OpenLease, ...]:
        """Return all open leases, for an agent that has to learn them anew."""
        with self._lock:
            return tuple(held.opened for held in self._held.values())
