"""Placement in a simulated cluster: predicted time to fetch KV, by who places the pods.

The same cluster, free devices and pods for a stock scheduler, for zone affinity to the prefill
pods, and for our extender; each with every node looked at and with kube-scheduler's own sampling.
With equal link costs, our placement has to be the stock scheduler's, pod by pod.
"""

import asyncio
import logging
import sys
from collections.abc import Iterator

import structlog

from tests.benchmarks.placement_cluster import Placed, Placer, Shape, place
from tests.benchmarks.reporting import report

_SEEDS = (1, 2, 3)
_SAMPLED = 0
_ALL = 100


async def measure(shape: Shape, percentage: int) -> dict[str, float]:
    """Return the mean fetch times in ms by placer, and the ratios of ours."""
    default = await place(shape, Placer(name="default", percentage=percentage))
    zone = await place(shape, Placer(name="zone", zone_affinity=True, percentage=percentage))
    ours = await place(shape, Placer(name="ours", extender=True, percentage=percentage))
    fine = await place(shape, Placer(name="fine", extender=True, fine=True, percentage=percentage))
    return {
        "default_ms": default.mean_ms,
        "zone_affinity_ms": zone.mean_ms,
        "nearkv_ms": ours.mean_ms,
        "nearkv_fine_scores_ms": fine.mean_ms,
        "over_default_ratio": ours.mean_ms / default.mean_ms,
        "over_zone_affinity_ratio": ours.mean_ms / zone.mean_ms,
    }


async def same_with_equal_costs(shape: Shape) -> float:
    """Return the share of pods that go where the stock scheduler puts them."""
    default = await place(shape, Placer(name="default"))
    ours = await place(shape, Placer(name="ours", extender=True, equal_costs=True))
    return _same(default, ours)


def _same(one: Placed, other: Placed) -> float:
    equal = sum(one.nodes[name] == other.nodes[name] for name in one.nodes)
    return equal / len(one.nodes)


async def _run() -> dict[str, float]:
    figures: dict[str, float] = {}
    for prefix, percentage in (("", _ALL), ("sampled_", _SAMPLED)):
        runs = [await measure(Shape(seed=seed), percentage) for seed in _SEEDS]
        figures |= dict(_means(prefix, runs))
    same = [await same_with_equal_costs(Shape(seed=seed)) for seed in _SEEDS]
    figures["equal_costs_same_node_ratio"] = min(same)
    return figures


def _means(prefix: str, runs: list[dict[str, float]]) -> Iterator[tuple[str, float]]:
    for name in runs[0]:
        values = [run[name] for run in runs]
        if name.endswith("_ratio"):
            yield f"{prefix}{name}", max(values)  # the worst seed
        else:
            yield f"{prefix}{name}", sum(values) / len(values)


def main() -> int:
    """Measure everything, report."""
    quiet = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=quiet)
    return report("placement", asyncio.run(_run()), {})


if __name__ == "__main__":
    sys.exit(main())
