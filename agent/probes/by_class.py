"""What paths to this node cost by class of distance (pure): medians over the pairs measured."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from nearkv.path_cost import PathCost
from nearkv.state.model import PathClass


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """What is known of a pair of nodes: the cost, from how many measurements, when and how."""

    source: str
    path: str
    cost: PathCost
    count: int
    at: float
    by: str


def class_costs(
    measured: Iterable[MeasuredCost], class_of: Callable[[str], str], now: float
) -> list[PathClass]:
    """Return the costs by class and transport."""
    groups: dict[tuple[str, str], list[MeasuredCost]] = {}
    for pair in measured:
        groups.setdefault((class_of(pair.source), pair.path), []).append(pair)
    return [
        PathClass(
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
