"""The scheduling queue: active, backing off, unschedulable (pure; times are passed in).

A pod that failed by an error is tried again after 1, 2, 4 .. 10 s. One that was rejected waits for
an event that concerns it, or for the flush: every 30 s, pods that waited for more than 5 minutes
are tried again. Events that come while a pod is being scheduled count for it, too.
"""

from dataclasses import dataclass, field

from tests.doubles.scheduler.events import ClusterEvent, wakes
from tests.doubles.scheduler.objects import PodInfo

FLUSH_EVERY_SECONDS = 30.0
LONGEST_WAIT_SECONDS = 300.0


@dataclass(slots=True)
class QueuedPod:
    """A pod in the queue; ``attempts`` counts cycles, ``failed_at`` is when the last one ended."""

    pod: PodInfo
    order: int
    attempts: int = 0
    failed_at: float = 0.0
    by_extender: bool = False
    missed: list[ClusterEvent] = field(default_factory=list)


class SchedulingQueue:
    """The queue of one scheduler."""

    def __init__(self, *, initial_backoff_seconds: float, longest_backoff_seconds: float) -> None:
        self._initial = initial_backoff_seconds
        self._longest = longest_backoff_seconds
        self._active: dict[str, QueuedPod] = {}
        self._backing_off: dict[str, QueuedPod] = {}
        self._rejected: dict[str, QueuedPod] = {}
        self._in_flight: dict[str, QueuedPod] = {}
        self._arrived = 0
        self._flushed_at: float | None = None

    def __len__(self) -> int:
        return sum(map(len, (self._active, self._backing_off, self._rejected)))

    @property
    def rejected(self) -> frozenset[str]:
        """UIDs of pods that wait for an event or the flush."""
        return frozenset(self._rejected)

    def add(self, pod: PodInfo) -> None:
        """Take a new pod."""
        if not self._holder(pod.uid):
            self._arrived += 1
            self._active[pod.uid] = QueuedPod(pod, self._arrived)

    def update(self, pod: PodInfo) -> None:
        """Take a newer version of a pod; this alone wakes nothing."""
        holder = self._holder(pod.uid)
        if holder is None:
            self.add(pod)
        else:
            holder[pod.uid].pod = pod

    def remove(self, uid: str) -> None:
        """Forget a pod: it is gone or bound."""
        for part in (self._active, self._backing_off, self._rejected, self._in_flight):
            part.pop(uid, None)

    def pop(self, now: float) -> QueuedPod | None:
        """Take the next pod to schedule: by priority, then by arrival."""
        self._advance(now)
        if not self._active:
            return None
        queued = min(self._active.values(), key=lambda one: (-one.pod.priority, one.order))
        del self._active[queued.pod.uid]
        queued.attempts += 1
        queued.missed = []
        self._in_flight[queued.pod.uid] = queued
        return queued

    def done(self, queued: QueuedPod) -> None:
        """A cycle ended with a node."""
        self._in_flight.pop(queued.pod.uid, None)

    def failed(self, queued: QueuedPod, now: float) -> None:
        """A cycle ended with an error: it is tried again by time."""
        if self._land(queued, now):
            self._backing_off[queued.pod.uid] = queued

    def turned_down(self, queued: QueuedPod, now: float, *, by_extender: bool) -> None:
        """A cycle found no node: the pod waits for an event."""
        queued.by_extender = by_extender
        if not self._land(queued, now):
            return
        uid = queued.pod.uid
        woken = any(wakes(e, pod_uid=uid, by_extender=by_extender) for e in queued.missed)
        (self._backing_off if woken else self._rejected)[uid] = queued

    def on_event(self, event: ClusterEvent, now: float) -> None:
        """Wake the pods that an event concerns; those still backing off wait for that to end."""
        for queued in self._in_flight.values():
            queued.missed.append(event)
        for uid, queued in list(self._rejected.items()):
            if wakes(event, pod_uid=uid, by_extender=queued.by_extender):
                self._wake(queued, now)

    def next_at(self, now: float) -> float | None:
        """Return when time alone will make a pod ready: ``now`` if one is, ``None`` if never."""
        self._advance(now)
        if self._active:
            return now
        times = [self._backoff_ends(one) for one in self._backing_off.values()]
        if self._rejected and self._flushed_at is not None:
            times.append(self._flushed_at + FLUSH_EVERY_SECONDS)
        return min(times, default=None)

    def _holder(self, uid: str) -> dict[str, QueuedPod] | None:
        parts = (self._active, self._backing_off, self._rejected, self._in_flight)
        return next((part for part in parts if uid in part), None)

    def _land(self, queued: QueuedPod, now: float) -> bool:
        """Return whether the pod still wants to be scheduled."""
        queued.failed_at = now
        return self._in_flight.pop(queued.pod.uid, None) is not None

    def _wake(self, queued: QueuedPod, now: float) -> None:
        del self._rejected[queued.pod.uid]
        ready = self._backoff_ends(queued) <= now
        (self._active if ready else self._backing_off)[queued.pod.uid] = queued

    def _advance(self, now: float) -> None:
        for uid, queued in list(self._backing_off.items()):
            if self._backoff_ends(queued) <= now:
                self._active[uid] = self._backing_off.pop(uid)
        if self._flushed_at is None:
            self._flushed_at = now
        if now - self._flushed_at >= FLUSH_EVERY_SECONDS:
            # The ticker keeps its beat whatever the clock jumps over.
            beats = (now - self._flushed_at) // FLUSH_EVERY_SECONDS
            self._flushed_at += beats * FLUSH_EVERY_SECONDS
            for queued in list(self._rejected.values()):
                if self._flushed_at - queued.failed_at > LONGEST_WAIT_SECONDS:
                    self._wake(queued, now)

    def _backoff_ends(self, queued: QueuedPod) -> float:
        exponent = max(0, min(queued.attempts - 1, 30))
        wait: float = min(self._longest, self._initial * 2**exponent)
        return queued.failed_at + wait
