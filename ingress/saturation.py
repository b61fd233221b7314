"""How full the engines are (pure): alarm levels, and one figure to scale by.

The saturation of a model is 1 where it is used as far as admission lets it be: each engine
counts by its KV in use, against what may be in use, or by its backlog, against a target wait,
whichever is more; requests that found no room come on top.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nearkv.ingress.routing import Gate

ALARM_LEVELS = (("warning", 0.20), ("critical", 0.10))
"""Names and free shares of KV below which an engine counts (the article's 7.3)."""


@dataclass(frozen=True, slots=True)
class Fullness:
    """One engine: the share of its KV free, its size, and the wait of a new request."""

    free_ratio: float | None
    total_bytes: int | None
    wait_seconds: float


def engines_below(level_ratio: float, engines: Iterable[Fullness]) -> int:
    """Return how many engines have less free than a level; unknown is not zero."""
    return sum(e.free_ratio is not None and e.free_ratio < level_ratio for e in engines)


def saturation_ratio(
    engines: Iterable[Fullness], waiting: int, gate: Gate, target_wait_seconds: float
) -> float | None:
    """Return how much of a model's capacity is in use; above 1, requests wait.

    ``None`` where nothing is known of any engine and nobody waits: a pool whose agents are silent
    must not look idle.
    """
    parts = [_engine_ratio(engine, gate, target_wait_seconds) for engine in engines]
    if not parts:
        return 1.0 if waiting else None
    return sum(parts) / len(parts) + waiting / len(parts)


def _engine_ratio(engine: Fullness, gate: Gate, target_wait_seconds: float) -> float:
    by_wait = engine.wait_seconds / target_wait_seconds
    if engine.free_ratio is None:
        return by_wait
    kept_ratio = gate.min_free_ratio
    if engine.total_bytes:
        kept_ratio = min(kept_ratio, gate.min_free_bytes / engine.total_bytes)
    usable = max(1.0 - kept_ratio, 1e-9)
    return max(by_wait, (1.0 - engine.free_ratio) / usable)
