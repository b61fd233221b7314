"""What paths to this node cost by class of distance (pure): medians over the pairs measured."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

import msgspec

from nearkv.path_cost import PathCost

SAME_NODE = "same_node"
"""The class of a node and itself."""


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """What is known of a pair of nodes: the cost, from how many measurements, when and how."""

    source: str
    path: str
    cost: PathCost
    count: int
    at: float
    by: str


class ClassCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a class costs over one transport; ``count`` adds up the measurements of its pairs."""

    name: str
    path: str
    setup_seconds: float
    bytes_per_second: float
    pairs: int
    count: int
    age_seconds: float


def class_costs(
    measured: Iterable[MeasuredCost], class_of: Callable[[str], str], now: float
) -> list[ClassCost]:
    """Return the costs by class and transport."""
    groups: dict[tuple[str, str], list[MeasuredCost]] = {}
    for pair in measured:
        groups.setdefault((class_of(pair.source), pair.path), []).append(pair)
    return [
        ClassCost(
            name=name,
            path=path,
            setup_seconds=median(pair.cost.setup_seconds for pair in pairs),
            bytes_per_second=median(pair.cost.bytes_per_second for pair in pairs),
            pairs=len(pairs),
            count=sum(pair.count for pair in pairs),
            age_seconds=round(now - max(pair.at for pair in pairs), 3),
        )
        for (name, path), pairs in sorted(groups.items())
    ]
