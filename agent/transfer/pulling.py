"""Pulls into this node's engines: from the same node by shared memory, from others by offer.

Every pull ends with exactly one answer, and only once nobody writes into its blocks any more:
the mover pool promises that for each of its calls.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from nearkv.agent.movers.jobs import EngineMemory
from nearkv.agent.transfer.bringing import Bringer
from nearkv.agent.transfer.inflight import InflightLimit
from nearkv.agent.transfer.known_leases import KnownLease, KnownLeases
from nearkv.agent.transfer.lookups import seconds_until
from nearkv.agent.transfer.memory_forms import WITHIN_NODE
from nearkv.agent.transfer.metrics import CANCELLED, DONE, FAILED, TransferMetrics
from nearkv.agent.transfer.path_costs import PathCosts
from nearkv.agent.transfer.pull_orders import PullOrder
from nearkv.agent.transfer.registry import Owner, Registration
from nearkv.transfer.backends.contract import PullReport
from nearkv.transfer.errors import ProtocolError, PullError, Reason, TransferError
from nearkv.transfer.messages import PullDone, StartPull

_MAX_PULLS_PER_OWNER = 1024
_LONGEST_SECONDS = 600.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullLimits:
    """What may be pulled at once."""

    bytes_per_peer: int = 1 << 30
    pulls_per_engine: int = 32


@dataclass(slots=True, eq=False)
class _Running:
    """A pull under way; ``began`` once it was its turn."""

    owner: Owner
    order: PullOrder
    task: asyncio.Task[PullReport] | None = None
    is_cancelled: bool = False
    began: float | None = None


class PullDesk:
    """Runs all pulls of this node."""

    def __init__(
        self,
        bringer: Bringer,
        known: KnownLeases,
        costs: PathCosts,
        metrics: TransferMetrics,
        limits: PullLimits,
    ) -> None:
        self._bringer = bringer
        self._known = known
        self._costs = costs
        self._metrics = metrics
        self._running: dict[tuple[Owner, int], _Running] = {}
        self._per_owner: dict[Owner, int] = {}
        self._bytes = InflightLimit(limits.bytes_per_peer, what="bytes in flight from this peer")
        self._turns = InflightLimit(limits.pulls_per_engine, what="pulls into this engine")

    def __len__(self) -> int:
        """Return how many pulls run or wait."""
        return len(self._running)

    @property
    def inflight_bytes(self) -> int:
        """Bytes of all pulls that run."""
        return self._bytes.total

    def start(self, reader: Registration, rank: int, owner: Owner, message: StartPull) -> None:
        """Begin a pull; its ``PullDone`` goes to ``owner``.

        Raises :class:`ProtocolError` for an id that is in use.
        """
        key = (owner, message.id)
        if key in self._running:
            raise ProtocolError(f"pull {message.id} is under way already")
        try:
            order = self._order(reader, rank, message)
            if self._per_owner.get(owner, 0) >= _MAX_PULLS_PER_OWNER:
                raise PullError(Reason.BUSY, f"{_MAX_PULLS_PER_OWNER} pulls are under way already")
        except TransferError as error:
            self._metrics.pull_ended("none", FAILED, error.reason)
            owner.send(PullDone(id=message.id, reason=error.reason, message=str(error)))
            return
        running = _Running(owner, order)
        self._running[key] = running
        self._per_owner[owner] = self._per_owner.get(owner, 0) + 1
        running.task = asyncio.create_task(self._run(running))
        # A task that is cancelled before its first step never runs: only its end is certain.
        running.task.add_done_callback(partial(self._ended, running))

    def cancel(self, owner: Owner, pull_id: int) -> None:
        """Cancel a pull; one that is over has been answered."""
        running = self._running.get((owner, pull_id))
        if running is not None:
            _cancel(running)

    async def cancel_into(self, memories: list[EngineMemory]) -> None:
        """Cancel all pulls into memories; returns when nobody writes there any more."""
        keys = {memory.key for memory in memories}
        await self._cancel_all(lambda running: running.order.target.key in keys)

    async def close(self) -> None:
        """Cancel all pulls, and wait for their ends."""
        await self._cancel_all(lambda _: True)

    async def _cancel_all(self, is_meant: Callable[[_Running], bool]) -> None:
        meant = [running for running in self._running.values() if is_meant(running)]
        for running in meant:
            _cancel(running)
        tasks = [running.task for running in meant if running.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _order(self, reader: Registration, rank: int, message: StartPull) -> PullOrder:
        """Return what a message asks for; raises :class:`TransferError` where it cannot be."""
        target = reader.memories.get(rank)
        if target is None:
            raise PullError(Reason.MEMORY, "not all of this engine has registered")
        known = self._known.get(reader.engine, message.lookup, message.address)
        _check_blocks(known, target, message)
        if seconds_until(message.deadline_ms) <= 0:
            raise PullError(Reason.DEADLINE, "the pull's deadline has passed")
        latest_ms = int((time.monotonic() + _LONGEST_SECONDS) * 1000)
        return PullOrder(
            reader=reader,
            rank=rank,
            target=target,
            known=known,
            first_block=message.first_block,
            target_blocks=message.target_blocks,
            deadline_ms=min(message.deadline_ms, latest_ms),
            number=message.id,
        )

    async def _run(self, running: _Running) -> PullReport:
        order = running.order
        async with (
            self._turns.hold(order.reader.engine, 1, seconds=seconds_until(order.deadline_ms)),
            self._bytes.hold(
                order.source_node, order.size_bytes, seconds=seconds_until(order.deadline_ms)
            ),
        ):
            running.began = time.monotonic()
            if not order.from_store:
                path = self._bringer.expected_path(order.source_node)
                self._costs.began(order.source_node, path)
            return await self._bringer.bring(order)

    def _ended(self, running: _Running, task: asyncio.Task[PullReport]) -> None:
        order = running.order
        self._forget(running)
        done, outcome = self._judge(running, task)
        reason = done.reason
        if running.began is not None and not order.from_store:
            self._costs.ended(order.source_node, reason)
        self._metrics.pull_ended(done.path or order.backend or "none", outcome, reason)
        if reason:
            log.info(
                "pull_failed",
                engine=order.reader.engine,
                source=order.source_node,
                path=order.backend,
                reason=reason,
                error=done.message,
            )
        running.owner.send(done)

    def _judge(self, running: _Running, task: asyncio.Task[PullReport]) -> tuple[PullDone, str]:
        """Return what to answer, and the outcome to count."""
        number = running.order.number
        if task.cancelled():
            reason = Reason.CANCELLED
            return PullDone(id=number, reason=reason, message="the pull was cancelled"), CANCELLED
        error = task.exception()
        if isinstance(error, TransferError):
            outcome = CANCELLED if error.reason is Reason.CANCELLED else FAILED
            return PullDone(id=number, reason=error.reason, message=str(error)), outcome
        if error is not None:
            log.error("pull_is_defect", exc_info=error)
            return PullDone(id=number, reason=Reason.INTERNAL, message=repr(error)), FAILED
        return self._succeeded(running, task.result()), DONE

    def _succeeded(self, running: _Running, report: PullReport) -> PullDone:
        """Learn from a pull that counts; returns the answer."""
        order, now = running.order, time.monotonic()
        seconds = now - (now if running.began is None else running.began)
        size_bytes, path = report.size_bytes, report.path
        if not order.from_store:
            agent = "" if self._bringer.is_here(order.source_node) else order.known.address.agent
            self._costs.succeeded(
                order.source_node, path, size_bytes=size_bytes, now=now, agent=agent
            )
            if not order.is_cold:
                self._costs.measured(order.source_node, path, size_bytes, seconds, now=now)
        self._metrics.pull_done(path.name, size_bytes=size_bytes, seconds=seconds)
        if self._bringer.is_here(order.source_node) and path.name not in WITHIN_NODE:
            self._metrics.detour_taken()
        return PullDone(id=order.number, path=path.name, size_bytes=size_bytes, seconds=seconds)

    def _forget(self, running: _Running) -> None:
        del self._running[running.owner, running.order.number]
        left = self._per_owner[running.owner] - 1
        if left:
            self._per_owner[running.owner] = left
        else:
            del self._per_owner[running.owner]


def _cancel(running: _Running) -> None:
    """Cancel once: a second time would disturb the wait for the mover's word."""
    if not running.is_cancelled and running.task is not None:
        running.is_cancelled = True
        running.task.cancel()


def _check_blocks(known: KnownLease, target: EngineMemory, message: StartPull) -> None:
    count = len(message.target_blocks)
    if count == 0:
        raise PullError(Reason.RANGE, "target_blocks: there are none")
    if message.first_block < 0 or message.first_block + count > len(known.block_ids):
        raise PullError(
            Reason.RANGE, f"first_block: only {len(known.block_ids)} blocks of the lease fit"
        )
    blocks = message.target_blocks
    if min(blocks) < 0 or max(blocks) >= target.layout.blocks or len(set(blocks)) != count:
        raise PullError(Reason.RANGE, "target_blocks: not different blocks of this engine")
