"""What this node's engines hold for readers: leases, what they are about, grants on them."""

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from nearkv.agent.movers.jobs import EngineMemory
from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.transfer.backend_choice import BackendProbes, usable_backends
from nearkv.agent.transfer.leasing import (
    ENGINE_GONE,
    EXPIRED,
    REFUSED,
    UNACKNOWLEDGED,
    EngineLeases,
    HeldLease,
    known_why,
)
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.peer_messages import LeaseName, OpenAnswer, PeerOpen
from nearkv.agent.transfer.registry import Registration, Registry
from nearkv.transfer.backends.contract import Fence, Grant, monotonic_ms
from nearkv.transfer.errors import LeaseError, PullError, Reason, TransferError
from nearkv.transfer.layout import KvMemory
from nearkv.transfer.manifest import LeaseRef, Manifest, Source
from nearkv.transfer.messages import MemoryMap, OpenLease, ReleaseLease, RenewLease

_TICKET_BYTES = 32
_GRANT_SLACK_MS = 500
_LONGEST_GRANT_MS = 600_000
_MAX_GRANTS = 4096
_RENEWALS_PER_TTL = 3

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRules:
    """Who may read, over what, and how long a lease may be on its way."""

    node: str
    backends: tuple[str, ...]
    require_rdma: bool = False
    allow_cross_tenant: bool = False
    lease_wait_seconds: float = 1.0


class Keeper(Protocol):
    """Who needs the blocks of leases, too, beside their readers."""

    def lease_opened(self, registration: Registration, message: OpenLease) -> None:
        """Take note of a new lease."""
        ...

    def keeps(self, name: LeaseName, why: str) -> bool:
        """Tell whether a lease is needed for a while yet; then the keeper releases it."""
        ...


@dataclass(frozen=True, slots=True)
class _Admission:
    """A reader of another node that may read, until ``expires_at_ms`` at most."""

    source_key: str
    name: LeaseName
    expires_at_ms: int


def seconds_between_renewals(held: HeldLease) -> float:
    """Return how often a reader renews."""
    return held.ttl_seconds / _RENEWALS_PER_TTL


class SourceDesk:
    """Answers readers, of this node and of others, about the leases of this node's engines."""

    def __init__(
        self,
        registry: Registry,
        pool: MoverPool,
        probes: BackendProbes,
        rules: SourceRules,
        metrics: TransferMetrics,
        keeper: Keeper | None = None,
    ) -> None:
        self._registry = registry
        self._keeper = keeper
        self._pool = pool
        self._probes = probes
        self._rules = rules
        self._metrics = metrics
        self._grants: dict[bytes, _Admission] = {}
        self._awaited: dict[tuple[str, str, str], set[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def grants(self) -> int:
        """How many readers of other nodes are admitted."""
        return len(self._grants)

    # -- From the engine -----------------------------------------------------------------

    def lease_opened(self, registration: Registration, message: OpenLease) -> None:
        """Take a new lease; one that cannot be kept is given back to the engine at once."""
        scheduler = registration.scheduler
        if scheduler is None:
            return
        try:
            scheduler.leases.open(message, now=time.monotonic())
        except LeaseError as error:
            log.info("lease_refused", engine=registration.engine, error=str(error))
            self._metrics.lease_ended(REFUSED)
            scheduler.owner.send(ReleaseLease(lease=message.lease, why=error.reason))
            return
        key = (registration.engine, registration.epoch, message.lease)
        for waiter in self._awaited.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)
        if self._keeper is not None:
            self._keeper.lease_opened(registration, message)

    def lease_closed(self, registration: Registration, lease: str, why: str) -> bool:
        """Take the engine's word that it closed a lease of its own; False for others'."""
        scheduler = registration.scheduler
        ended = None if scheduler is None else scheduler.leases.closed(lease, known_why(why))
        if ended is None:
            return False
        self._metrics.lease_ended(ended)
        self._end_grants(_name(registration, lease))
        return True

    def leases_lost(self, registration: Registration, leases: EngineLeases) -> None:
        """Note that an engine's scheduler is gone, and its leases with it."""
        count = len(leases) + leases.closing
        if count:
            self._metrics.lease_ended(ENGINE_GONE, count)
        for lease in leases:
            self._end_grants(_name(registration, lease))

    # -- From readers --------------------------------------------------------------------

    async def manifest(self, name: LeaseName, *, tenant: str, seconds: float) -> Manifest:
        """Return what a lease holds; raises :class:`TransferError`.

        A lease that is not there may be on its way: P's answer can be faster than its word
        to the agent.
        """
        registration, held = await self._find(name, tenant=tenant, seconds=seconds)
        lease = held.lease
        left_ms = int((lease.expires_at - time.monotonic()) * 1000)
        return Manifest(
            compatibility=registration.compatibility,
            source=Source(
                engine=registration.engine, epoch=registration.epoch, node=self._rules.node
            ),
            prefix=held.prefix,
            block_ids=held.block_ids,
            lease=LeaseRef(
                id=lease.id, slot=lease.slot, generation=lease.generation, ttl_ms=left_ms
            ),
        )

    def renew(self, name: LeaseName) -> tuple[Registration, HeldLease]:
        """Give a lease its time again; raises :class:`TransferError`."""
        registration = self._registry.find(name.engine, name.epoch)
        scheduler = registration.scheduler
        if scheduler is None:  # for the type checker: a complete engine has one
            raise PullError(Reason.NO_SOURCE, "the engine has no scheduler")
        held = scheduler.leases.renew(name.lease, now=time.monotonic())
        expires_at_ms = int(held.lease.expires_at * 1000)
        scheduler.owner.send(RenewLease(lease=name.lease, expires_at_ms=expires_at_ms))
        return registration, held

    def release(self, name: LeaseName, why: str) -> bool:
        """End a lease that nobody needs any more; True when it was open. May be repeated."""
        registration = self._registry.engines.get(name.engine)
        scheduler = None if registration is None else registration.scheduler
        if registration is None or scheduler is None or registration.epoch != name.epoch:
            return False
        why = known_why(why)
        if self._keeper is not None and self._keeper.keeps(name, why):
            return True
        was_open = scheduler.leases.end(name.lease, why, now=time.monotonic())
        if was_open:
            scheduler.owner.send(ReleaseLease(lease=name.lease, why=why))
            self._end_grants(_name(registration, name.lease))
        return was_open

    async def open(self, request: PeerOpen) -> OpenAnswer:
        """Let a reader of another node at a lease's blocks; raises :class:`TransferError`."""
        choices = usable_backends(
            [name for name in request.backends if name in self._rules.backends],
            await self._probes.get(),
            require_rdma=request.require_rdma or self._rules.require_rdma,
        )
        self._check_tenant(self._registry.find(request.engine, request.epoch), request.tenant)
        name = LeaseName(engine=request.engine, epoch=request.epoch, lease=request.lease)
        registration, held = self.renew(name)
        memory = registration.memories.get(request.tp_rank)
        if memory is None:
            raise PullError(Reason.TOPOLOGY, f"tp_rank: there is no rank {request.tp_rank}")
        grant = self._new_grant(request, held)
        self._grants[grant.ticket] = _Admission(memory.key, name, grant.expires_at_ms)
        started = self._pool.counts.started.total()
        try:
            backend, offer = await self._serve(registration, memory, choices, grant)
        except BaseException:
            self._grants.pop(grant.ticket, None)
            raise
        if grant.ticket not in self._grants:
            # Ended while the mover was asked, which then had nothing to withdraw.
            self._later(self._pool.withdraw(memory.key, grant.ticket))
            raise PullError(Reason.EXPIRED, f"lease {request.lease!r} ended meanwhile")
        return OpenAnswer(
            backend=backend,
            offer=offer,
            ticket=grant.ticket,
            layout=_map_of(memory.layout),
            renew_seconds=seconds_between_renewals(held),
            is_cold=self._pool.counts.started.total() != started,
        )

    def withdraw(self, ticket: bytes) -> None:
        """End a reader's admission; unknown ones are passed over."""
        admission = self._grants.pop(ticket, None)
        if admission is not None:
            self._later(self._pool.withdraw(admission.source_key, ticket))

    # -- Time ----------------------------------------------------------------------------

    def tick(self) -> None:
        """End what has reached its end."""
        now = time.monotonic()
        for registration in self._registry.engines.values():
            scheduler = registration.scheduler
            if scheduler is None:
                continue
            for lease in scheduler.leases.expire(now):
                log.info("lease_expired", engine=registration.engine, lease=lease)
                scheduler.owner.send(ReleaseLease(lease=lease, why=EXPIRED))
                self._end_grants(_name(registration, lease))
            for lease in scheduler.leases.overdue(now):
                log.warning("lease_not_closed", engine=registration.engine, lease=lease)
                self._metrics.lease_ended(UNACKNOWLEDGED)
        now_ms = monotonic_ms()
        for ticket in [t for t, a in self._grants.items() if now_ms >= a.expires_at_ms]:
            self.withdraw(ticket)

    async def close(self) -> None:
        """Wait for what was begun; each of it has its own bound."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- Inside --------------------------------------------------------------------------

    async def _find(
        self, name: LeaseName, *, tenant: str, seconds: float
    ) -> tuple[Registration, HeldLease]:
        """Return a lease, waiting for it where it may be on its way."""
        give_up_at = time.monotonic() + min(seconds, self._rules.lease_wait_seconds)
        while True:
            registration = self._registry.find(name.engine, name.epoch)
            self._check_tenant(registration, tenant)
            scheduler = registration.scheduler
            left = give_up_at - time.monotonic()
            if scheduler is None or not scheduler.leases.may_come(name.lease) or left <= 0:
                break
            await self._wait_for(name, left)
        if scheduler is None:  # for the type checker: a complete engine has one
            raise PullError(Reason.NO_SOURCE, "the engine has no scheduler")
        return registration, scheduler.leases.use(name.lease, now=time.monotonic())

    async def _wait_for(self, name: LeaseName, seconds: float) -> None:
        key = (name.engine, name.epoch, name.lease)
        waiter = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(key, set()).add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return
        finally:
            waiters = self._awaited.get(key)
            if waiters is not None:
                waiters.discard(waiter)
                if not waiters:
                    del self._awaited[key]

    def _check_tenant(self, registration: Registration, tenant: str) -> None:
        if tenant != registration.tenant and not self._rules.allow_cross_tenant:
            raise TransferError(Reason.TENANT, "tenant: the engine belongs to another one")

    def _new_grant(self, request: PeerOpen, held: HeldLease) -> Grant:
        if not 0 < request.blocks <= len(held.block_ids):
            raise PullError(Reason.RANGE, f"blocks: the lease has {len(held.block_ids)}")
        if len(self._grants) >= _MAX_GRANTS:
            raise PullError(Reason.BUSY, f"{_MAX_GRANTS} readers are admitted already")
        wait_ms = max(0, min(request.wait_ms, _LONGEST_GRANT_MS)) + _GRANT_SLACK_MS
        return Grant(
            ticket=secrets.token_bytes(_TICKET_BYTES),
            block_ids=held.block_ids[: request.blocks],
            fence=Fence(held.lease.slot, held.lease.generation),
            expires_at_ms=monotonic_ms() + wait_ms,
        )

    async def _serve(
        self,
        registration: Registration,
        memory: EngineMemory,
        backends: Sequence[str],
        grant: Grant,
    ) -> tuple[str, bytes]:
        """Serve by the first transport that can; raises :class:`TransferError`."""
        refusals = []
        for backend in backends:
            # The engine may have gone during a try, and its descriptor be another's by now.
            if memory not in registration.memories.values():
                raise PullError(Reason.NO_SOURCE, f"engine {registration.engine!r} is gone")
            try:
                return backend, await self._pool.offer(memory, backend, grant)
            except TransferError as error:
                if error.reason is not Reason.NO_PATH:
                    raise
                refusals.append(f"{backend}: {error}")
        raise PullError(Reason.NO_PATH, "; ".join(refusals))

    def _end_grants(self, name: LeaseName) -> None:
        for ticket in [t for t, admission in self._grants.items() if admission.name == name]:
            self.withdraw(ticket)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _name(registration: Registration, lease: str) -> LeaseName:
    return LeaseName(engine=registration.engine, epoch=registration.epoch, lease=lease)


def _map_of(layout: KvMemory) -> MemoryMap:
    return MemoryMap(**{name: getattr(layout, name) for name in MemoryMap.__struct_fields__})
