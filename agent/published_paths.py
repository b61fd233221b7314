"""The path costs that a node publishes, with the times of their measurements (pure).

What is published says how old it is when it is sent. So a measurement that repeats the one
before it is news, too, once in a while: else consumers would take it for an old one.
"""

import msgspec

from nearkv.state.model import PathClasses, PathReading

_RENEW_SECONDS = 60.0

Pair = tuple[str, str]
"""Source node, target node."""


class PublishedPaths:
    """Keeps what is told of paths, and what is to be told; ``now`` in monotonic seconds."""

    def __init__(self) -> None:
        self.readings: dict[Pair, PathReading] = {}
        self.pending: dict[Pair, PathReading] = {}
        self.classes: PathClasses | None = None
        self.pending_classes: PathClasses | None = None
        self._measured_at: dict[Pair, float] = {}
        self._classes_at = 0.0

    def put(self, reading: PathReading, now: float) -> None:
        """Take a pair's cost; it is pending if that is news."""
        pair = (reading.source, reading.target)
        at = now - reading.age_seconds
        known = self.readings.get(pair)
        is_newer = reading.points > 0 and at >= self._measured_at.get(pair, at) + _RENEW_SECONDS
        if known is None or is_newer or _ageless(known) != _ageless(reading):
            self.readings[pair] = self.pending[pair] = reading
            self._measured_at[pair] = at

    def drop(self, pair: Pair) -> None:
        """Tell nobody new of a pair."""
        self.readings.pop(pair, None)
        self.pending.pop(pair, None)
        self._measured_at.pop(pair, None)

    def put_classes(self, classes: PathClasses, now: float) -> None:
        """Take the costs by class; they are pending if something but their age changed."""
        known = self.classes
        is_old = now - self._classes_at >= _RENEW_SECONDS
        if known is None or is_old or _ageless_classes(known) != _ageless_classes(classes):
            self.classes = self.pending_classes = classes
            self._classes_at = now

    def measured_at(self, pair: Pair) -> float | None:
        """Return when a pair was measured, as far as is published."""
        return self._measured_at.get(pair)

    def sealed(self) -> None:
        """Take it that what was pending is told."""
        self.pending = {}
        self.pending_classes = None

    def aged(self, now: float) -> tuple[PathReading, ...]:
        """Return all pairs with their ages of now."""
        return tuple(
            msgspec.structs.replace(reading, age_seconds=max(now - self._measured_at[pair], 0.0))
            if reading.points
            else reading
            for pair, reading in self.readings.items()
        )

    def aged_classes(self, now: float) -> PathClasses | None:
        """Return the costs by class with their ages of now."""
        if self.classes is None:
            return None
        passed_seconds = max(now - self._classes_at, 0.0)
        costs = tuple(
            msgspec.structs.replace(cost, age_seconds=cost.age_seconds + passed_seconds)
            for cost in self.classes.costs
        )
        return msgspec.structs.replace(self.classes, costs=costs)


def _ageless(reading: PathReading) -> PathReading:
    return msgspec.structs.replace(reading, age_seconds=0.0)


def _ageless_classes(classes: PathClasses) -> PathClasses:
    costs = tuple(msgspec.structs.replace(cost, age_seconds=0.0) for cost in classes.costs)
    return msgspec.structs.replace(classes, costs=costs)
