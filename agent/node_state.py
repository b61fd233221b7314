"""The node's state as a whole: its trackers, its log, and who waits for news of it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Protocol

from nearkv.agent.engine_tracking import EngineTracker
from nearkv.agent.snapshots import SharedSnapshot, Snapshots
from nearkv.agent.state_log import StateLog
from nearkv.agent.table_budget import keep_within
from nearkv.state.model import Cursor

SNAPSHOT_REASONS = ("first", "cursor_unknown", "fell_behind", "busy")
"""Why a consumer got a snapshot: it asked for one, its place is not known, or is not kept any
more; ``busy`` says that it did not get one now."""
_BUSY_SECONDS = 0.01


class TransferView(Protocol):
    """What status and metrics show of the node's KV transfer."""

    def describe(self) -> dict[str, Any]:
        """Return the transfer as plain JSON types."""
        ...

    def problems(self) -> list[str]:
        """Return what is wrong with it, in words for people."""
        ...


class NodePart(Protocol):
    """A further part of the node, which status shows under its name."""

    def describe(self) -> dict[str, Any]:
        """Return the part as plain JSON types."""
        ...

    def problems(self) -> list[str]:
        """Return what is wrong with it, in words for people."""
        ...


class NodeState:
    """Holds the trackers of a node and wakes consumers when something changed.

    Changes are sealed ``flush_seconds`` after the first of them, so that a burst of engine
    events becomes one delta; while there are always some, a little less often, since each delta
    costs every consumer a write. What is urgent is sealed at once.
    """

    def __init__(
        self,
        log: StateLog,
        *,
        boot: str,
        flush_seconds: float,
        now: Callable[[], float],
        tables_limit_bytes: int = 1 << 30,
    ) -> None:
        self.log = log
        self.boot = boot
        self.trackers: dict[str, EngineTracker] = {}
        self.problems: dict[str, str] = {}
        self.consumers = 0
        self.watch_failures = 0
        """How often watching an engine failed, and began anew."""
        self.transfer: TransferView | None = None
        self.parts: dict[str, NodePart] = {}
        self._tables_limit_bytes = tables_limit_bytes
        self._flush_seconds = flush_seconds
        self._now = now
        self._flush: asyncio.TimerHandle | None = None
        self._sealed_at = float("-inf")
        self._news = asyncio.Event()
        self.snapshots_served: Counter[str] = Counter()
        self._snapshots = Snapshots(self._make_snapshot, ring_limit_bytes=log.ring_limit_bytes)

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
        if self.log.is_urgent:
            self._seal()
        elif self._flush is None and self.log.has_pending:
            busy_seconds = self._sealed_at + _BUSY_SECONDS - self._now()
            delay_seconds = max(self._flush_seconds, busy_seconds) if self._flush_seconds else 0.0
            loop = asyncio.get_running_loop()
            self._flush = loop.call_later(delay_seconds, self._seal)

    def _seal(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        # Here and not at each change: a node may have a hundred ranks to look at.
        keep_within(self.trackers.values(), self._tables_limit_bytes)
        if self.log.seal() is not None:
            self._sealed_at = self._now()
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
        return self._make_snapshot().frames()

    def snapshot_to_follow(self) -> SharedSnapshot:
        """Return a snapshot for a consumer that goes on with deltas: it may be a moment old.

        Raises :class:`~nearkv.agent.errors.SnapshotBusyError` when too many are being read.
        """

        def is_known(cursor: Cursor) -> bool:
            return self.log.after(cursor, limit_bytes=0) is not None

        return self._snapshots.get(self.log.sealed_bytes, is_known=is_known)

    def _make_snapshot(self) -> SharedSnapshot:
        self._seal()
        blocks = [
            (engine, tier, keys)
            for engine, tracker in self.trackers.items()
            for tier, keys in tracker.table.keys_by_tier().items()
        ]
        frames = self.log.snapshot(iter(blocks), now=self._now())
        first = next(frames)  # binds the cursor of this moment
        return SharedSnapshot(
            self.log.cursor, chain((first,), frames), sealed_bytes=self.log.sealed_bytes
        )

    def ages_seconds(self) -> dict[str, float]:
        """Return the age of each engine's last reading, leaving out what was never read."""
        now = self._now()
        return {
            engine: now - tracker.metrics_at
            for engine, tracker in self.trackers.items()
            if tracker.metrics_at is not None
        }
