import math
from dataclasses import replace

import numpy as np
import pytest

from nearkv.extender.distance import (
    DistanceConfig,
    Fading,
    PlaceTable,
    class_costs,
    class_name,
    classes_between,
)
from nearkv.extender.presets import Level, LinkCost
from tests.extender.snapshots import measured

LEVELS = (
    Level("rack", ("rack",), LinkCost(0.001, 45e9)),
    Level("zone", ("zone",), LinkCost(0.003, 11e9)),
)
CONFIG = DistanceConfig(levels=LEVELS)
SAME, RACK, ZONE, BEYOND, UNKNOWN = range(5)
GIGABYTE = 1e9


def labels(*rows):
    return np.array(rows, np.int32).reshape(len(rows), -1)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ([1, 1], RACK),
        ([2, 1], ZONE),
        ([2, 2], BEYOND),
        ([0, 1], ZONE),
        ([1, 0], RACK),
        ([0, 2], UNKNOWN),
        ([0, 0], UNKNOWN),
    ],
    ids=["rack", "zone", "beyond", "rack-missing", "zone-missing", "maybe-rack", "no-labels"],
)
def test_the_nearest_equal_label_is_the_class(node, expected):
    assert classes_between(labels(node), labels([1, 1]), CONFIG) == [[expected]]


def test_missing_on_both_sides_is_not_equal():
    assert classes_between(labels([0, 2]), labels([0, 1]), CONFIG) == [[UNKNOWN]]


def test_classes_have_names():
    assert [class_name(CONFIG, cls) for cls in range(5)] == [
        "same-node",
        "rack",
        "zone",
        "beyond",
        "unknown",
    ]


def test_nodes_with_equal_labels_and_rdma_share_a_place():
    table = PlaceTable.of(labels([1, 1], [2, 1], [1, 1], [1, 1]), np.array([1, 1, -1, 0], np.int8))
    a, b, c, d, unknown = table.of_row
    assert a == c
    assert len({a, b, d, unknown}) == 4
    assert unknown == table.unknown
    assert table.lacks_rdma[d]
    assert not table.lacks_rdma[a]


def test_places_are_told_apart_by_many_large_label_numbers():
    rows = np.full((3, 12), 2_000_000_000, np.int32)
    rows[1, 11] -= 1
    table = PlaceTable.of(rows, np.ones(3, np.int8))
    assert table.of_row[0] == table.of_row[2] != table.of_row[1]


def costs(links, now=0.0, config=CONFIG):
    return class_costs(config, links, size_bytes=GIGABYTE, now=now)


def test_without_measurements_the_configured_costs_hold():
    assert costs({}).milliseconds == pytest.approx([6.97, 23.2, 93.9, 1696.7, 405.0], rel=1e-2)
    assert costs({}).valid_until == math.inf


def test_a_fresh_measurement_takes_the_place_of_the_configured_cost():
    found = costs({RACK: measured(5, 10)})
    assert found.milliseconds[RACK] == pytest.approx(105.0)
    assert found.measured.tolist() == [0, 1, 0, 0, 0]


def test_an_ageing_measurement_gives_way_step_by_step():
    links = {ZONE: measured(0, 1)}
    seen = [costs(links, now).milliseconds[ZONE] for now in (0, 900, 901, 2000, 3000, 3601)]
    assert seen[0] == seen[1] == pytest.approx(1000.0)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == pytest.approx(93.9, rel=1e-2)


def test_costs_say_until_when_they_hold():
    found = costs({ZONE: measured(0, 1)}, now=1000.0)
    before, after = (costs({ZONE: measured(0, 1)}, found.valid_until + d) for d in (-0.1, 0.1))
    assert before.milliseconds[ZONE] == found.milliseconds[ZONE] != after.milliseconds[ZONE]


def test_few_measurements_are_mixed_with_the_prior():
    few = costs({ZONE: measured(0, 1, count=1)}).milliseconds[ZONE]
    assert few == pytest.approx(93.9**0.8 * 1000**0.2, rel=1e-2)


@pytest.mark.parametrize(
    "link",
    [measured(math.nan, 1), measured(-1, 1), measured(1, 0), measured(1, math.inf)],
    ids=["nan", "negative", "no-bandwidth", "infinite"],
)
def test_measurements_that_cannot_be_are_passed_over(link):
    assert costs({RACK: link}).milliseconds[RACK] == costs({}).milliseconds[RACK]


def test_a_fast_fabric_does_not_make_the_unmeasured_rack_look_slow():
    found = costs({ZONE: measured(1, 100)}).milliseconds
    assert found[SAME] <= found[RACK] <= found[ZONE] == pytest.approx(11.0)


def test_a_slow_rack_does_not_make_the_unmeasured_zone_look_fast():
    found = costs({RACK: measured(1, 5)}).milliseconds
    assert found[ZONE] >= found[RACK] == pytest.approx(201.0)


def test_a_slow_same_node_path_says_nothing_about_the_network():
    found = costs({SAME: measured(1, 1)}).milliseconds
    assert found[RACK] == costs({}).milliseconds[RACK] < found[SAME]


def test_fading_says_when_it_changes_next():
    fading = Fading(fresh_seconds=10.0, aged_seconds=50.0)
    received = np.array([0.0, -math.inf, math.nan, math.inf])
    trust, until = fading.trust(received, 5.0)
    assert trust.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert until == 10.0
    assert fading.trust(received, 10.5)[0][0] == pytest.approx(0.8)
    assert fading.trust(received, 10.5)[1] == 20.0


@pytest.mark.parametrize(
    "change",
    [{"holders_weight": 1.5}, {"max_sources": 0}, {"default_prefix_tokens": 0}],
    ids=lambda change: next(iter(change)),
)
def test_a_configuration_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(CONFIG, **change)
