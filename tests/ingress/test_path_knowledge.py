"""What a path costs: the pair's own measurement, else its class, else nobody knows."""

import pytest

from nearkv.ingress.fleet import Fleet
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.path_class import BEYOND, SAME_NODE
from nearkv.state.model import PathClass, PathClasses, PathReading
from tests.ingress.fleet_agent import A, Agent, B, engine_info

ZONE = "zone"
SECONDS = 900.0


def pair(*, seconds, points=5, age_seconds=0.0, source="n1", target="n2"):
    return PathReading(
        source=source,
        target=target,
        path="tcp",
        setup_seconds=seconds,
        bytes_per_second=1e9,
        points=points,
        age_seconds=age_seconds,
    )


def cost(name, *, seconds, path="tcp", pairs=1, age_seconds=0.0):
    return PathClass(
        name=name,
        path=path,
        setup_seconds=seconds,
        bytes_per_second=1e9,
        pairs=pairs,
        count=pairs,
        age_seconds=age_seconds,
    )


def place(zone, *costs):
    labels = {ZONE: zone} if zone else {}
    return PathClasses(levels=(ZONE,), labels=labels, costs=costs)


class Two:
    """Two agents with an engine each, on nodes n1 and n2; n2's engine pulls."""

    def __init__(self):
        self.fleet = Fleet(PrefixIndex(), path_aged_seconds=SECONDS)
        self.there, self.here = Agent(self.fleet, A), Agent(self.fleet, B)
        for number, agent in ((1, self.there), (2, self.here)):
            agent.begin(engine_info(f"e{number}", node=f"n{number}"))
            agent.end()

    def tell(self, agent, *paths, classes=None, now=0.0):
        agent.delta(paths=paths, path_classes=classes, now=now)

    def setup_seconds(self, source="e1", target="e2"):
        engines = self.fleet.engines
        reading = self.fleet.path_between(engines[source], engines[target])
        return None if reading is None else reading.setup_seconds


@pytest.fixture
def two():
    return Two()


def test_nobody_knows_a_path_that_nobody_measured(two):
    assert two.setup_seconds() is None


def test_a_measured_pair_counts_and_the_targets_word_first(two):
    two.tell(two.there, pair(seconds=2.0), classes=place("a", cost(ZONE, seconds=7.0)))
    assert two.setup_seconds() == 2.0
    two.tell(two.here, pair(seconds=1.0), classes=place("a", cost(ZONE, seconds=8.0)))
    assert two.setup_seconds() == 1.0


def test_a_pair_that_was_never_measured_costs_what_its_class_does(two):
    two.tell(two.there, classes=place("a"))
    two.tell(two.here, pair(seconds=5.0, points=0), classes=place("a", cost(ZONE, seconds=7.0)))
    assert two.setup_seconds() == 7.0
    two.tell(two.there, classes=place("b"))
    assert two.setup_seconds() == 5.0  # the agent's prior: it knows of no pair beyond
    two.tell(two.here, classes=place("a", cost(ZONE, seconds=7.0), cost(BEYOND, seconds=9.0)))
    assert two.setup_seconds() == 9.0


def test_the_sources_word_is_better_than_none(two):
    two.tell(two.there, classes=place("a", cost(ZONE, seconds=6.0)))
    two.tell(two.here, classes=place("a"))
    assert two.setup_seconds() == 6.0


def test_where_a_label_is_missing_no_class_is_known(two):
    two.tell(two.there, classes=place(""))
    two.tell(two.here, classes=place("a", cost("unknown", seconds=7.0)))
    assert two.setup_seconds() is None


def test_within_a_node_no_labels_are_needed(two):
    two.tell(two.here, classes=place("", cost(SAME_NODE, seconds=0.25)))
    assert two.setup_seconds("e2", "e2") == 0.25


def test_an_aged_pair_gives_way_to_its_class_and_to_nothing_else(two):
    two.tell(two.there, classes=place("a"))
    two.tell(two.here, pair(seconds=1.0), classes=place("a"))
    two.here.beat({}, SECONDS + 1.0)
    assert two.setup_seconds() == 1.0
    two.tell(two.here, classes=place("a", cost(ZONE, seconds=7.0)), now=SECONDS + 2.0)
    assert two.setup_seconds() == 7.0
    two.tell(two.here, pair(seconds=2.0), now=SECONDS + 3.0)
    assert two.setup_seconds() == 2.0


def test_what_was_old_when_it_was_sent_is_old(two):
    two.tell(two.there, classes=place("a"))
    two.tell(
        two.here,
        pair(seconds=1.0, age_seconds=SECONDS + 1.0),
        classes=place("a", cost(ZONE, seconds=7.0)),
        now=5.0,
    )
    assert two.setup_seconds() == 7.0


def test_an_aged_class_is_no_help(two):
    two.tell(two.there, classes=place("a"))
    costs = cost(ZONE, seconds=7.0, age_seconds=SECONDS + 1.0)
    two.tell(two.here, pair(seconds=1.0, points=0), classes=place("a", costs))
    assert two.setup_seconds() == 1.0


def test_of_two_transports_the_one_of_most_pairs_counts(two):
    two.tell(two.there, classes=place("a"))
    costs = (
        cost(ZONE, seconds=1.0, path="nixl", pairs=3),
        cost(ZONE, seconds=7.0, path="tcp", pairs=2),
    )
    two.tell(two.here, classes=place("a", *costs))
    assert two.setup_seconds() == 1.0


def test_a_snapshot_forgets_what_was_told_before(two):
    two.tell(two.here, pair(seconds=1.0))
    two.here.begin(engine_info("e2", node="n2"))
    two.here.end()
    assert two.setup_seconds() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("field", ["setup_seconds", "bytes_per_second", "age_seconds"])
def test_figures_that_cannot_be_are_passed_over(two, field, bad):
    fields = {"path": "tcp", "setup_seconds": 1.0, "bytes_per_second": 1e9, field: bad}
    reading = PathReading(source="n1", target="n2", points=5, **fields)
    costs = PathClass(name=SAME_NODE, **fields)
    two.tell(two.here, reading, classes=place("", costs))
    assert two.setup_seconds() is None
    assert two.setup_seconds("e2", "e2") is None
