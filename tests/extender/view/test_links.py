"""Measured pairs: bounded, fading, and medians by class."""

import numpy as np
import pytest

from nearkv.extender.distance import DistanceConfig, classes_between
from nearkv.extender.view.links import LinkLimits, LinkTable, class_medians
from nearkv.extender.view.measured_pairs import MeasuredPairs, class_between
from tests.extender.view.things import LEVELS, path, report


def table(**limits):
    return LinkTable(LinkLimits(**limits))


def observe(links, node, *paths, at=0.0):
    return links.observe(node, paths, at)


def test_a_pair_is_kept_with_when_it_was_measured():
    links = table()
    assert observe(links, "b", path("a", 2e9, age_seconds=30.0), at=100.0) == {("a", "b")}
    found = links.get(("a", "b"))
    assert (found.bytes_per_second, found.count, found.received_at) == (2e9, 10, 70.0)


def test_an_older_measurement_does_not_replace_a_newer_one():
    links = table()
    observe(links, "b", path("a", 2e9), at=100.0)
    assert observe(links, "b", path("a", 1e9, age_seconds=50.0), at=110.0) == set()
    assert links.get(("a", "b")).bytes_per_second == 2e9


def test_of_several_transports_the_last_one_counts():
    links = table()
    observe(links, "b", path("a", 9e9, age_seconds=1.0), path("a", 1e9, age_seconds=60.0), at=100.0)
    assert links.get(("a", "b")).bytes_per_second == 9e9


def test_the_pairs_measured_longest_ago_make_room():
    links = table(max_pairs=3)
    for number in range(5):
        changed = observe(links, "b", path(f"a{number}"), at=float(number))
    assert changed == {("a4", "b"), ("a1", "b")}
    assert len(links) == 3
    assert links.get(("a1", "b")) is None
    observe(links, "b", path("a2"), at=9.0)
    observe(links, "b", path("a5"), at=10.0)
    assert links.get(("a2", "b")) is not None
    assert links.get(("a3", "b")) is None


def test_within_a_report_too_the_pair_measured_longest_ago_makes_room():
    links = table(max_pairs=1)
    observe(links, "b", path("new", age_seconds=1.0), path("old", age_seconds=60.0), at=100.0)
    assert links.get(("new", "b")) is not None


def test_what_was_measured_too_long_ago_is_gone():
    links = table(forget_seconds=100.0)
    assert observe(links, "b", path("a", age_seconds=100.0), at=0.0) == set()
    observe(links, "b", path("a"), at=0.0)
    assert links.fade(99.0) == set()
    assert links.fade(100.0) == {("a", "b")}
    assert (len(links), tuple(links.pairs_of("a"))) == (0, ())


def test_a_nodes_pairs_go_with_it():
    links = table()
    observe(links, "b", path("a"), path("b"), path("c"))
    observe(links, "a", path("c"))
    links.drop_node("b")
    assert [links.pairs_of(node) for node in "abc"] == [(("c", "a"),), (), (("c", "a"),)]


def medians(*measured, now, half_life=600.0):
    """Return medians; measured are class, bytes per second and time."""
    classes = np.array([cls for cls, _, _ in measured], np.int32)
    figures = np.array([(0.001, speed, at, 10) for _, speed, at in measured]).reshape(-1, 4)
    return class_medians(classes, figures, now=now, half_life_seconds=half_life)


def test_the_median_of_a_class_shrugs_off_a_wild_value():
    speeds = (1e9, 2e9, 3e9, 1e13, 2.5e9)
    median = medians(*((1, speed, at) for at, speed in enumerate(speeds)), now=4.0)[1]
    assert (median.bytes_per_second, median.count, median.received_at) == (2.5e9, 50, 4.0)
    assert median.setup_seconds == 0.001


def test_in_a_median_older_measurements_count_less():
    measured = [(2, 1e9, 0.0)] * 3 + [(2, 5e9, 100.0)]
    assert medians(*measured, now=100.0)[2].bytes_per_second == 1e9
    assert medians(*measured, now=100.0, half_life=10.0)[2].bytes_per_second == 5e9


def test_measurements_without_a_class_speak_for_none():
    assert medians((-1, 1e9, 0.0), now=0.0) == {}
    assert medians(now=0.0) == {}


# -- By row ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 1), (2, 1), 2),
        ((1, 1), (2, 2), 3),
        ((0, 1), (2, 2), 4),
        ((1, 1), (2, 0), 4),
        ((0, 1), (0, 1), 2),
        ((0, 0), (0, 0), 4),
    ],
)
def test_classes_are_those_of_the_distance(one, other, expected):
    one, other = np.array(one, np.int32), np.array(other, np.int32)
    assert class_between(one, other) == expected
    config = DistanceConfig(levels=LEVELS)
    assert classes_between(one[None], other[None], config)[0, 0] == expected


class Places:
    """Rows, labels and RDMA of nodes, to be moved about by hand."""

    def __init__(self, **rdma):
        self.rows = {name: row for row, name in enumerate("abcd")}
        self.labels = {row: np.array([row // 2 + 1, 1], np.int32) for row in range(4)}
        self.rdma = np.array([rdma.get(name, -1) for name in "abcd"], np.int8)
        self.pairs = MeasuredPairs(
            LinkLimits(forget_seconds=1000.0),
            row_of=self.rows.get,
            labels_of=lambda row: self.labels[row],
            rdma=lambda: self.rdma,
            without_rdma=(1,),
        )

    def observe(self, node, *paths, at=0.0):
        self.pairs.observe(report(node, at=at, paths=paths))
        self.pairs.settle(at)

    def speeds(self):
        return {cls: link.bytes_per_second for cls, link in self.pairs.links.items()}


def test_pairs_stand_by_the_rows_of_source_and_node():
    places = Places()
    places.observe("b", path("a", 2e9), path("b", 8e9), path("c", 1e9), path("elsewhere", 9e9))
    speeds = {rows: link.bytes_per_second for rows, link in places.pairs.by_row().items()}
    assert speeds == {(0, 1): 2e9, (1, 1): 8e9, (2, 1): 1e9}
    assert places.speeds() == {0: 8e9, 1: 2e9, 2: 1e9}


def test_pairs_follow_their_nodes():
    places = Places()
    places.observe("b", path("a", 2e9))
    before = places.pairs.by_row()
    places.rows["b"] = 3
    places.pairs.place_node("b")
    assert list(places.pairs.by_row()) == [(0, 3)]
    assert list(before) == [(0, 1)]
    places.pairs.settle(0.0)
    assert list(places.speeds()) == [2]


def test_pairs_fade_from_rows_and_medians():
    places = Places()
    places.observe("b", path("a"))
    assert not places.pairs.settle(999.0)
    assert places.pairs.settle(1000.0)
    assert (dict(places.pairs.by_row()), places.speeds()) == ({}, {})


def test_where_some_have_rdma_pairs_without_it_do_not_speak_for_the_class():
    places = Places(a=1, c=1, b=0, d=0)
    places.observe("c", path("a", 40e9), path("b", 1e9), path("d", 30e9))
    places.observe("d", path("b", 1e9), path("d", 8e9))
    # Class 1 needs no RDMA, nor does a node itself.
    assert places.speeds() == {0: 8e9, 1: 30e9, 2: 40e9}
    assert (1, 2) in places.pairs.by_row()


def test_where_nobody_has_rdma_all_pairs_speak():
    places = Places(a=0, c=0)
    places.observe("c", path("a", 1e9))
    assert places.speeds() == {2: 1e9}
