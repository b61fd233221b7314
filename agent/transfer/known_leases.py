"""Leases of others that engines of this node asked about (pure).

From the lookup on until the engine is done with it: where the lease is, and, once what it
holds was checked, which blocks may be pulled. Bounded; what is pushed out ends by its own
time at its owner.
"""

from collections import OrderedDict
from dataclasses import dataclass

from nearkv.agent.movers.messages import StoreSubject
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.manifest import LeaseRef
from nearkv.transfer.messages import LeaseAddress

_MAX_LEASES = 16_384
_MAX_BLOCKS = 4 << 20


@dataclass(slots=True)
class KnownLease:
    """A lease that was asked about; ``ref`` is there once it may be used.

    Where the shared store has its blocks instead, ``stored`` says what they are.
    """

    address: LeaseAddress
    block_ids: tuple[int, ...] = ()
    ref: LeaseRef | None = None
    may_release: bool = True
    stored: StoreSubject | None = None


class KnownLeases:
    """All of them, by the engine that asked and the lease's id."""

    def __init__(self, *, max_leases: int = _MAX_LEASES, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_leases = max_leases
        self._max_blocks = max_blocks
        self._known: OrderedDict[tuple[str, str], KnownLease] = OrderedDict()
        self._blocks = 0

    def __len__(self) -> int:
        """Return how many leases are known."""
        return len(self._known)

    def asked(self, engine: str, address: LeaseAddress) -> None:
        """Note that an engine asks about a lease; what was known of it is forgotten."""
        self.take(engine, address.lease)
        self._known[engine, address.lease] = KnownLease(address)
        self._shrink()

    def verified(
        self, engine: str, address: LeaseAddress, block_ids: tuple[int, ...], ref: LeaseRef
    ) -> None:
        """Note which blocks of a lease an engine may use, unless it needs it no more."""
        known = self._known.get((engine, address.lease))
        if known is None or known.address != address:
            return
        self._blocks += len(block_ids) - len(known.block_ids)
        known.block_ids = block_ids
        known.ref = ref
        self._shrink()

    def found_in_store(
        self, engine: str, address: LeaseAddress, blocks: int, subject: StoreSubject
    ) -> None:
        """Note that the shared store has so many leading blocks, in place of a lease."""
        known = self._known.get((engine, address.lease))
        if known is None or known.address != address:
            return
        self._blocks += blocks - len(known.block_ids)
        known.block_ids = tuple(range(blocks))
        known.stored = subject
        self._shrink()

    def not_ours(self, engine: str, lease: str) -> None:
        """Note that an engine must not use a lease, nor end it."""
        known = self._known.get((engine, lease))
        if known is not None:
            known.may_release = False

    def get(self, engine: str, address: LeaseAddress) -> KnownLease:
        """Return a lease that may be pulled from; raises :class:`PullError`."""
        known = self._known.get((engine, address.lease))
        is_usable = known is not None and (known.ref is not None or known.stored is not None)
        if known is None or not is_usable or known.address != address:
            raise PullError(
                Reason.UNKNOWN_LEASE, f"lease {address.lease!r} was not looked up, or did not fit"
            )
        return known

    def take(self, engine: str, lease: str) -> KnownLease | None:
        """Forget a lease; returns what was known of it."""
        known = self._known.pop((engine, lease), None)
        if known is not None:
            self._blocks -= len(known.block_ids)
        return known

    def drop_engine(self, engine: str) -> list[KnownLease]:
        """Forget all that an engine asked about; returns it."""
        keys = [key for key in self._known if key[0] == engine]
        dropped = [self.take(*key) for key in keys]
        return [known for known in dropped if known is not None]

    def _shrink(self) -> None:
        while len(self._known) > self._max_leases or (
            self._blocks > self._max_blocks and len(self._known) > 1
        ):
            _, known = self._known.popitem(last=False)
            self._blocks -= len(known.block_ids)
