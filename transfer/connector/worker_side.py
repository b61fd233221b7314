"""The connector in a vLLM worker: registers the KV memory and gets loads done.

Loads run in the agent's movers. A worker only asks and listens, never waits: vLLM polls it
once per step. Blocks of a load are given back to vLLM only when nobody can write into them
any more: when the agent says so, or, where the agent says nothing, when the mover's deadline
and grace have passed, after which it is dead (see ``docs/adr/0006``).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from nearkv.transfer.agent_client import AgentClient, Hello
from nearkv.transfer.connector.allocation import SharedMemory
from nearkv.transfer.connector.settings import ConnectorSettings
from nearkv.transfer.connector.steps import LoadJob, StepPlan
from nearkv.transfer.connector.tally import Tally
from nearkv.transfer.errors import Reason
from nearkv.transfer.manifest import Compatibility
from nearkv.transfer.messages import (
    MOVER_GRACE_MS,
    PROTOCOL,
    CancelPull,
    MemoryMap,
    PullDone,
    RegisterWorker,
    StartPull,
    ToEngine,
)

_MARGIN_MS = 250
_AFTER_LOSS_MS = 1000
"""How long movers may live on when the agent has ended a connection: they die with it at once,
and one that lives on kills what does not acknowledge a cancel within half a second."""


@dataclass(frozen=True, slots=True)
class LoadsEnded:
    """Requests whose loads ended, and the blocks among theirs that hold nothing of worth."""

    request_ids: set[str]
    failed_blocks: set[int]


@dataclass(slots=True)
class _Pending:
    job: LoadJob
    give_up_at_ms: int


class WorkerSide:
    """All that a worker's connector does; methods run on the worker's main thread."""

    def __init__(self, settings: ConnectorSettings, *, now_ms: Callable[[], int]) -> None:
        self._settings = settings
        self._now_ms = now_ms
        self.tally = Tally()
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._id_of: dict[str, int] = {}
        self._ended = LoadsEnded(set(), set())
        self._next_id = 0
        self._client: AgentClient | None = None

    def register(
        self,
        *,
        epoch: str,
        shared: SharedMemory,
        memory: MemoryMap,
        compatibility: Compatibility,
    ) -> None:
        """Offer the KV memory to the agent, now and whenever the agent was restarted."""
        hello = Hello(
            RegisterWorker(
                protocol=PROTOCOL,
                engine=self._settings.engine,
                epoch=epoch,
                compatibility=compatibility,
                memory=memory,
                tenant=self._settings.tenant,
                memory_kind=shared.kind,
                device=shared.device,
                handle=shared.handle,
                fds=len(shared.fds),
            ),
            shared.fds,
        )
        self._client = AgentClient(
            self._settings.socket_path,
            lambda: hello,
            on_message=self._on_message,
            on_lost=self._on_lost,
        )
        self._client.start()

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()

    def begin(self, plan: StepPlan) -> None:
        """Start this step's loads and cancel those that nobody waits for any more."""
        for job in plan.loads:
            self._begin(job)
        for request_id in plan.cancels:
            with self._lock:
                pull_id = self._id_of.get(request_id)
            if pull_id is not None and self._client is not None:
                self._client.send(CancelPull(id=pull_id))

    def _begin(self, job: LoadJob) -> None:
        with self._lock:
            self._next_id += 1
            pull_id = self._next_id
            give_up_at_ms = job.deadline_ms + MOVER_GRACE_MS + _MARGIN_MS
            self._pending[pull_id] = _Pending(job, give_up_at_ms)
            self._id_of[job.request_id] = pull_id
        message = StartPull(
            id=pull_id,
            address=job.address,
            first_block=job.first_block,
            target_blocks=job.target_blocks,
            deadline_ms=job.deadline_ms,
            lookup=job.lookup,
        )
        if self._client is None or not self._client.send(message):
            self._end(pull_id, Reason.NO_AGENT)

    def _on_message(self, message: ToEngine) -> None:
        if isinstance(message, PullDone):
            self._end(message.id, message.reason)

    def _on_lost(self, agent_ended_it: bool) -> None:  # noqa: FBT001 (the client's form)
        """Give up early on pulls whose agent is gone, and their movers with it.

        An agent that was given up, since it took nothing any more, has not died: it may be
        stopped, and its movers go on writing until their deadline.
        """
        if not agent_ended_it:
            return
        give_up_at_ms = self._now_ms() + _AFTER_LOSS_MS
        with self._lock:
            for pending in self._pending.values():
                pending.give_up_at_ms = min(pending.give_up_at_ms, give_up_at_ms)

    def _end(self, pull_id: int, reason: str) -> None:
        with self._lock:
            pending = self._pending.pop(pull_id, None)
            if pending is None:
                return
            job = pending.job
            self._id_of.pop(job.request_id, None)
            self._ended.request_ids.add(job.request_id)
            if reason:
                self._ended.failed_blocks.update(job.target_blocks)
        self.tally.add("load", reason or "done")

    def take_ended(self) -> LoadsEnded:
        """Return the loads that ended since the last call, those given up among them."""
        if self._pending:
            now_ms = self._now_ms()
            with self._lock:
                due = [i for i, pending in self._pending.items() if now_ms >= pending.give_up_at_ms]
            for pull_id in due:
                self._end(pull_id, Reason.AGENT_LOST)
        if not self._ended.request_ids:
            return LoadsEnded(set(), set())
        with self._lock:
            ended, self._ended = self._ended, LoadsEnded(set(), set())
        return ended
