"""What paths cost by class."""

from nearkv.agent.probes.by_class import MeasuredCost, class_costs
from nearkv.path_cost import PathCost


def test_classes_have_the_median_over_their_pairs():
    pairs = [
        MeasuredCost("a", "tcp", PathCost(0.1, 100.0), 3, 10.0, "pulls"),
        MeasuredCost("b", "tcp", PathCost(0.3, 300.0), 4, 20.0, "probes"),
        MeasuredCost("c", "tcp", PathCost(0.2, 900.0), 1, 5.0, "probes"),
        MeasuredCost("d", "tcp", PathCost(0.5, 1.0), 1, 5.0, "probes"),
        MeasuredCost("e", "ucx", PathCost(0.6, 2.0), 1, 5.0, "probes"),
    ]
    names = {"a": "rack", "b": "rack", "c": "rack", "d": "zone", "e": "zone"}
    rack, zone, ucx = class_costs(pairs, names.__getitem__, 30.0)
    assert (rack.name, rack.path, rack.setup_seconds, rack.bytes_per_second) == (
        *("rack", "tcp"),
        *(0.2, 300.0),
    )
    assert (rack.pairs, rack.count, rack.age_seconds) == (3, 8, 10.0)
    assert (zone.name, zone.path, zone.bytes_per_second) == ("zone", "tcp", 1.0)
    assert (ucx.name, ucx.path, ucx.bytes_per_second) == ("zone", "ucx", 2.0)
