"""What a lease holds for an engine of this node: asked of whoever has it, then checked here.

The owner's word is not taken for anything that matters: the packet says what the KV is and
what it was computed from, and this node compares that with its own engine and request.
"""

import asyncio
import time

import structlog

from nearkv.agent.transfer.fitting import fitting_blocks
from nearkv.agent.transfer.known_leases import KnownLease, KnownLeases
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.peer_client import PeerClient
from nearkv.agent.transfer.peer_messages import LeaseName, PeerLookup, PeerRelease
from nearkv.agent.transfer.registry import Registration
from nearkv.agent.transfer.sourcing import SourceDesk
from nearkv.agent.transfer.storing import StoreDesk
from nearkv.transfer.errors import PacketError, PullError, Reason, TransferError
from nearkv.transfer.manifest import LeaseRef, Manifest
from nearkv.transfer.messages import LeaseAddress, Lookup, LookupDone
from nearkv.transfer.packet import decode_head

_DEFAULT_SECONDS = 2.0
_LONGEST_SECONDS = 60.0
_MARGIN_SECONDS = 0.02
_MAX_ERRANDS = 1024
_MAYBE_STORED = frozenset(
    {
        *(Reason.EPOCH, Reason.EXPIRED, Reason.UNKNOWN_LEASE, Reason.NO_SOURCE, Reason.STALE),
        *(Reason.NO_PATH, Reason.PEER_LOST, Reason.PEER_REFUSED, Reason.DEADLINE, Reason.BUSY),
    }
)
"""Why a lease cannot be had though its blocks may have been stored: it, or its agent, is gone."""

log = structlog.get_logger(__name__)


def name_of(address: LeaseAddress) -> LeaseName:
    """Return which lease an address names, without where it is."""
    return LeaseName(engine=address.engine, epoch=address.epoch, lease=address.lease)


def seconds_until(deadline_ms: int) -> float:
    """Return the seconds until a deadline on CLOCK_MONOTONIC; 0 when it has passed."""
    return max(0.0, deadline_ms / 1000 - time.monotonic())


class LookupDesk:
    """Answers lookups of this node's engines, and remembers what they may pull."""

    def __init__(  # noqa: PLR0913 (those it talks to; three are keyword-only)
        self,
        source: SourceDesk,
        peers: PeerClient,
        known: KnownLeases,
        metrics: TransferMetrics,
        *,
        node: str,
        key: bytes | None,
        store: StoreDesk | None = None,
    ) -> None:
        self._store = store
        self._source = source
        self._peers = peers
        self._known = known
        self._metrics = metrics
        self._node = node
        self._key = key
        self._errands: set[asyncio.Task[None]] = set()
        self._is_ending = False

    def asked(self, engine: str, message: Lookup) -> None:
        """Note that an engine needs a lease from now on, before anybody looks it up.

        At once, since its next message may say that it needs the lease no more: engines do not
        wait for an agent that was late.
        """
        self._known.asked(engine, message.id, message.address)

    async def lookup(self, reader: Registration, message: Lookup) -> LookupDone:
        """Answer a lookup, :meth:`asked` before, by its deadline; raises nothing."""
        seconds = _DEFAULT_SECONDS
        if message.deadline_ms:
            seconds = min(_LONGEST_SECONDS, seconds_until(message.deadline_ms) - _MARGIN_SECONDS)
        give_up_at = time.monotonic() + seconds
        if message.address.is_store:
            return await self._from_store(reader, message, seconds)
        answer = await self._from_lease(reader, message, self._share_of_lease(seconds))
        if self._store is None or answer.reason not in _MAYBE_STORED:
            return answer
        stored = await self._from_store(reader, message, give_up_at - time.monotonic())
        return stored if stored.num_tokens else answer

    def _share_of_lease(self, seconds: float) -> float:
        """Return how long a lease's owner is waited for: the store must get its turn."""
        if self._store is None:
            return seconds
        return max(seconds / 2, seconds - self._store.lookup_seconds)

    async def _from_lease(
        self, reader: Registration, message: Lookup, seconds: float
    ) -> LookupDone:
        try:
            async with asyncio.timeout(seconds):
                num_tokens = await self._find(reader, message, seconds)
        except TimeoutError:
            return self._nothing(reader, message, Reason.DEADLINE, "no answer in time")
        except TransferError as error:
            return self._nothing(reader, message, error.reason, str(error))
        self._metrics.lookup_ended()
        return LookupDone(id=message.id, num_tokens=num_tokens)

    async def _from_store(
        self, reader: Registration, message: Lookup, seconds: float
    ) -> LookupDone:
        """Answer what the shared store has; what comes of it is counted there."""
        try:
            if self._store is None:
                raise PullError(Reason.NOT_STORED, "there is no store")
            if not reader.is_complete:
                raise PullError(Reason.MEMORY, "not all workers of this engine have registered")
            # Bounded by itself: cut off from here, a store that hangs would not be found out.
            blocks, subject = await self._store.find(reader, message, seconds=seconds)
        except TransferError as error:
            text = str(error)
            return LookupDone(id=message.id, num_tokens=0, reason=error.reason, message=text)
        self._known.found_in_store(reader.engine, message.id, blocks, subject)
        num_tokens = blocks * reader.compatibility.layout.block_size
        return LookupDone(id=message.id, num_tokens=num_tokens)

    def forget(self, engine: str, lease: str, why: str) -> None:
        """Take an engine's word that it needs a lease no more, and pass it on."""
        known = self._known.take(engine, lease)
        if known is not None:
            self._let_go(known, why)

    def forget_engine(self, engine: str) -> None:
        """Let all leases go that an engine asked about: it is gone."""
        for known in self._known.drop_engine(engine):
            self._let_go(known, "reader_gone")

    def leave_leases_be(self) -> None:
        """Let no more leases go: it is this agent that ends, and their readers live on."""
        self._is_ending = True

    async def close(self) -> None:
        """Wait for what was begun; each of it has its deadline."""
        await asyncio.gather(*self._errands, return_exceptions=True)

    def _let_go(self, known: KnownLease, why: str) -> None:
        """Tell a lease's owner in the background, or not at all: it ends by itself, too."""
        if not known.may_release or self._is_ending or known.address.is_store:
            return
        if self._is_here(known.address):
            self._source.release(name_of(known.address), why)
        elif len(self._errands) < _MAX_ERRANDS:
            name = name_of(known.address)
            release = PeerRelease(engine=name.engine, epoch=name.epoch, lease=name.lease, why=why)
            task = asyncio.create_task(self._peers.release(known.address.agent, release))
            self._errands.add(task)
            task.add_done_callback(self._errands.discard)

    async def _find(self, reader: Registration, message: Lookup, seconds: float) -> int:
        if not reader.is_complete:
            raise PullError(Reason.MEMORY, "not all workers of this engine have registered")
        manifest = await self._manifest(message.address, reader.tenant, seconds)
        ref = _check_identity(manifest, message.address)
        compatibility = reader.compatibility
        blocks = fitting_blocks(
            manifest,
            compatibility,
            message.token_ids,
            cache_salt=message.cache_salt,
            lora=message.lora,
        )
        self._known.verified(reader.engine, message.id, manifest.block_ids[:blocks], ref)
        return blocks * compatibility.layout.block_size

    async def _manifest(self, address: LeaseAddress, tenant: str, seconds: float) -> Manifest:
        name = name_of(address)
        if self._is_here(address):
            return await self._source.manifest(name, tenant=tenant, seconds=seconds)
        request = PeerLookup(
            engine=name.engine,
            epoch=name.epoch,
            lease=name.lease,
            node=self._node,
            tenant=tenant,
            wait_ms=int(seconds * 1000),
        )
        packet = await self._peers.lookup(address.agent, request, seconds=seconds)
        return decode_head(packet, key=self._key).manifest

    def _is_here(self, address: LeaseAddress) -> bool:
        return address.node == self._node

    def _nothing(
        self, reader: Registration, message: Lookup, reason: Reason, text: str
    ) -> LookupDone:
        if reason is Reason.TENANT:
            self._known.not_ours(reader.engine, message.id)
        self._metrics.lookup_ended(reason)
        log.info("lookup_found_nothing", engine=reader.engine, reason=reason, error=text)
        return LookupDone(id=message.id, num_tokens=0, reason=reason, message=text)


def _check_identity(manifest: Manifest, address: LeaseAddress) -> LeaseRef:
    """Make sure that a packet is about the lease asked for."""
    source, ref = manifest.source, manifest.lease
    if ref is None or ref.id != address.lease or source.engine != address.engine:
        raise PacketError(Reason.MALFORMED, "lease: the packet is about another one")
    if source.epoch != address.epoch:
        raise PacketError(Reason.EPOCH, "epoch: the packet is of another boot of the engine")
    return ref
