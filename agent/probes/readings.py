"""What probes found of one path (pure; ``now`` in monotonic seconds).

What counts is the median of the last few, so that one that was unlucky does not. When two in a
row say alike that the path has become another, what was before them is forgotten.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

from nearkv.path_cost import PathCost

_KEPT = 9
_FORGET_SECONDS = 1800.0
_SHIFT_RATIO = 1.5
_LEAST_SETUP_SECONDS = 1e-6
_TWO = 2


@dataclass(frozen=True, slots=True)
class ProbeReading:
    """One probe: set-up seconds, bytes per second after that, and when it ended."""

    setup_seconds: float
    bytes_per_second: float
    at: float


class ProbeReadings:
    """The last probes of one path."""

    def __init__(self) -> None:
        self._kept: deque[ProbeReading] = deque(maxlen=_KEPT)
        self.is_suspect = False

    def __len__(self) -> int:
        """Return how many count."""
        return len(self._kept)

    @property
    def at(self) -> float | None:
        """When the last one ended."""
        return self._kept[-1].at if self._kept else None

    @property
    def cost(self) -> PathCost | None:
        """The median; ``None`` before the first. Of two that differ, the first counts."""
        if not self._kept:
            return None
        counted = list(self._kept)
        if self.is_suspect and len(counted) == _TWO:
            counted.pop()
        return PathCost(
            median(reading.setup_seconds for reading in counted),
            median(reading.bytes_per_second for reading in counted),
        )

    def clear(self) -> None:
        """Forget all: others have found out that the path is another now."""
        self._kept.clear()
        self.is_suspect = False

    def add(self, reading: ProbeReading) -> None:
        """Take a probe; ``is_suspect`` says afterwards that it differs from those before it."""
        while self._kept and reading.at - self._kept[0].at >= _FORGET_SECONDS:
            self._kept.popleft()
        before = self.cost
        was_suspect, self.is_suspect = self.is_suspect, _differs(reading, before)
        if was_suspect and self.is_suspect and not _differs(reading, _cost_of(self._kept[-1])):
            last = self._kept[-1]
            self._kept.clear()
            self._kept.append(last)
            self.is_suspect = False
        self._kept.append(reading)


def ratio_between(one: float, other: float) -> float:
    """Return how many times the larger of two positive figures is the smaller."""
    return max(one, other) / max(min(one, other), 1e-12)


def _cost_of(reading: ProbeReading) -> PathCost:
    return PathCost(reading.setup_seconds, reading.bytes_per_second)


def _differs(reading: ProbeReading, cost: PathCost | None) -> bool:
    return cost is not None and (
        ratio_between(reading.bytes_per_second, cost.bytes_per_second) > _SHIFT_RATIO
    )


def reading_of(
    *,
    asking_seconds: float,
    small_seconds: float,
    large_seconds: float,
    large_bytes: int,
    at: float,
) -> ProbeReading:
    """Return what a probe says, from the times that its parts took.

    A pull's set-up is the peer's leave and the first byte; what it takes beyond that is the
    bytes.
    """
    moving_seconds = max(large_seconds - small_seconds, large_seconds / 10)
    return ProbeReading(
        setup_seconds=max(asking_seconds + small_seconds, _LEAST_SETUP_SECONDS),
        bytes_per_second=large_bytes / max(moving_seconds, 1e-9),
        at=at,
    )
