"""Counters and histograms of the hot path come out as the library's own would."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from nearkv.ingress.tallies import Spreads, Tally

BOUNDS = (0.5, 1, 2.5)


def exposed(registry):
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], id="none yet"),
        pytest.param([0.5], id="on a bound, which is its bucket's"),
        pytest.param([0.1, 0.6, 1.0, 2.0, 9.0], id="one in each bucket"),
        pytest.param([-1.0, float("inf")], id="beyond all bounds"),
    ],
)
def test_a_histogram_is_exposed_as_the_librarys(values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    spread = Spreads("x_seconds", "Text.", BOUNDS, ours).of()
    histogram = Histogram("x_seconds", "Text.", buckets=BOUNDS, registry=theirs)
    for value in values:
        spread.observe(value)
        histogram.observe(value)
    assert exposed(ours) == exposed(theirs)


def test_a_histogram_by_label_is_exposed_as_the_librarys():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    spreads = Spreads("x_seconds", "Text.", BOUNDS, ours, label="why")
    histogram = Histogram("x_seconds", "Text.", ("why",), buckets=BOUNDS, registry=theirs)
    for why, value in (("hit", 0.2), ("miss", 2.0), ("hit", 3.0)):
        spreads.of(why).observe(value)
        histogram.labels(why).observe(value)
    assert exposed(ours) == exposed(theirs)


def test_counts_are_kept_by_labels():
    registry = CollectorRegistry()
    tally = Tally("seen", "Text.", ("what",), registry)
    tally.add("a")
    tally.add("b", by=3)
    tally.add("a")
    assert 'seen_total{what="a"} 2.0' in exposed(registry)
    assert 'seen_total{what="b"} 3.0' in exposed(registry)
