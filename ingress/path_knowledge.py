"""What one agent's stream says of the costs of paths, and how it is used (pure).

A pair that was measured lately counts. One that nobody measured, or not for long, is taken to
cost what others of its class do, as the target's agent found, which pulls, else the source's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from nearkv.path_class import SAME_NODE, UNKNOWN, class_between
from nearkv.state.model import PathClass, PathClasses, PathReading

NodePair = tuple[str, str]
"""Source node, target node."""


@dataclass(frozen=True, slots=True)
class _ClassCost:
    reading: PathReading
    measured_at: float


@dataclass(slots=True)
class AgentPaths:
    """The costs that one agent tells; ``now`` is monotonic."""

    readings: dict[NodePair, PathReading] = field(default_factory=dict)
    classes: PathClasses | None = None
    _measured_at: dict[NodePair, float] = field(default_factory=dict)
    _by_class: dict[str, _ClassCost] = field(default_factory=dict)

    def take(self, readings: Iterable[PathReading], now: float) -> None:
        """Take costs of pairs."""
        for reading in filter(_can_be, readings):
            pair = (reading.source, reading.target)
            self.readings[pair] = reading
            self._measured_at[pair] = now - reading.age_seconds

    def take_classes(self, classes: PathClasses | None, now: float) -> None:
        """Take costs by class, all of them; ``None`` is no news."""
        if classes is None:
            return
        self.classes = classes
        # Of several transports the one that most pairs of the class go by.
        self._by_class = {
            cost.name: _ClassCost(_reading_of(cost), now - cost.age_seconds)
            for cost in sorted(classes.costs, key=lambda cost: (cost.pairs, cost.count))
            if _can_be(cost)
        }

    def measured(self, pair: NodePair, *, since: float) -> PathReading | None:
        """Return the cost of a pair if it was measured since then."""
        reading = self.readings.get(pair)
        if reading is None or not reading.points or self._measured_at[pair] < since:
            return None
        return reading

    def of_class(self, name: str, *, since: float) -> PathReading | None:
        """Return the cost of a class if one of its pairs was measured since then."""
        cost = self._by_class.get(name)
        return None if cost is None or cost.measured_at < since else cost.reading


def path_between(
    pair: NodePair, source: AgentPaths | None, target: AgentPaths | None, *, since: float
) -> PathReading | None:
    """Return what moving KV between two nodes costs, ``None`` where nobody says.

    ``source`` and ``target`` are what their agents tell. What was measured before ``since``
    counts only where there is nothing newer of its class.
    """
    tellers = [teller for teller in (target, source) if teller is not None]
    for teller in tellers:
        reading = teller.measured(pair, since=since)
        if reading is not None:
            return reading
    name = _class_of(pair, source, target)
    if name != UNKNOWN:
        for teller in tellers:
            reading = teller.of_class(name, since=since)
            if reading is not None:
                return reading
    for teller in tellers:
        if pair in teller.readings:
            return teller.readings[pair]
    return None


def _class_of(pair: NodePair, source: AgentPaths | None, target: AgentPaths | None) -> str:
    if pair[0] == pair[1]:
        return SAME_NODE
    one = None if source is None else source.classes
    other = None if target is None else target.classes
    if one is None or other is None:
        return UNKNOWN
    return class_between(one.labels, other.labels, other.levels)


def _can_be(cost: PathReading | PathClass) -> bool:
    """Tell whether figures make sense; an agent may send anything."""
    return (
        0 <= cost.setup_seconds < math.inf
        and 0 < cost.bytes_per_second < math.inf
        and 0 <= cost.age_seconds < math.inf
    )


def _reading_of(cost: PathClass) -> PathReading:
    return PathReading(
        source="",
        target="",
        path=cost.path,
        setup_seconds=cost.setup_seconds,
        bytes_per_second=cost.bytes_per_second,
        points=cost.count,
        age_seconds=cost.age_seconds,
    )
