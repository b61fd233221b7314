"""When a node writes which of its WorkerStatuses (pure).

All nodes of a cluster share one API server, so what counts is the sum: 5,000 of them may not
write more than 50 times in any second. Three things keep to that. A node writes at moments of its
own (:mod:`~nearkv.agent.worker_status.phasing`), once at each: news may have a cause that has hit
every node. Only those that go with a change of the pod itself, for which the kubelet writes as
well, come soon. Writes without news take turns, one in ``heartbeat_seconds`` for the whole node.
And a token bucket bounds the node however much its news swing.

Times are monotonic seconds, ``draw`` returns random numbers from 0 to 1.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from nearkv.agent.worker_status.phasing import Phase

_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """How rarely is written; all in seconds but ``jitter_ratio`` and ``burst``."""

    heartbeat_seconds: float = 400.0
    jitter_ratio: float = 0.2
    urgent_spread_seconds: float = 5.0
    seconds_per_write: float = 200.0
    burst: int = 3
    refused_pause_seconds: float = 15.0
    first_pause_seconds: float = 120.0
    longest_pause_seconds: float = 300.0


class Act(Enum):
    """What to do with an object."""

    INTRODUCE = "introduce"
    """Make it, or see what it says if it is there."""
    REPORT = "report"
    """Write its status."""


@dataclass(frozen=True, slots=True)
class Errand:
    """A write that is due; ``key`` names the object."""

    key: str
    act: Act


@dataclass(slots=True)
class _Object:
    introduce_at: float
    heartbeat_at: float = _NEVER
    news_at: float = _NEVER
    told: bytes = b""
    urgent_told: bytes = b""
    free_writes: int = 1
    held_until: float = 0.0
    is_again: bool = False
    is_soon: bool = False
    """Whether it goes with a change of the pod, and does not wait for the node's moment."""
    may_hurry: bool = False
    """Whether such a change may come soon: not before an agent that has just started knows what
    was told last, since what has changed with it has changed with all of them."""
    refusals: int = 0


class WritePlan:
    """Decides; told what happened by whoever writes. ``phase`` is the node's own."""

    def __init__(
        self, limits: WriteLimits, *, phase: Phase, now: float, draw: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._phase = phase
        self._next_moment = now
        self._draw = draw
        self._objects: dict[str, _Object] = {}
        self._tokens = float(limits.burst)
        self._tokens_at = now
        self._silent_until = 0.0
        self._failures = 0

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def interval_seconds(self) -> float:
        """The usual time between two writes of one object without news."""
        return self._limits.heartbeat_seconds * max(len(self._objects), 1)

    @property
    def is_behind(self) -> bool:
        """Whether the last write failed."""
        return self._failures > 0

    def add(self, key: str, now: float) -> None:
        """Take on the object of a pod that has just come."""
        introduce_at = now + self._draw() * self._limits.urgent_spread_seconds
        self._objects.setdefault(key, _Object(introduce_at, is_soon=True, may_hurry=True))

    def start(self, keys: Collection[str], now: float) -> None:
        """Take on the objects of pods that were there before the agent: a rollout starts many."""
        for key in keys:
            self._objects.setdefault(key, _Object(now))

    def drop(self, key: str) -> None:
        """Forget an object that is gone."""
        self._objects.pop(key, None)

    def offer(self, key: str, news: bytes, urgent: bytes, now: float) -> None:
        """Say what an object should tell; ``urgent`` is the part that should be told soon."""
        known = self._objects[key]
        if news == known.told:
            known.news_at = _NEVER
            known.is_soon, known.may_hurry = False, True
        elif known.may_hurry and not known.is_soon and urgent != known.urgent_told:
            known.news_at = now + self._draw() * self._limits.urgent_spread_seconds
            known.is_soon = True
        elif known.news_at == _NEVER:
            known.news_at = now

    def next_errand(self, now: float) -> Errand | None:
        """Return what to write now, ``None`` for nothing."""
        self._fill(now)
        due = [
            (at, each.refusals, since, key, act)
            for key, each in self._objects.items()
            for at, since, act in [self._due(each)]
            if at <= now
        ]
        if not due or now < self._silent_until:
            return None
        # Of those that share a moment the one comes first that has waited longest.
        *_, key, act = min(due, key=lambda item: item[:3])
        return Errand(key, act)

    def next_at(self, now: float) -> float:
        """Return when the next errand is due if nothing changes; infinity for never."""
        self._fill(now)
        soonest = min((self._due(each)[0] for each in self._objects.values()), default=_NEVER)
        return max(soonest, self._silent_until)

    def introduced(self, key: str, now: float, *, told: tuple[bytes, bytes] | None) -> None:
        """Take it that an object is there; ``told`` is its news and urgent part, if it has any."""
        known = self._objects.get(key)
        self._succeeded(known)
        if known is None:
            return
        known.introduce_at = _NEVER
        self._pass_moment(known, now)
        if known.is_again:
            self._spend()
        if told is None:
            known.news_at = now
        else:
            known.told, known.urgent_told = told
            known.free_writes = 0
            # What differs, once looked at again, waits its turn.
            known.news_at = _NEVER
            known.heartbeat_at = now + self._draw() * self.interval_seconds

    def reported(self, key: str, news: bytes, urgent: bytes, now: float) -> None:
        """Take it that a status was written."""
        known = self._objects.get(key)
        self._succeeded(known)
        if known is None:
            return
        self._pass_moment(known, now)
        if known.free_writes:
            known.free_writes -= 1
        else:
            self._spend()
        known.told, known.urgent_told = news, urgent
        known.news_at = _NEVER
        known.is_soon, known.may_hurry = False, True
        self._beat(known, now)

    def vanished(self, key: str, now: float) -> None:
        """Take it that an object is not there, or not ours: it is made anew."""
        known = self._objects.get(key)
        if known is not None:
            self._pass_moment(known, now)
            # Whoever removed it may have removed all of them.
            known.introduce_at = now
            known.told = known.urgent_told = b""
            known.free_writes = 1
            known.is_again = True
            known.is_soon = known.may_hurry = False

    def refused(self, key: str, now: float) -> None:
        """Take it that the server will not have this object: it is left alone, longer each time.

        Some refusals pass: that of an object of an earlier pod of the same name, until it is gone.
        """
        known = self._objects.get(key)
        if known is not None:
            self._pass_moment(known, now)
            pause = self._backed_off(self._limits.refused_pause_seconds, known.refusals)
            known.refusals += 1
            known.held_until = now + pause

    def failed(self, now: float, retry_after_seconds: float | None = None) -> float:
        """Take it that nothing gets through; return for how long nothing is tried."""
        pause = self._backed_off(self._limits.first_pause_seconds, self._failures)
        self._failures += 1
        if retry_after_seconds is not None:
            pause = max(pause, retry_after_seconds * (1.0 + self._draw() / 5))
        self._silent_until = now + pause
        return pause

    def _backed_off(self, first_seconds: float, times: int) -> float:
        pause = min(first_seconds * 2.0 ** min(times, 16), self._limits.longest_pause_seconds)
        return pause * (0.5 + self._draw())

    def _succeeded(self, known: _Object | None) -> None:
        if self._failures:
            # After an outage every node has something to say: what was saved up is lost.
            self._tokens = min(self._tokens, 1.0)
        self._failures = 0
        self._silent_until = 0.0
        if known is not None:
            known.refusals = 0

    def _due(self, known: _Object) -> tuple[float, float, Act]:
        """Return when an object is due, since when it would have liked to be, and for what."""
        if known.introduce_at < _NEVER:
            since, act, is_free = known.introduce_at, Act.INTRODUCE, not known.is_again
        else:
            since = known.news_at
            if not known.is_soon:
                since = min(since, known.heartbeat_at)
            act, is_free = Act.REPORT, known.free_writes > 0
        at = max(since, known.held_until)
        if not known.is_soon or self._failures:
            at = self._phase.next_at(max(at, self._next_moment, self._silent_until))
        elif not is_free:
            at = max(at, self._token_at())
        return at, since, act

    def _pass_moment(self, known: _Object, now: float) -> None:
        """Take it that the node's moment was used, if a write was one that waits for it."""
        if not known.is_soon:
            self._next_moment = max(self._next_moment, now + self._phase.period_seconds / 2)

    def _token_at(self) -> float:
        """Return when there is a token."""
        missing = 1.0 - self._tokens
        return self._tokens_at + max(missing, 0.0) * self._limits.seconds_per_write

    def _spend(self) -> None:
        if self._limits.seconds_per_write:
            self._tokens = max(self._tokens - 1.0, 0.0)
            if self._tokens < 1.0:
                # A moment that comes a little before the token is as good.
                early_seconds = self._phase.period_seconds / 4
                self._next_moment = max(self._next_moment, self._token_at() - early_seconds)

    def _fill(self, now: float) -> None:
        per_write = self._limits.seconds_per_write
        if per_write:
            gained = max(now - self._tokens_at, 0.0) / per_write
            self._tokens = min(self._tokens + gained, float(self._limits.burst))
        self._tokens_at = max(now, self._tokens_at)

    def _beat(self, known: _Object, now: float) -> None:
        jitter = self._limits.jitter_ratio
        factor = 1.0 - jitter + 2.0 * jitter * self._draw()
        # The node's moment that is nearest, not the next one.
        early_seconds = self._phase.period_seconds / 2
        known.heartbeat_at = now + self.interval_seconds * factor - early_seconds
