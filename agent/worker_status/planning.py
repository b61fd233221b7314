"""When a node writes which of its WorkerStatuses (pure).

All nodes of a cluster share one API server, so what counts is the sum: 5,000 of them may not
write more than 50 times a second. Three things keep to that. Writes without news take turns, one
in ``heartbeat_seconds`` for the whole node. News wait a random while, since their cause may have
hit every node; only those that go with a change of the pod itself, for which the kubelet writes
as well, come soon. And a token bucket bounds the node however much its news swing.

Times are monotonic seconds, ``draw`` returns random numbers from 0 to 1.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """How rarely is written; all in seconds but ``jitter_ratio`` and ``burst``.

    ``start_spread_seconds``, for each object, spreads the first look at those that may be there
    already, of an agent that has just started: a rollout starts many.
    """

    heartbeat_seconds: float = 300.0
    jitter_ratio: float = 0.2
    spread_seconds: float = 150.0
    urgent_spread_seconds: float = 5.0
    start_spread_seconds: float = 300.0
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
    refusals: int = 0


class WritePlan:
    """Decides; told what happened by whoever writes."""

    def __init__(self, limits: WriteLimits, *, now: float, draw: Callable[[], float]) -> None:
        self._limits = limits
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
        self._add(key, now, self._limits.urgent_spread_seconds)

    def start(self, keys: Collection[str], now: float) -> None:
        """Take on the objects of pods that were there before the agent."""
        for key in keys:
            self._add(key, now, self._limits.start_spread_seconds * len(keys))

    def _add(self, key: str, now: float, spread: float) -> None:
        self._objects.setdefault(key, _Object(introduce_at=now + self._draw() * spread))

    def drop(self, key: str) -> None:
        """Forget an object that is gone."""
        self._objects.pop(key, None)

    def offer(self, key: str, news: bytes, urgent: bytes, now: float) -> None:
        """Say what an object should tell; ``urgent`` is the part that should be told soon."""
        known = self._objects[key]
        if news == known.told:
            known.news_at = _NEVER
            return
        is_urgent = urgent != known.urgent_told
        spread = self._limits.urgent_spread_seconds if is_urgent else self._limits.spread_seconds
        if known.news_at > now + spread:
            known.news_at = now + self._draw() * spread

    def next_errand(self, now: float) -> Errand | None:
        """Return what to write now, ``None`` for nothing."""
        self._fill(now)
        due = [
            (at, key, act)
            for key, each in self._objects.items()
            for at, act in [self._due(each)]
            if at <= now
        ]
        if not due or now < self._silent_until:
            return None
        _, key, act = min(due, key=lambda item: item[0])
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
        if known.free_writes:
            known.free_writes -= 1
        else:
            self._spend()
        known.told, known.urgent_told = news, urgent
        known.news_at = _NEVER
        self._beat(known, now)

    def vanished(self, key: str, now: float) -> None:
        """Take it that an object is not there, or not ours: it is made anew."""
        known = self._objects.get(key)
        if known is not None:
            known.introduce_at = now + self._draw() * self._limits.urgent_spread_seconds
            known.told = known.urgent_told = b""
            known.free_writes = 1
            known.is_again = True

    def refused(self, key: str, now: float) -> None:
        """Take it that the server will not have this object: it is left alone, longer each time.

        Some refusals pass: that of an object of an earlier pod of the same name, until it is gone.
        """
        known = self._objects.get(key)
        if known is not None:
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

    def _due(self, known: _Object) -> tuple[float, Act]:
        """Return when an object is due, and for what."""
        if known.introduce_at < _NEVER:
            at = max(known.introduce_at, known.held_until)
            return max(at, self._token_at()) if known.is_again else at, Act.INTRODUCE
        at = max(min(known.news_at, known.heartbeat_at), known.held_until)
        if not known.free_writes:
            at = max(at, self._token_at())
        return at, Act.REPORT

    def _token_at(self) -> float:
        """Return when there is a token."""
        missing = 1.0 - self._tokens
        return self._tokens_at + max(missing, 0.0) * self._limits.seconds_per_write

    def _spend(self) -> None:
        if self._limits.seconds_per_write:
            self._tokens = max(self._tokens - 1.0, 0.0)

    def _fill(self, now: float) -> None:
        per_write = self._limits.seconds_per_write
        if per_write:
            gained = max(now - self._tokens_at, 0.0) / per_write
            self._tokens = min(self._tokens + gained, float(self._limits.burst))
        self._tokens_at = max(now, self._tokens_at)

    def _beat(self, known: _Object, now: float) -> None:
        jitter = self._limits.jitter_ratio
        factor = 1.0 - jitter + 2.0 * jitter * self._draw()
        known.heartbeat_at = now + self.interval_seconds * factor
