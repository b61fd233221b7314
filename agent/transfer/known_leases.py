"""Leases of others that engines of this node asked about (pure).

From the lookup on until the engine is done with it: where the lease is, and, once what it
holds was checked, which blocks may be pulled. What was found belongs to the lookup, not to the
lease: two requests that bring one lease may be about different tokens, and what the shared
store has in its place is then not the same for both. Bounded; what is pushed out ends by its
own time at its owner.
"""

from collections import OrderedDict
from dataclasses import dataclass

from nearkv.agent.movers.messages import StoreSubject
from nearkv.transfer.errors import PullError, Reason
from nearkv.transfer.manifest import LeaseRef
from nearkv.transfer.messages import LeaseAddress

_MAX_LOOKUPS = 16_384
_MAX_BLOCKS = 4 << 20


@dataclass(slots=True)
class KnownLease:
    """A lease as one lookup found it; ``ref`` is there once it may be used.

    Where the shared store has its blocks instead, ``stored`` says what they are.
    """

    address: LeaseAddress
    block_ids: tuple[int, ...] = ()
    ref: LeaseRef | None = None
    may_release: bool = True
    stored: StoreSubject | None = None


class KnownLeases:
    """All of them, by the engine that asked and the lookup's id."""

    def __init__(self, *, max_lookups: int = _MAX_LOOKUPS, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_lookups = max_lookups
        self._max_blocks = max_blocks
        self._known: OrderedDict[tuple[str, int], KnownLease] = OrderedDict()
        self._lookups: dict[tuple[str, str], set[int]] = {}
        self._blocks = 0

    def __len__(self) -> int:
        """Return how many lookups are known."""
        return len(self._known)

    def asked(self, engine: str, lookup: int, address: LeaseAddress) -> None:
        """Note that an engine asks about a lease."""
        self._drop(engine, lookup)
        self._known[engine, lookup] = KnownLease(address)
        self._lookups.setdefault((engine, address.lease), set()).add(lookup)
        self._shrink()

    def verified(self, engine: str, lookup: int, block_ids: tuple[int, ...], ref: LeaseRef) -> None:
        """Note which blocks of a lease an engine may use, unless it needs it no more."""
        known = self._known.get((engine, lookup))
        if known is not None:
            self._set_blocks(known, block_ids)
            known.ref = ref
            self._shrink()

    def found_in_store(self, engine: str, lookup: int, blocks: int, subject: StoreSubject) -> None:
        """Note that the shared store has so many leading blocks, in place of a lease."""
        known = self._known.get((engine, lookup))
        if known is not None:
            self._set_blocks(known, tuple(range(blocks)))
            known.stored = subject
            self._shrink()

    def not_ours(self, engine: str, lookup: int) -> None:
        """Note that an engine must not use a lease, nor end it."""
        known = self._known.get((engine, lookup))
        if known is not None:
            known.may_release = False

    def get(self, engine: str, lookup: int, address: LeaseAddress) -> KnownLease:
        """Return a lease that may be pulled from; raises :class:`PullError`.

        A connector that does not say which lookup it means (0) gets what the only one about
        the lease has found.
        """
        lookups = self._lookups.get((engine, address.lease), set())
        if not lookup and len(lookups) == 1:
            (lookup,) = lookups
        known = self._known.get((engine, lookup))
        is_usable = known is not None and (known.ref is not None or known.stored is not None)
        if known is None or not is_usable or known.address != address:
            raise PullError(
                Reason.UNKNOWN_LEASE, f"lease {address.lease!r} was not looked up, or did not fit"
            )
        return known

    def take(self, engine: str, lease: str) -> KnownLease | None:
        """Forget a lease; returns what was known of it.

        It may be released only if none of the lookups found it to be another tenant's.
        """
        lookups = self._lookups.get((engine, lease), set())
        dropped = [self._drop(engine, lookup) for lookup in sorted(lookups)]
        found = [known for known in dropped if known is not None]
        if not found:
            return None
        found[-1].may_release = all(known.may_release for known in found)
        return found[-1]

    def drop_engine(self, engine: str) -> list[KnownLease]:
        """Forget all that an engine asked about; returns each lease once."""
        leases = [lease for owner, lease in self._lookups if owner == engine]
        dropped = [self.take(engine, lease) for lease in leases]
        return [known for known in dropped if known is not None]

    def _set_blocks(self, known: KnownLease, block_ids: tuple[int, ...]) -> None:
        self._blocks += len(block_ids) - len(known.block_ids)
        known.block_ids = block_ids

    def _drop(self, engine: str, lookup: int) -> KnownLease | None:
        known = self._known.pop((engine, lookup), None)
        if known is None:
            return None
        self._blocks -= len(known.block_ids)
        lease = (engine, known.address.lease)
        self._lookups[lease].discard(lookup)
        if not self._lookups[lease]:
            del self._lookups[lease]
        return known

    def _shrink(self) -> None:
        while len(self._known) > self._max_lookups or (
            self._blocks > self._max_blocks and len(self._known) > 1
        ):
            self._drop(*next(iter(self._known)))
