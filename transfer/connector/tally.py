"""Counting what became of loads and leases, for the engine's own metrics (pure)."""

import threading
from collections import Counter


class Tally:
    """Counts by (kind, outcome); taken and emptied once per engine step.

    Both the engine's thread and the client's count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, outcome: str) -> None:
        """Count one."""
        with self._lock:
            self._counts[kind, outcome] += 1

    def take(self) -> dict[str, int]:
        """Return what was counted since the last call, as ``kind/outcome``."""
        if not self._counts:
            return {}
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return {f"{kind}/{outcome}": count for (kind, outcome), count in taken.items()}
