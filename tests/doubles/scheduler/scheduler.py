"""The double as one object: a queue, the algorithm, binding."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random

from tests.doubles.scheduler.clocks import Now, real_now
from tests.doubles.scheduler.cluster import Cluster
from tests.doubles.scheduler.configuration import SchedulerConfig
from tests.doubles.scheduler.cycling import Algorithm, Outcome, Placement
from tests.doubles.scheduler.events import ClusterEvent
from tests.doubles.scheduler.extender_client import Extender, ExtenderError
from tests.doubles.scheduler.go_json import Json
from tests.doubles.scheduler.objects import PodInfo
from tests.doubles.scheduler.queueing import QueuedPod, SchedulingQueue

Bind = Callable[[PodInfo, str], Awaitable[None]]
Evict = Callable[[PodInfo], Awaitable[None]]
Nominate = Callable[[PodInfo, str], Awaitable[None]]
Explain = Callable[[Placement], Awaitable[None]]

_PLACEMENTS_KEPT = 20_000


class BindError(Exception):
    """The API server did not take a binding."""


class SchedulerDouble:
    """A kube-scheduler over ``cluster``; drive it by :meth:`step`, or let it :meth:`run`.

    Without ``bind``, ``evict`` and ``nominate`` the cluster itself is written to, as if the API
    server had answered at once; ``explain`` writes down why a pod got no node. ``placements``
    holds the outcome of each cycle, the last ones only.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: SchedulerConfig,
        *,
        seed: int = 0,
        now: Now = real_now,
        notices_close: bool = True,
        bind: Bind | None = None,
        evict: Evict | None = None,
        nominate: Nominate | None = None,
        explain: Explain | None = None,
    ) -> None:
        self.cluster = cluster
        self.config = config
        self.extenders = [
            Extender(one, now=now, notices_close=notices_close) for one in config.ordered_extenders
        ]
        self.placements: deque[Placement] = deque(maxlen=_PLACEMENTS_KEPT)
        self.queue = SchedulingQueue(
            initial_backoff_seconds=config.initial_backoff_seconds,
            longest_backoff_seconds=config.longest_backoff_seconds,
        )
        self._algorithm = Algorithm(cluster, config, self.extenders, Random(seed))
        self._now = now
        self._bind = bind or self._bind_here
        self._evict = evict or self._evict_here
        self._nominate = nominate or self._nominate_here
        self._explain = explain
        self._something_happened = asyncio.Event()
        self._binding: set[asyncio.Task[None]] = set()
        cluster.listen(self._on_event, self._on_waiting, self.queue.remove)
        for pod in cluster.waiting.values():
            self._on_waiting(pod)

    async def step(self) -> Placement | None:
        """Run one cycle if a pod is ready for it, up to the end of its binding."""
        placement = await self._cycle()
        if self._binding:
            await asyncio.gather(*self._binding)
        return placement

    async def drain(self, limit: int = 10_000) -> list[Placement]:
        """Run cycles until no pod is ready, at most ``limit``."""
        found: list[Placement] = []
        while len(found) < limit and (placement := await self.step()) is not None:
            found.append(placement)
        return found

    async def run(self) -> None:
        """Run cycles for ever; bindings go on while the next cycle runs. For real clocks."""
        try:
            while True:
                self._something_happened.clear()
                if await self._cycle() is not None:
                    continue
                now = self._now()
                due = self.queue.next_at(now)
                wait = None if due is None else max(0.001, due - now)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._something_happened.wait(), wait)
        finally:
            for task in self._binding:
                task.cancel()
            self.close()

    async def simulate(self, pods: Sequence[PodInfo]) -> list[Placement]:
        """Place a gang's pods one after another, then take everything back: nothing is bound."""
        found = []
        try:
            for pod in pods:
                placement = await self._algorithm.place(pod)
                found.append(placement)
                if placement.outcome is Outcome.PLACED:
                    self.cluster.assume(pod, placement.node)
        finally:
            for pod in pods:
                self.cluster.forget(pod.uid)
        return found

    def close(self) -> None:
        """Close connections to extenders."""
        for extender in self.extenders:
            extender.client.close()

    async def _cycle(self) -> Placement | None:
        queued = self.queue.pop(self._now())
        if queued is None:
            return None
        placement = await self._algorithm.place(queued.pod)
        self.placements.append(placement)
        if placement.outcome is Outcome.PLACED:
            self.cluster.assume(queued.pod, placement.node)
            task = asyncio.create_task(self._bind_assumed(queued, placement.node))
            self._binding.add(task)
            task.add_done_callback(self._binding.discard)
        elif placement.outcome is Outcome.ERROR:
            self.queue.failed(queued, self._now())
        else:
            self.queue.turned_down(queued, self._now(), by_extender=placement.by_extender)
            await self._make_room(placement)
        if placement.outcome is not Outcome.PLACED and self._explain is not None:
            await self._explain(placement)
        return placement

    async def _bind_assumed(self, queued: QueuedPod, node: str) -> None:
        pod = queued.pod
        try:
            binder = self._binder(pod)
            if binder is not None:
                try:
                    await binder.bind(pod, node)
                except ExtenderError:
                    if not binder.config.ignorable:
                        raise
                    await self._bind(pod, node)
            else:
                await self._bind(pod, node)
        except (ExtenderError, BindError):
            self.cluster.forget(pod.uid)
            self.queue.failed(queued, self._now())
            self._something_happened.set()
        else:
            self.queue.done(queued)

    def _binder(self, pod: PodInfo) -> Extender | None:
        return next(
            (one for one in self.extenders if one.config.bind_verb and one.is_interested(pod)), None
        )

    async def _make_room(self, placement: Placement) -> None:
        if placement.preempted is None:
            return
        await self._nominate(placement.pod, placement.nominated)
        for victim in placement.preempted.pods:
            await self._evict(victim)

    def _on_event(self, event: ClusterEvent) -> None:
        self.queue.on_event(event, self._now())
        self._something_happened.set()

    def _on_waiting(self, pod: PodInfo) -> None:
        if (pod.spec.get("schedulerName") or "default-scheduler") == self.config.scheduler_name:
            self.queue.update(pod)
            self._something_happened.set()

    async def _bind_here(self, pod: PodInfo, node: str) -> None:
        spec: Json = {**pod.spec, "nodeName": node}
        self.cluster.set_pod({**pod.document, "spec": spec})

    async def _evict_here(self, pod: PodInfo) -> None:
        self.cluster.delete_pod(pod.uid)

    async def _nominate_here(self, pod: PodInfo, node: str) -> None:
        status: Json = {**pod.status, "nominatedNodeName": node}
        self.cluster.set_pod({**pod.document, "status": status})
