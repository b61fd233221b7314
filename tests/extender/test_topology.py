"""What /v1/topology shows."""

import json

import msgspec

from nearkv.extender.presets import PRESETS
from nearkv.extender.topology import describe_topology
from tests.extender.snapshots import NEVER, Group, Node, make_cluster, make_snapshot, measured

LEVELS = PRESETS["generic"]


def test_levels_groups_and_measurements():
    snapshot = make_snapshot(
        [
            Node(name="a", labels=("r1", "z1", "e"), rdma=1, requested=3),
            Node(name="b", labels=("r2", "z1", "e"), rdma=0),
            Node(name="c", labels=("", "z2", "e"), reported_at=NEVER, from_status=True),
        ],
        groups={
            "g": Group(held={"a": 1e9, "b": 5e9}, held_at=90.0, prefill={"a": 1}, decode={"c": 2})
        },
        links={2: measured(1.0, 10.0, count=7, at=40.0)},
        pairs={("a", "b"): measured(2.0, 5.0, at=95.0)},
    )
    shown = describe_topology(snapshot, LEVELS, now=100.0)
    assert (shown["nodes"], shown["nodes_reported"], shown["nodes_reported_by_status"]) == (3, 2, 1)
    assert shown["rdma"] == {"usable": 1, "none": 1, "unknown": 1}
    assert shown["devices"] == {"allocatable": 24, "requested": 3}
    found = [(level["name"], level["domains"], level["nodes_without"]) for level in shown["levels"]]
    assert found == [("rack", 2, 1), ("zone", 2, 0), ("region", 1, 0)]
    assert shown["measured"] == [
        {
            "class": "zone",
            "setup_seconds": 0.001,
            "bytes_per_second": 10e9,
            "count": 7,
            "age_seconds": 60.0,
        }
    ]
    assert [(pair["source"], pair["node"]) for pair in shown["pairs"]] == [("a", "b")]
    group = shown["groups"]["g"]
    assert [holder["node"] for holder in group["held_by"]] == ["b", "a"]
    assert group["held_by"][0]["age_seconds"] == 10.0
    assert (group["held_bytes"], group["kv_free_bytes"]) == (6e9, None)
    assert (group["prefill_nodes"], group["decode_nodes"]) == (["a"], ["c"])
    assert group["decode_pods"] == 2


def test_a_large_cluster_is_shown_in_short():
    shown = describe_topology(make_cluster(2000, sources=600), LEVELS, now=1.0)
    group = shown["groups"]["g"]
    assert (group["holders"], len(group["held_by"])) == (600, 200)
    assert json.loads(msgspec.json.encode(shown)) == shown


def test_no_nodes():
    shown = describe_topology(make_snapshot([], levels=3), LEVELS, now=1.0)
    assert (shown["nodes"], shown["levels"][0]["domains"]) == (0, 0)
