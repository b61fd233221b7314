"""The node's state as a whole: its trackers, its log, and who waits for news of it."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Protocol

from nearkv.agent.engine_tracking import EngineTracker
from nearkv.agent.state_log import StateLog


class TransferView(Protocol):
    """What status and metrics show of the node's KV transfer."""

    def describe(self) -> dict[str, Any]:
        """Return the transfer as plain JSON types."""
        ...

    def problems(self) -> list[str]:
        """Return what is wrong with it, in words for people."""
        ...


class NodeState:
    """Holds the trackers of a node and wakes consumers when something changed.

    Changes are sealed ``flush_seconds`` after the first of them, so that a burst of engine
    events becomes one delta.
    """

    def __init__(
        self, log: StateLog, *, boot: str, flush_seconds: float, now: Callable[[], float]
    ) -> None:
        self.log = log
        self.boot = boot
        self.trackers: dict[str, EngineTracker] = {}
        self.problems: dict[str, str] = {}
        self.consumers = 0
        self.transfer: TransferView | None = None
        self._flush_seconds = flush_seconds
        self._now = now
        self._flush: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    def now(self) -> float:
        """Return monotonic seconds."""
        return self._now()

    def add(self, tracker: EngineTracker) -> None:
        """Start publishing an engine rank."""
        self.trackers[tracker.identity.id] = tracker
        self.log.put_info(tracker.info)
        self.changed()

    def drop(self, engine: str) -> None:
        """Stop publishing an engine rank: it is gone for good."""
        self.trackers.pop(engine, None)
        self.log.drop_engine(engine)
        self.changed()

    def refresh(self, engine: str) -> None:
        """Publish an engine rank anew: how its KV can move has changed."""
        self.log.refresh_info(engine)
        self.changed()

    def changed(self) -> None:
        """Say that there may be something to send."""
        if self._flush is None and self.log.has_pending:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_later(self._flush_seconds, self._seal)

    def _seal(self) -> None:
        self._flush = None
        if self.log.seal() is not None:
            news, self._news = self._news, asyncio.Event()
            news.set()

    async def wait_for_news(self, timeout_seconds: float) -> bool:
        """Wait until a delta is sealed; False when the time is up first."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    def snapshot(self) -> Iterator[bytes]:
        """Return the frames of a snapshot of this moment.

        The keys are copied before this returns; the frames are made as they are read.
        """
        self._seal()
        blocks = [
            (engine, tier, keys)
            for engine, tracker in self.trackers.items()
            for tier, keys in tracker.table.keys_by_tier().items()
        ]
        frames = self.log.snapshot(iter(blocks))
        first = next(frames)  # binds the cursor of this moment
        return chain((first,), frames)

    def ages_seconds(self) -> dict[str, float]:
        """Return the age of each engine's last reading, leaving out what was never read."""
        now = self._now()
        return {
            engine: now - tracker.metrics_at
            for engine, tracker in self.trackers.items()
            if tracker.metrics_at is not None
        }
