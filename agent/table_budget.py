"""Keeping the block tables of a node's engines within their memory, all together (pure)."""

from collections.abc import Collection

from nearkv.agent.engine_tracking import EngineTracker

_FULL_RATIO = 0.98
"""A table is kept a little below its own bound: beyond that it refuses what is new."""


def keep_within(trackers: Collection[EngineTracker], limit_bytes: int) -> int:
    """Evict blocks used least until each table, and all together, fit; returns the bytes freed."""
    freed = 0
    total_bytes = 0
    for tracker in trackers:
        over_bytes = tracker.table.estimated_bytes - round(_FULL_RATIO * tracker.table.limit_bytes)
        if over_bytes > 0:
            freed += _evict(tracker, over_bytes)
        total_bytes += tracker.table.estimated_bytes
    over_bytes = total_bytes - limit_bytes
    while over_bytes > 0:
        oldest = _least_used(trackers)
        evicted = 0 if oldest is None else oldest.evict(over_bytes)
        if not evicted:
            break
        over_bytes -= evicted
        freed += evicted
    return freed


def _evict(tracker: EngineTracker, over_bytes: int) -> int:
    freed = 0
    while freed < over_bytes:
        evicted = tracker.evict(over_bytes - freed)
        if not evicted:
            break
        freed += evicted
    return freed


def _least_used(trackers: Collection[EngineTracker]) -> EngineTracker | None:
    """Return whose blocks go first: one that keeps orphans, then whose chain is used least."""
    for tracker in trackers:
        if tracker.table.has_guests:
            return tracker
    uses = {
        tracker: used_at
        for tracker in trackers
        if (used_at := tracker.table.oldest_use_at) is not None
    }
    return min(uses, key=uses.__getitem__, default=None)
