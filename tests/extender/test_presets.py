import pytest

from nearkv.extender.presets import PRESETS, Level, LinkCost, Transform


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_ends_in_zone_and_region_and_costs_grow_with_distance(name):
    levels = PRESETS[name]
    assert [level.name for level in levels[-2:]] == ["zone", "region"]
    costs = [level.cost.milliseconds(1e9) for level in levels]
    assert costs == sorted(costs)
    assert len({level.name for level in levels}) == len(levels)


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        PRESETS["generic"] = ()


@pytest.mark.parametrize(
    ("labels", "value"),
    [
        ({"old": "r1"}, "r1"),
        ({"new": "r2", "old": "r1"}, "r2"),
        ({"new": "", "old": "r1"}, "r1"),
        ({}, ""),
    ],
    ids=["older name", "first counts", "empty is missing", "none"],
)
def test_the_first_label_that_is_not_empty_gives_the_value(labels, value):
    level = Level("rack", ("new", "old"), LinkCost(0.001, 1e9))
    assert level.value_of(labels) == value


def test_a_clique_is_an_nvlink_partition_and_its_uuid_a_rack():
    partition, rack = PRESETS["nvlink"][:2]
    labels = {"nvidia.com/gpu.clique": "6a1b.7"}
    assert (partition.value_of(labels), rack.value_of(labels)) == ("6a1b.7", "6a1b")
    assert not partition.needs_rdma
    assert rack.transform is Transform.BEFORE_LAST_DOT


def test_hosts_without_nvlink_between_them_are_no_partition():
    labels = {"nvidia.com/gpu.clique": "00000000-0000-0000-0000-000000000000.0"}
    assert [level.value_of(labels) for level in PRESETS["nvlink"][:2]] == ["", ""]


def test_a_value_without_a_dot_has_nothing_before_it():
    rack = PRESETS["nvlink"][1]
    assert rack.value_of({"nvidia.com/gpu.clique": "odd"}) == ""


@pytest.mark.parametrize(
    ("setup", "speed", "named"),
    [(-1.0, 1e9, "setup_seconds"), (0.1, 0.0, "bytes_per_second"), (0.1, -5.0, "bytes_per_second")],
)
def test_a_cost_that_cannot_be_is_refused(setup, speed, named):
    with pytest.raises(ValueError, match=named):
        LinkCost(setup, speed)


def test_time_is_setup_and_bytes_by_bandwidth():
    assert LinkCost(0.002, 1e9).milliseconds(5e8) == pytest.approx(502.0)
