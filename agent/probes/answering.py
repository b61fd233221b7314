"""Answering other agents' probes: one at a time, within the budget, and never beside KV."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nearkv.agent.probes.budget import Budget, cost_of
from nearkv.agent.probes.carriers import Carriers, new_grant
from nearkv.agent.transfer.backend_choice import BackendProbes, usable_backends
from nearkv.agent.transfer.peer_messages import PeerProbe, ProbeAnswer
from nearkv.transfer.backends.contract import Grant
from nearkv.transfer.errors import PullError, Reason, TransferError

_LONGEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Reader:
    backend: str
    ticket: bytes
    until: float


class ProbeDesk:
    """Lets readers at bytes that mean nothing. ``busy`` tells whether KV moves now."""

    def __init__(  # noqa: PLR0913 (those it talks to; all but three are keyword-only)
        self,
        carriers: Carriers,
        probes: BackendProbes,
        budget: Budget,
        *,
        backends: tuple[str, ...],
        require_rdma: bool,
        labels: Callable[[], Mapping[str, str]],
        busy: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._carriers = carriers
        self._probes = probes
        self._budget = budget
        self._backends = backends
        self._require_rdma = require_rdma
        self._labels = labels
        self._busy = busy
        self._now = now
        self._reader: _Reader | None = None
        self._warm: set[str] = set()

    @property
    def has_reader(self) -> bool:
        """Whether somebody probes this node now."""
        return self._reader is not None and self._now() < self._reader.until

    async def open(self, message: PeerProbe) -> ProbeAnswer:
        """Let a peer probe; raises :class:`TransferError`, ``BUSY`` when it had better not."""
        try:
            return await self._open(message)
        except TransferError:
            self._budget.refuses(self._now())
            raise

    async def _open(self, message: PeerProbe) -> ProbeAnswer:
        if self._busy():
            raise PullError(Reason.BUSY, "KV is being moved here, or another path probed")
        if self.has_reader:
            raise PullError(Reason.BUSY, "another node probes this one")
        choices = usable_backends(
            [name for name in message.backends if name in self._backends],
            await self._probes.get(),
            require_rdma=message.require_rdma or self._require_rdma,
        )
        now = self._now()
        if self.has_reader or not self._budget.take(cost_of(choices[0]), now):
            raise PullError(Reason.BUSY, "the budget for answering probes is used up")
        seconds = min(max(0.0, message.wait_ms / 1000), _LONGEST_SECONDS)
        grant = new_grant(seconds)
        self._reader = _Reader(choices[0], grant.ticket, now + seconds)
        try:
            backend, offer = await self._offer(choices, grant)
        except BaseException:
            self._reader = None
            raise
        self._reader = _Reader(backend, grant.ticket, now + seconds)
        is_cold = backend not in self._warm or backend != "tcp"
        self._warm.add(backend)
        return ProbeAnswer(
            backend=backend,
            offer=offer,
            ticket=grant.ticket,
            labels=dict(self._labels()),
            is_cold=is_cold,
        )

    async def withdraw(self, ticket: bytes) -> None:
        """End a reader's admission; unknown ones are passed over."""
        reader = self._reader
        if reader is not None and reader.ticket == ticket:
            self._reader = None
            await self._carriers.of(reader.backend).withdraw(ticket)

    async def tick(self) -> None:
        """End an admission whose time is over, or that is in the way of KV."""
        reader = self._reader
        if reader is not None and (self._busy() or not self.has_reader):
            await self.withdraw(reader.ticket)

    async def _offer(self, choices: list[str], grant: Grant) -> tuple[str, bytes]:
        refusals = []
        for backend in choices:
            try:
                return backend, await self._carriers.of(backend).offer(backend, grant)
            except TransferError as error:
                if error.reason is not Reason.NO_PATH:
                    raise
                refusals.append(f"{backend}: {error}")
        raise PullError(Reason.NO_PATH, "; ".join(refusals))
