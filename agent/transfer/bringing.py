"""Getting the blocks of one pull here: the source's leave, a transport, one retry."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog

from nearkv.agent.movers.backends import STORE
from nearkv.agent.movers.jobs import PullJob
from nearkv.agent.movers.pool import MoverPool
from nearkv.agent.transfer.backend_choice import BackendProbes, retry_backends, usable_backends
from nearkv.agent.transfer.lookups import name_of, seconds_until
from nearkv.agent.transfer.memory_forms import SHM, path_within_node, paths_beyond_node
from nearkv.agent.transfer.metrics import RETRIED, TransferMetrics
from nearkv.agent.transfer.peer_client import PeerClient
from nearkv.agent.transfer.peer_messages import OpenAnswer, PeerOpen, PeerRenew, PeerWithdraw
from nearkv.agent.transfer.pull_orders import PullOrder
from nearkv.agent.transfer.sourcing import SourceDesk, SourceRules, seconds_between_renewals
from nearkv.agent.transfer.storing import StoreDesk
from nearkv.transfer.backends.contract import Path, PullReport
from nearkv.transfer.errors import PullError, Reason, TransferError
from nearkv.transfer.layout import KvMemory

_RENEWAL_SECONDS = 2.0
_LEAST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 60.0

log = structlog.get_logger(__name__)


class Bringer:
    """Brings the blocks of pull orders."""

    def __init__(  # noqa: PLR0913 (those it talks to; the last is keyword-only)
        self,
        pool: MoverPool,
        source: SourceDesk,
        peers: PeerClient,
        probes: BackendProbes,
        rules: SourceRules,
        metrics: TransferMetrics,
        *,
        store: StoreDesk | None = None,
    ) -> None:
        self._pool = pool
        self._store = store
        self._source = source
        self._peers = peers
        self._probes = probes
        self._rules = rules
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def is_here(self, node: str) -> bool:
        """Tell whether a node is this one."""
        return node == self._rules.node

    def expected_path(self, node: str) -> Path:
        """Return the path that a pull from a node will likely take."""
        if self.is_here(node):
            return Path(name=SHM)
        found = self._probes.found
        for name in self._rules.backends:
            if name in found and found[name].usable:
                return Path(name=name, rdma=found[name].rdma)
        return Path(name=self._rules.backends[-1] if self._rules.backends else "none")

    async def bring(self, order: PullOrder) -> PullReport:
        """Bring the blocks; raises :class:`TransferError` with the reason when it cannot."""
        if order.from_store:
            return await self._from_store(order)
        if self.is_here(order.source_node):
            return await self._from_here(order)
        async with _until(order.deadline_ms):
            probes = await self._probes.get()
        able = paths_beyond_node(order.target.form, self._rules.backends)
        tried = usable_backends(able, probes, require_rdma=self._rules.require_rdma)
        try:
            return await self._from_there(order, tried)
        except TransferError as error:
            again = self._next_try(order, tried, error.reason)
            if not again:
                raise
            order.check_target()
            self._metrics.pull_ended(order.backend or "none", RETRIED, error.reason)
            log.info("pull_retried", path=again[0], reason=error.reason, error=str(error))
        return await self._from_there(order, again)

    async def close(self) -> None:
        """Wait for what was begun; each of it has its own bound."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _next_try(self, order: PullOrder, tried: Sequence[str], reason: Reason) -> list[str]:
        if seconds_until(order.deadline_ms) <= 0:
            return []
        if not order.backend:  # the peer did not answer: by whatever transport, ask it again
            return list(tried) if reason is Reason.PEER_LOST else []
        return retry_backends(tried, order.backend, reason)

    async def _from_here(self, order: PullOrder) -> PullReport:
        """Pull from another engine of this node, whose memory is mapped."""
        order.backend = SHM
        name = name_of(order.known.address)
        registration, held = self._source.renew(name)
        memory = registration.memories.get(order.rank)
        if memory is None:
            raise PullError(Reason.TOPOLOGY, f"tp_rank: the source has no rank {order.rank}")
        order.backend = path_within_node(memory.form, order.target.form)
        job = PullJob(
            target=order.target,
            request=order.request(memory.layout),
            deadline_ms=order.deadline_ms,
            source=memory,
            backend=order.backend,
        )

        async def renew() -> None:
            self._source.renew(name)

        async with _renewing(renew, seconds_between_renewals(held)):
            return await self._pull(order, job)

    async def _from_store(self, order: PullOrder) -> PullReport:
        """Pull from the shared store, which is tried once: computing is the second way."""
        if self._store is None:  # for the type checker: without one nothing is found there
            raise PullError(Reason.NO_PATH, "there is no store")
        order.backend = STORE
        with self._store.pulling(order):
            return await self._pull(order, self._store.pull_job(order))

    async def _from_there(self, order: PullOrder, backends: Sequence[str]) -> PullReport:
        """Pull from another node, by the first of the transports that its agent can serve."""
        address = order.known.address
        answer = await self._open(order, backends)
        order.backend = answer.backend
        order.is_cold |= answer.is_cold
        renewal = PeerRenew(engine=address.engine, epoch=address.epoch, lease=address.lease)

        async def renew() -> None:
            await self._peers.renew(address.agent, renewal, seconds=_RENEWAL_SECONDS)

        try:
            job = PullJob(
                target=order.target,
                request=order.request(_layout_of(answer), answer.ticket),
                deadline_ms=order.deadline_ms,
                backend=answer.backend,
                offer=answer.offer,
            )
            async with _renewing(renew, answer.renew_seconds):
                report = await self._pull(order, job)
        finally:
            withdrawal = PeerWithdraw(ticket=answer.ticket)
            self._later(self._peers.withdraw(address.agent, withdrawal))
        if self._rules.require_rdma and not report.path.rdma:
            raise PullError(
                Reason.RDMA_REQUIRED, f"RDMA is required, and it was {report.path.detail or 'not'}"
            )
        return report

    async def _pull(self, order: PullOrder, job: PullJob) -> PullReport:
        started = self._pool.counts.started.total()
        try:
            return await self._pool.pull(job)
        finally:
            order.is_cold |= self._pool.counts.started.total() != started

    async def _open(self, order: PullOrder, backends: Sequence[str]) -> OpenAnswer:
        address = order.known.address
        seconds = seconds_until(order.deadline_ms)
        request = PeerOpen(
            engine=address.engine,
            epoch=address.epoch,
            lease=address.lease,
            node=self._rules.node,
            tenant=order.reader.tenant,
            tp_rank=order.rank,
            blocks=order.last_block,
            backends=tuple(backends),
            require_rdma=self._rules.require_rdma,
            wait_ms=int(seconds * 1000),
        )
        answer = await self._peers.open(address.agent, request, seconds=seconds)
        if answer.backend not in backends:
            raise PullError(Reason.PEER_REFUSED, f"backend: {answer.backend!r} was not asked for")
        return answer

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _layout_of(answer: OpenAnswer) -> KvMemory:
    return KvMemory(**msgspec.structs.asdict(answer.layout))


@asynccontextmanager
async def _until(deadline_ms: int) -> AsyncIterator[None]:
    """Bound a block by a pull's deadline; raises :class:`PullError` when it is over."""
    try:
        async with asyncio.timeout(seconds_until(deadline_ms)):
            yield
    except TimeoutError:
        raise PullError(Reason.DEADLINE, "the pull's deadline has passed") from None


@asynccontextmanager
async def _renewing(renew: Callable[[], Awaitable[None]], seconds: float) -> AsyncIterator[None]:
    """Renew a lease now and then for as long as the block runs.

    A renewal that fails is no reason to stop: the fence says whether the lease still holds.
    """
    pause_seconds = min(max(_LEAST_PAUSE_SECONDS, seconds), _LONGEST_PAUSE_SECONDS)

    async def keep_on() -> None:
        while True:
            await asyncio.sleep(pause_seconds)
            with contextlib.suppress(TransferError):
                await renew()

    task = asyncio.create_task(keep_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
