"""Probing other nodes: now and then, one at a time, and only while nothing else moves."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from nearkv.agent.probes.budget import PROBE_BYTES, REFUSAL, Budget, cost_of
from nearkv.agent.probes.carriers import FENCE, Carriers, Timing, Way
from nearkv.agent.probes.peers import Peer, PeerBook
from nearkv.agent.probes.planning import ProbePlan
from nearkv.agent.probes.readings import ProbeReading, reading_of
from nearkv.agent.transfer.backend_choice import BackendProbes, usable_backends
from nearkv.agent.transfer.metrics import CANCELLED, DONE, FAILED, REFUSED, TransferMetrics
from nearkv.agent.transfer.path_costs import PathCosts
from nearkv.agent.transfer.peer_client import PeerClient
from nearkv.agent.transfer.peer_messages import PeerProbe, PeerWithdraw, ProbeAnswer
from nearkv.transfer.backends.contract import monotonic_ms
from nearkv.transfer.errors import PullError, Reason, TransferError

_REFRESH_SECONDS = 30.0
_WATCH_SECONDS = 0.05

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingRules:
    """How this node probes."""

    node: str
    backends: tuple[str, ...]
    require_rdma: bool
    deadline_seconds: float


class Prober:
    """Probes peers for as long as :meth:`run` runs. ``busy`` tells whether KV moves now."""

    def __init__(  # noqa: PLR0913 (those it talks to; four are keyword-only)
        self,
        book: PeerBook,
        plan: ProbePlan,
        budget: Budget,
        carriers: Carriers,
        probes: BackendProbes,
        peers: PeerClient,
        *,
        costs: PathCosts,
        metrics: TransferMetrics,
        rules: AskingRules,
        busy: Callable[[], bool],
    ) -> None:
        self._book = book
        self._plan = plan
        self._budget = budget
        self._carriers = carriers
        self._probes = probes
        self._peers = peers
        self._costs = costs
        self._metrics = metrics
        self._rules = rules
        self._busy = busy
        self._chosen: dict[str, list[Peer]] = {}
        self._refresh_at = 0.0
        self._paid = REFUSAL
        self.is_asking = False

    async def run(self) -> None:
        """Probe until cancelled."""
        pause_seconds = self._plan.first_pause_seconds()
        while True:
            await asyncio.sleep(pause_seconds)
            try:
                pause_seconds = await self.look()
            except Exception:
                log.exception("probing_is_defect")
                pause_seconds = self._plan.first_pause_seconds()

    async def look(self) -> float:
        """Probe a peer, if one is due; returns how long to wait until the next look."""
        if self._busy():
            return self._plan.busy_pause_seconds()
        now = time.monotonic()
        self._refresh(now)
        wait_seconds = self._budget.wait_seconds(now)
        peer = self._plan.choose(self._chosen, self._costs.last_measured, now)
        if peer is None or wait_seconds:
            return self._plan.idle_pause_seconds(wait_seconds, now)
        was_answered = await self._probe(peer)
        wait_seconds = self._budget.wait_seconds(time.monotonic())
        if not was_answered:
            return self._plan.refused_pause_seconds(wait_seconds)
        is_suspect = self._costs.last_measured(peer.node).is_suspect
        return self._plan.pause_seconds(wait_seconds, suspects=is_suspect)

    def _refresh(self, now: float) -> None:
        if now >= self._refresh_at or not len(self._book):
            self._refresh_at = now + _REFRESH_SECONDS
            self._book.refresh()
            self._chosen = self._book.chosen()

    async def _probe(self, peer: Peer) -> bool:
        """Probe a peer, and note what came of it; False where it was refused."""
        self.is_asking = True
        try:
            reading = await self._unless_busy(self._measure(peer))
        except TransferError as error:
            self._failed(peer, error)
            return error.reason is not Reason.BUSY
        else:
            self._plan.succeeded(peer.node)
            self._metrics.probe_ended(DONE)
            log.debug("probed", node=peer.node, bytes_per_second=reading.bytes_per_second)
            return True
        finally:
            self.is_asking = False

    def _failed(self, peer: Peer, error: TransferError) -> None:
        now = time.monotonic()
        if error.reason is Reason.CANCELLED:
            self._metrics.probe_ended(CANCELLED, error.reason)
            self._plan.refused(peer.node, now)
        elif error.reason is Reason.BUSY:
            self._budget.was_refused(self._paid, now)
            self._metrics.probe_ended(REFUSED, error.reason)
            self._plan.refused(peer.node, now)
        else:
            self._metrics.probe_ended(FAILED, error.reason)
            self._plan.failed(peer.node, now)
            log.info("probe_failed", node=peer.node, reason=error.reason, error=str(error))

    async def _unless_busy(self, work: Coroutine[Any, Any, ProbeReading]) -> ProbeReading:
        """Give a probe up as soon as KV moves: raises ``PullError`` (``CANCELLED``) then."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=_WATCH_SECONDS))[0]:
                if self._busy():
                    raise PullError(Reason.CANCELLED, "KV is to be moved")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _measure(self, peer: Peer) -> ProbeReading:
        rules = self._rules
        backends = usable_backends(
            rules.backends, await self._probes.get(), require_rdma=rules.require_rdma
        )
        costs = [cost_of(name) for name in backends]
        self._paid = max(costs, key=lambda cost: cost.cpu_seconds)
        self._budget.take(self._paid, time.monotonic())
        deadline_ms = monotonic_ms() + int(rules.deadline_seconds * 1000)
        began = time.monotonic()
        question = PeerProbe(
            node=rules.node,
            backends=tuple(backends),
            require_rdma=rules.require_rdma,
            wait_ms=int(rules.deadline_seconds * 1000),
        )
        answer = await self._peers.probe(peer.url, question, seconds=rules.deadline_seconds)
        asking_seconds = time.monotonic() - began
        try:
            if answer.backend not in backends:
                raise PullError(Reason.PEER_REFUSED, f"backend: {answer.backend!r}")
            way = Way(answer.backend, answer.offer, answer.ticket, FENCE)
            timing = await self._carriers.of(answer.backend).measure(way, deadline_ms)
        finally:
            withdrawing_seconds = await self._withdraw(peer, answer)
        if answer.is_cold:
            # Its server was started for this; a second message is what a message takes.
            asking_seconds = min(asking_seconds, withdrawing_seconds)
        return self._learn(peer, answer, timing, asking_seconds)

    async def _withdraw(self, peer: Peer, answer: ProbeAnswer) -> float:
        """Say that the probe is over; returns how long that took."""
        began = time.monotonic()
        await self._peers.withdraw(peer.url, PeerWithdraw(ticket=answer.ticket))
        return time.monotonic() - began

    def _learn(
        self, peer: Peer, answer: ProbeAnswer, timing: Timing, asking_seconds: float
    ) -> ProbeReading:
        reading = reading_of(
            asking_seconds=asking_seconds,
            small_seconds=timing.small_seconds,
            large_seconds=timing.large_seconds,
            large_bytes=PROBE_BYTES,
            at=time.monotonic(),
        )
        self._costs.probed(peer.node, timing.path, reading)
        if self._book.told(peer.node, answer.labels):
            self._chosen = self._book.chosen()
        if timing.is_bound:
            raise PullError(Reason.DEADLINE, "the large pull took too long: its bandwidth is less")
        return reading
