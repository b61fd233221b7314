"""Snapshots: right whatever came before, cheap where little changed, and never changed later."""

import random

import numpy as np
import pytest

from nearkv.extender.model import Snapshot
from nearkv.extender.view.building import BuilderLimits, SnapshotBuilder
from nearkv.extender.view.groups import GroupPods
from nearkv.extender.view.interning import ValueNumbers
from nearkv.extender.view.pods import NodePods
from tests.extender.view.things import LEVELS, device, facts, group, path, report

NEVER = float("-inf")


@pytest.fixture
def builder():
    return SnapshotBuilder(LEVELS)


def row(snapshot: Snapshot, name: str) -> int:
    return snapshot.rows[name]


def test_an_empty_cluster_is_a_snapshot(builder):
    snapshot = builder.publish()
    assert (snapshot.version, snapshot.names, snapshot.labels.shape) == (0, (), (0, 2))


def test_what_is_unknown_says_so(builder):
    builder.put_node(facts("n1"))
    snapshot = builder.publish()
    assert (snapshot.labels.tolist(), snapshot.rdma.tolist()) == ([[0, 0]], [-1])
    assert np.isnan(snapshot.free_ratio).all()
    assert (snapshot.device_ok == -1).all()
    assert (snapshot.reported_at[0], snapshot.left_at[0]) == (NEVER, NEVER)


def test_equal_labels_have_equal_numbers_and_missing_is_zero(builder):
    for name, rack, zone in (("a", "r1", "z"), ("b", "r2", "z"), ("c", "r1", ""), ("d", "", "z")):
        builder.put_node(facts(name, rack, zone))
    labels = builder.publish().labels
    racks, zones = labels[:, 0].tolist(), labels[:, 1].tolist()
    assert (racks[0] == racks[2] != racks[1], racks[3]) == (True, 0)
    assert (zones[0] == zones[1] == zones[3], zones[2]) == (True, 0)


def test_devices_and_health_are_laid_out_by_column(builder):
    builder.put_node(facts("a"))
    builder.put_node(facts("b"))
    builder.put_report(report("a", at=3.0, devices=(device(0, 0.25), device(1, health="failed"))))
    builder.put_report(report("b", at=4.0, devices=(device(0, None, health="unknown"),)))
    snapshot = builder.publish()
    assert snapshot.free_ratio[0].tolist() == [0.75, 1.0]
    assert np.isnan(snapshot.free_ratio[1]).all()
    assert snapshot.device_ok.tolist() == [[1, 0], [-1, -1]]
    assert snapshot.reported_at.tolist() == [3.0, 4.0]


def test_fewer_devices_leave_nothing_of_the_others(builder):
    builder.put_node(facts("a"))
    builder.put_report(report("a", devices=(device(0), device(1))))
    builder.put_report(report("a", seq=2, devices=(device(0),)))
    snapshot = builder.publish()
    assert snapshot.device_ok[0].tolist() == [1, -1]
    builder.drop_report("a")
    assert builder.publish().device_ok[0].tolist() == [-1, -1]


def test_the_agent_knows_better_than_labels_whether_there_is_rdma(builder):
    builder.put_node(facts("a", rdma=1))
    builder.put_report(report("a", rdma=False))
    assert builder.publish().rdma.tolist() == [0]
    builder.put_node(facts("a", "r2", rdma=1))
    assert builder.publish().rdma.tolist() == [0]
    builder.drop_report("a")
    assert builder.publish().rdma.tolist() == [1]


def test_what_concerns_unknown_nodes_is_passed_over(builder):
    builder.put_pods("x", NodePods(requested=3))
    builder.put_group_pods("g", "x", GroupPods(1, 1))
    builder.put_report(report("x", groups=(group(held=1),)))
    builder.drop_report("x")
    builder.drop_node("x")
    assert not builder.has_changes


def test_nothing_new_is_the_same_snapshot(builder):
    builder.put_node(facts("a"))
    first = builder.publish()
    assert builder.publish() is first
    builder.put_pods("a", NodePods(requested=1))
    assert builder.publish().version == first.version + 1


def test_what_did_not_change_is_shared_and_what_did_is_not_changed_in_place(builder):
    for name in "abc":
        builder.put_node(facts(name, "r1"))
    first = builder.publish()
    builder.put_pods("b", NodePods(requested=2))
    second = builder.publish()
    for field in ("names", "rows", "labels", "devices", "free_ratio", "reported_at", "pairs"):
        assert getattr(second, field) is getattr(first, field), field
    assert (first.requested.tolist(), second.requested.tolist()) == ([0, 0, 0], [0, 2, 0])
    with pytest.raises(ValueError, match="read-only"):
        second.requested[0] = 5


def test_a_relabelled_node_changes_its_own_row_only(builder):
    for name in "abcd":
        builder.put_node(facts(name, f"r-{name}", "z"))
    before = builder.publish()
    builder.put_node(facts("c", "r-a", "z"))
    after = builder.publish()
    assert np.flatnonzero((before.labels != after.labels).any(axis=1)).tolist() == [2]
    assert after.labels[2, 0] == after.labels[0, 0]
    assert after.devices is before.devices
    assert after.rows is before.rows


def test_a_removed_node_leaves_no_hole(builder):
    for number, name in enumerate("abc"):
        builder.put_node(facts(name, f"r-{name}", devices=number + 1))
        builder.put_report(report(name, at=float(number), groups=(group(held=10 + number),)))
        builder.put_group_pods("g", name, GroupPods(number, 0))
    builder.put_report(report("b", seq=2, paths=(path("c"), path("a"))))
    builder.drop_node("a")
    snapshot = builder.publish()
    assert dict(snapshot.rows) == {"c": 0, "b": 1}
    assert (snapshot.names, snapshot.devices.tolist()) == (("c", "b"), [3, 2])
    found = snapshot.groups["g"]
    assert dict(zip(found.prefill.tolist(), found.prefill_pods.tolist(), strict=True)) == {
        0: 2,
        1: 1,
    }
    assert list(snapshot.pairs) == [(0, 1)]
    builder.drop_node("b")
    builder.drop_node("c")
    empty = builder.publish()
    assert (empty.names, dict(empty.groups), dict(empty.pairs)) == ((), {}, {})


# -- Groups ----------------------------------------------------------------------------------


def test_a_groups_facts_come_from_reports_and_pods(builder):
    for name in "abc":
        builder.put_node(facts(name))
    said = {"free_bytes": 7, "kv_bytes_per_token": 100.0, "prefill_tokens_per_second": 5000.0}
    builder.put_report(report("b", at=9.0, groups=(group("g", 50, **said),)))
    builder.put_report(report("c", at=8.0, groups=(group("g", 0, kv_bytes_per_token=300.0),)))
    builder.put_group_pods("g", "a", GroupPods(prefill=2))
    builder.put_group_pods("g", "b", GroupPods(prefill=1, decode=1))
    found = builder.publish().groups["g"]
    assert (found.holders.tolist(), found.held_bytes.tolist(), found.held_at.tolist()) == (
        [1],
        [50.0],
        [9.0],
    )
    assert (found.prefill.tolist(), found.prefill_pods.tolist()) == ([0, 1], [2, 1])
    assert (found.decode.tolist(), found.decode_pods.tolist()) == ([1], [1])
    np.testing.assert_equal(found.kv_free_bytes, [np.nan, 7.0, np.nan])
    assert (found.kv_bytes_per_token, found.prefill_tokens_per_second) == (200.0, 5000.0)


def test_a_receipt_makes_the_groups_of_its_node_fresher_and_no_others(builder):
    for name in "ab":
        builder.put_node(facts(name))
        builder.put_report(report(name, groups=(group(f"g-{name}", 5),)))
    before = builder.publish()
    builder.put_receipt(report("a", at=77.0))
    after = builder.publish()
    assert after.groups["g-a"].held_at.tolist() == [77.0]
    assert after.groups["g-b"] is before.groups["g-b"]
    assert before.groups["g-a"].held_at.tolist() == [0.0]


def test_a_group_that_nobody_speaks_of_any_more_is_gone(builder):
    builder.put_node(facts("a"))
    builder.put_report(report("a", groups=(group("g", 5),)))
    builder.put_group_pods("g", "a", GroupPods(1, 0))
    builder.put_report(report("a", seq=2))
    found = builder.publish().groups["g"]
    assert (len(found.holders), found.prefill.tolist()) == (0, [0])
    builder.put_group_pods("g", "a", GroupPods())
    assert dict(builder.publish().groups) == {}


def test_groups_are_bounded_and_those_with_pods_come_first():
    builder = SnapshotBuilder(LEVELS, BuilderLimits(max_groups=3))
    builder.put_node(facts("a"))
    builder.put_report(report("a", groups=tuple(group(f"g{n}", 1) for n in range(5))))
    assert len(builder.publish().groups) == 3
    assert builder.groups_left_out == 2
    for number in range(3):
        builder.put_group_pods(f"real{number}", "a", GroupPods(1, 0))
    assert set(builder.publish().groups) == {"real0", "real1", "real2"}
    builder.put_group_pods("late", "a", GroupPods(1, 0))
    assert "late" not in builder.publish().groups


# -- Links -----------------------------------------------------------------------------------


def test_measured_links_stand_by_class_once_settled(builder):
    for name, rack in (("a", "r1"), ("b", "r1"), ("c", "r2")):
        builder.put_node(facts(name, rack, "z"))
    builder.put_report(report("b", at=5.0, paths=(path("a", 9e9), path("c", 2e9))))
    builder.settle_links(5.0)
    snapshot = builder.publish()
    assert {cls: link.bytes_per_second for cls, link in snapshot.links.items()} == {1: 9e9, 2: 2e9}
    builder.put_node(facts("c", "r1", "z"))
    builder.settle_links(6.0)
    after = builder.publish()
    assert set(after.links) == {1}
    assert set(snapshot.links) == {1, 2}


# -- Whatever the order ----------------------------------------------------------------------


def pods_of(random_):
    return NodePods(requested=random_.randrange(9), ended_at=float(random_.randrange(50)))


def report_of(name, random_):
    return report(
        name,
        at=float(random_.randrange(100)),
        rdma=random_.choice([None, True, False]),
        devices=random_.choice([None, tuple(device(n, 0.5) for n in range(random_.randrange(4)))]),
        groups=tuple(
            group(name, random_.choice([None, 0, 5]), free_bytes=random_.choice([None, 9]))
            for name in random_.sample(["g", "h", "i"], random_.randrange(4))
        ),
    )


def facts_of(name, random_):
    return facts(
        name,
        random_.choice(["", "r1", "r2", "r3"]),
        random_.choice(["", "z1", "z2"]),
        devices=random_.randrange(9),
        rdma=random_.choice([-1, 0, 1]),
    )


def described(snapshot):
    """Say by name all that a snapshot says by row; labels by who shares them."""
    rows = range(len(snapshot.names))
    nodes = {
        snapshot.names[row]: {
            "same": [
                sorted(
                    snapshot.names[other]
                    for other in rows
                    if snapshot.labels[row, level]
                    and np.array_equal(snapshot.labels[row, level], snapshot.labels[other, level])
                )
                for level in range(2)
            ],
            "devices": [
                (free, ok)
                for free, ok in zip(
                    snapshot.free_ratio[row].tolist(), snapshot.device_ok[row].tolist(), strict=True
                )
                if ok != -1
            ],
            **{
                field: getattr(snapshot, field)[row].item()
                for field in ("rdma", "requested", "reported_at", "left_at", "from_status")
            },
        }
        for row in rows
    }
    groups = {
        name: {
            "held": sorted(
                zip(
                    (snapshot.names[row] for row in found.holders),
                    found.held_bytes.tolist(),
                    found.held_at.tolist(),
                    strict=True,
                )
            ),
            "prefill": sorted(
                zip(
                    (snapshot.names[row] for row in found.prefill),
                    found.prefill_pods.tolist(),
                    strict=True,
                )
            ),
            "free": {
                snapshot.names[row]: found.kv_free_bytes[row].item()
                for row in rows
                if not np.isnan(found.kv_free_bytes[row])
            },
        }
        for name, found in snapshot.groups.items()
    }
    return nodes, groups


class Churn:
    """Does things to a builder at random, and remembers what holds in the end."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.builder = SnapshotBuilder(LEVELS)
        self.known = {}

    def step(self):
        name = f"n{self.random.randrange(12)}"
        acts = [self.node, self.gone, self.pods, self.report, self.group, self.forget]
        act = self.random.choice(acts)
        if name in self.known or act in (self.node, self.gone):
            act(name)
        if self.random.random() < 0.1:
            self.builder.publish()

    def node(self, name):
        said = facts_of(name, self.random)
        self.builder.put_node(said)
        self.known.setdefault(name, {})["node"] = said

    def gone(self, name):
        self.builder.drop_node(name)
        self.known.pop(name, None)

    def pods(self, name):
        self.known[name]["pods"] = pods_of(self.random)
        self.builder.put_pods(name, self.known[name]["pods"])

    def report(self, name):
        self.known[name]["report"] = report_of(name, self.random)
        self.builder.put_report(self.known[name]["report"])

    def group(self, name):
        pods = GroupPods(self.random.randrange(3), self.random.randrange(3))
        self.known[name]["group"] = pods
        self.builder.put_group_pods("g", name, pods)

    def forget(self, name):
        self.known[name].pop("report", None)
        self.builder.drop_report(name)

    def build_at_once(self):
        builder = SnapshotBuilder(LEVELS)
        for name, said in sorted(self.known.items(), reverse=True):
            builder.put_node(said["node"])
            builder.put_pods(name, said.get("pods", NodePods()))
            if "report" in said:
                builder.put_report(said["report"])
            builder.put_group_pods("g", name, said.get("group", GroupPods()))
        return builder.publish()


@pytest.mark.parametrize("seed", range(8))
def test_a_snapshot_says_the_same_as_one_made_at_once(seed):
    churn = Churn(seed)
    for _ in range(600):
        churn.step()
    assert described(churn.builder.publish()) == described(churn.build_at_once())


def test_nodes_that_come_and_go_leave_nothing_behind(builder):
    for number in range(500):
        name = f"n{number}"
        builder.put_node(facts(name, f"rack-{number}", f"zone-{number}"))
        builder.put_node(facts(name, f"moved-{number}", f"zone-{number}"))
        builder.put_report(report(name, groups=(group(f"g-{number}", 1),), paths=(path(name),)))
        builder.publish()
        builder.drop_node(name)
    builder.put_node(facts("last", "rack", "zone"))
    snapshot = builder.publish()
    assert snapshot.labels.max() <= 2
    assert (dict(snapshot.groups), dict(snapshot.pairs), builder.measured_pairs) == ({}, {}, 0)


def test_numbers_of_values_that_nobody_has_are_used_again():
    numbers = ValueNumbers()
    for number in range(1000):
        numbers.take(f"host-{number}")
        numbers.release(f"host-{number}")
    assert (numbers.take("last"), len(numbers), numbers.take("")) == (1, 1, 0)
    assert numbers.take("other") == 2
    assert numbers.take("last") == 1
    numbers.release("last")
    assert numbers.take("third") == 3
