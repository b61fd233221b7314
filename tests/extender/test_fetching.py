from dataclasses import replace

import numpy as np
import pytest

from nearkv.extender import fetching
from nearkv.extender.distance import DistanceConfig, class_name
from nearkv.extender.fetching import Basis, fetch_times
from nearkv.extender.model import Role
from nearkv.extender.presets import PRESETS, Level, LinkCost
from tests.extender.snapshots import Group, Node, ask, make_cluster, make_snapshot, measured

RACK, ZONE = 24.9, 100.6
LEVELS = (
    Level("rack", ("rack",), LinkCost(0.001, 45e9)),
    Level("zone", ("zone",), LinkCost(0.003, 11e9)),
)
CONFIG = DistanceConfig(levels=LEVELS)
NODES = [
    Node(name="a", labels=("r1", "z1")),
    Node(name="b", labels=("r1", "z1")),
    Node(name="c", labels=("r2", "z1")),
    Node(name="d", labels=("r3", "z2")),
    Node(name="e", labels=("", "")),
]
HELD_BY_A = {"g": Group(held={"a": 1e9})}


def times(groups, *, config=CONFIG, nodes=NODES, now=0.0, role=Role.DECODE, **more):
    snapshot = make_snapshot(nodes, groups=groups, **more)
    return fetch_times(snapshot, ask(role=role), config, now)


def by_name(found, nodes=NODES):
    return dict(zip([node.name for node in nodes], found.milliseconds, strict=False))


def test_time_grows_with_the_class_of_distance():
    found = times(HELD_BY_A)
    assert found.milliseconds == pytest.approx([7.46, RACK, ZONE, 819.2, 434.5, 434.5], rel=1e-2)
    names = [class_name(CONFIG, int(cls)) for cls in found.link_class]
    assert names == ["same-node", "rack", "zone", "beyond", "unknown", "unknown"]
    assert found.basis is Basis.HOLDERS
    assert found.source.tolist() == [0] * 6


def test_no_time_is_longer_than_computing_the_prefix_again():
    assert times(HELD_BY_A).cap_ms == pytest.approx(819.2)
    assert times(HELD_BY_A).milliseconds.max() == pytest.approx(819.2)
    uncapped = times(HELD_BY_A, config=replace(CONFIG, recompute_cap=False))
    assert uncapped.milliseconds.max() > 819.2


def test_where_everything_is_slower_than_computing_nothing_is_nearer():
    fast = {"g": Group(held={"a": 1e9}, prefill_tokens_per_second=1e9)}
    assert len(set(times(fast).milliseconds)) == 1


def test_prefix_and_bytes_come_from_the_pod_and_the_group():
    group = {"g": Group(held={"a": 1e9}, kv_bytes_per_token=1000.0)}
    snapshot = make_snapshot(NODES, groups=group)
    found = fetch_times(snapshot, ask(prefix_tokens=500), CONFIG, 0.0)
    assert (found.prefix_tokens, found.kv_bytes) == (500, 500_000.0)


def test_holders_count_by_their_bytes():
    mostly_a = by_name(times({"g": Group(held={"a": 9e9, "d": 1e9})}))
    mostly_d = by_name(times({"g": Group(held={"a": 1e9, "d": 9e9})}))
    assert mostly_a["b"] < mostly_a["d"]
    assert mostly_d["d"] < mostly_d["b"]
    assert mostly_a["b"] == pytest.approx(0.9 * RACK + 0.1 * 819.2, rel=1e-2)


def test_the_nearest_counterpart_counts():
    found = times({"g": Group(prefill={"a": 1, "d": 1})})
    assert found.basis is Basis.COUNTERPARTS
    assert found.milliseconds[:4] == pytest.approx([7.46, RACK, ZONE, 7.46], rel=1e-2)
    assert found.source[:4].tolist() == [0, 0, 0, 3]


@pytest.mark.parametrize(
    ("role", "source"), [(Role.DECODE, "a"), (Role.PREFILL, "d"), (Role.BOTH, None)]
)
def test_a_pod_goes_near_the_other_role(role, source):
    found = by_name(times({"g": Group(prefill={"a": 1}, decode={"d": 1})}, role=role))
    nearest = [name for name, ms in found.items() if ms == min(found.values())]
    assert nearest == (["a", "d"] if source is None else [source])


def test_counterparts_and_holders_are_weighed():
    groups = {"g": Group(prefill={"a": 1}, held={"d": 1e9})}
    found = times(groups, config=replace(CONFIG, holders_weight=0.25))
    assert found.basis is Basis.BOTH
    assert by_name(found)["b"] == pytest.approx(0.75 * RACK + 0.25 * 819.2, rel=1e-2)


@pytest.mark.parametrize(
    "groups",
    [{}, {"g": Group()}, {"g": Group(held={"a": 0.0}, prefill={"b": 0})}],
    ids=["no-group", "empty", "nothing-held"],
)
def test_without_sources_all_nodes_are_equal(groups):
    found = times(groups)
    assert found.basis is Basis.NONE
    assert len(set(found.milliseconds)) == 1
    assert set(found.source) == {-1}


def test_holders_not_heard_of_fade_and_are_then_passed_over():
    groups = {"g": Group(held={"a": 1e9, "d": 1e9})}
    assert times(groups, now=599.0).basis is Basis.HOLDERS
    assert times(groups, now=601.0).basis is Basis.NONE


@pytest.mark.parametrize("role_of_slow", ["source", "node"])
def test_without_rdma_on_either_side_the_rack_is_no_help(role_of_slow):
    slow = "a" if role_of_slow == "source" else "b"
    nodes = [replace(node, rdma=0 if node.name == slow else 1) for node in NODES]
    found = by_name(times(HELD_BY_A, nodes=nodes))
    assert found["b"] == pytest.approx(433.5, rel=1e-2)
    assert found["a"] == pytest.approx(7.46, rel=1e-2)


def test_nvlink_between_hosts_needs_no_rdma():
    config = DistanceConfig(levels=PRESETS["nvlink"])
    nodes = [Node(name=n, labels=("c.1", "c", "z", "r"), rdma=0) for n in "ab"]
    assert by_name(times(HELD_BY_A, config=config, nodes=nodes), nodes)["b"] < 20


def test_a_measured_pair_takes_the_place_of_its_class():
    found = times(HELD_BY_A, pairs={("a", "b"): measured(1, 1)})
    assert by_name(found)["b"] == pytest.approx(819.2)
    found = times(HELD_BY_A, pairs={("a", "d"): measured(1, 100)})
    assert by_name(found)["d"] == pytest.approx(11.74, rel=1e-2)
    assert found.measured.tolist() == [False, False, False, True, False, False]


def test_only_the_measured_direction_changes():
    found = times(HELD_BY_A, pairs={("b", "a"): measured(1, 1), ("d", "b"): measured(1, 1)})
    assert by_name(found) == by_name(times(HELD_BY_A))


def test_a_slow_same_node_path_beats_the_label():
    found = by_name(times(HELD_BY_A, pairs={("a", "a"): measured(1, 2)}))
    assert found["a"] == pytest.approx(537.9, rel=1e-2)
    assert found["a"] > found["b"]


def test_a_slow_same_node_path_leaves_the_other_sources_of_a_place():
    found = times({"g": Group(prefill={"a": 1, "b": 1})}, links={0: measured(1, 2)})
    assert found.source[:2].tolist() == [1, 0]


def test_an_old_pair_gives_way_to_its_class():
    pairs = {("a", "b"): measured(1, 1)}
    assert by_name(times(HELD_BY_A, pairs=pairs, now=1.0))["b"] > 800
    old = times({"g": Group(held={"a": 1e9}, held_at=1801.0)}, pairs=pairs, now=1801.0)
    assert by_name(old)["b"] == pytest.approx(RACK, rel=1e-2)


def test_times_say_until_when_they_hold():
    pairs = {("a", "b"): measured(1, 1, at=-250.0)}
    found = times(HELD_BY_A, pairs=pairs)
    assert found.valid_until == 50.0
    assert times(HELD_BY_A).valid_until == 90.0


def test_more_sources_than_are_looked_at_keep_one_of_each_place():
    config = replace(CONFIG, max_sources=2)
    nodes = [
        *(Node(name=f"near{i}", labels=("r1", "z1")) for i in range(5)),
        Node(name="far", labels=("r9", "z9")),
        Node(name="beside-far", labels=("r9", "z9")),
    ]
    pods = {f"near{i}": 9 for i in range(5)} | {"far": 1}
    found = by_name(times({"g": Group(prefill=pods)}, config=config, nodes=nodes), nodes)
    assert found["beside-far"] == pytest.approx(RACK, rel=1e-2)


def test_places_and_single_nodes_give_the_same_times():
    """The short way by places must agree with a plain loop over nodes and sources."""
    snapshot = make_cluster(300, level_sizes=(4, 16, 64, 256), sources=20)
    config = DistanceConfig(levels=PRESETS["aws"][:4])
    facts = replace(snapshot.groups["g"], prefill=np.zeros(0, np.int32))
    facts = replace(facts, prefill_pods=np.zeros(0, np.int32))
    found = fetch_times(replace(snapshot, groups={"g": facts}), ask(), config, 0.0)
    costs = [min(cost.milliseconds(found.kv_bytes), found.cap_ms) for cost in config.costs]
    for row in range(300):
        total = 0.0
        for source, size in zip(facts.holders, facts.held_bytes, strict=True):
            equal = np.flatnonzero(snapshot.labels[row] == snapshot.labels[source])
            cls = 0 if row == source else int(equal[0]) + 1 if len(equal) else 5
            total += size * costs[cls]
        assert found.milliseconds[row] == pytest.approx(total / facts.held_bytes.sum())


def test_sources_out_of_range_are_passed_over():
    snapshot = make_snapshot(NODES, groups=HELD_BY_A)
    facts = replace(
        snapshot.groups["g"],
        holders=np.array([0, -1, 99], np.int32),
        held_bytes=np.array([1e9, 1e9, 1e9]),
        held_at=np.zeros(3),
    )
    found = fetch_times(replace(snapshot, groups={"g": facts}), ask(), CONFIG, 0.0)
    assert found.holders.tolist() == [0]


def test_without_levels_known_nodes_are_beyond_and_others_unknown():
    config = DistanceConfig(levels=())
    nodes = [Node(name="a"), Node(name="b")]
    found = times(HELD_BY_A, config=config, nodes=nodes)
    assert [class_name(config, int(cls)) for cls in found.link_class] == [
        "same-node",
        "beyond",
        "unknown",
    ]


def test_no_nodes_is_fine():
    found = times({}, nodes=[], levels=2)
    assert len(found.milliseconds) == 1
    assert found.source[0] == fetching.NO_SOURCE
