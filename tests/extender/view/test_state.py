"""The cluster's state: whatever order things come in, and what the ledger is told."""

from dataclasses import replace

import numpy as np
import pytest

from nearkv.extender.ledger import Ledger
from nearkv.extender.model import Role
from nearkv.extender.view.pods import PodFacts
from nearkv.extender.view.state import ClusterState, SeenPod, StateLimits
from nearkv.extender.view.statuses import SeenStatus
from nearkv.extender.view.summaries import SummaryRefusedError
from tests.extender.view.things import LEVELS, device, facts, group, path, pod, report, summary

AGENT = "http://agent"


class Told:
    """A ledger that writes down what it is told."""

    def __init__(self):
        self.news = []

    def bound(self, uid, node, _now):
        self.news.append(("bound", uid, node))

    def covered(self, uid):
        self.news.append(("covered", uid))

    def forget(self, uid):
        self.news.append(("forget", uid))


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def state(told):
    return ClusterState(LEVELS, told, StateLimits(forget_report_seconds=900.0, hold_seconds=30.0))


def seen(facts: PodFacts) -> SeenPod:
    return SeenPod(facts.uid, facts)


def over(uid):
    return SeenPod(uid, None, is_over=True)


def test_node_pods_and_report_may_come_in_any_order(state):
    state.report_arrived(report("a", at=3.0, groups=(group(held=5),), devices=(device(),)))
    state.pod_seen(seen(pod("u", "a", devices=2, group="g", role=Role.PREFILL)), 1.0)
    assert state.publish(1.0).names == ()
    state.node_seen(facts("a"))
    snapshot = state.publish(2.0)
    assert (snapshot.requested.tolist(), snapshot.reported_at.tolist()) == ([2], [3.0])
    assert snapshot.groups["g"].prefill.tolist() == [0]
    assert snapshot.groups["g"].holders.tolist() == [0]
    assert snapshot.device_ok.tolist() == [[1]]


def test_a_node_that_comes_back_has_its_pods_and_report(state):
    state.nodes_listed([facts("a"), facts("b")])
    state.pods_listed([seen(pod("u", "a", devices=2))], 1.0)
    state.report_arrived(report("a", at=3.0))
    state.node_deleted("a")
    assert state.publish(4.0).names == ("b",)
    state.node_seen(facts("a", "r9"))
    snapshot = state.publish(5.0)
    assert snapshot.requested[snapshot.rows["a"]] == 2
    assert snapshot.reported_at[snapshot.rows["a"]] == 3.0


@pytest.mark.parametrize("node_first", [True, False])
def test_of_nodes_and_pods_that_come_and_go_nothing_stays(state, node_first):
    for number in range(50):
        name = f"n{number}"
        state.node_seen(facts(name))
        state.pod_seen(seen(pod(f"u{number}", name, group="g")), 1.0)
        if node_first:
            state.node_deleted(name)
        state.pod_seen(over(f"u{number}"), 2.0)
        state.node_deleted(name)
        state.publish(3.0)
    assert (len(state.nodes), len(state.pods), state.pods.nodes) == (0, 0, 0)


def test_a_list_of_nodes_replaces_all(state):
    state.nodes_listed([facts("a"), facts("b")])
    state.nodes_listed([facts("b", "r1"), facts("c")])
    assert set(state.publish(1.0).names) == {"b", "c"}


def test_the_ledger_is_told_with_the_snapshot_that_counts_the_pod(state, told):
    state.nodes_listed([facts("a")])
    state.publish(0.0)
    state.pod_seen(seen(pod("u", "a", devices=3)), 1.0)
    assert told.news == []
    assert state.has_changes
    assert state.publish(2.0).requested.tolist() == [3]
    assert told.news == [("bound", "u", "a")]
    state.publish(3.0)
    assert len(told.news) == 1


def test_an_expected_pod_is_counted_once_before_and_after_it_is_bound():
    ledger = Ledger()
    state = ClusterState(LEVELS, ledger)
    state.nodes_listed([facts("a")])
    snapshot = state.publish(0.0)
    ledger.expect("u", ["a"], 2, 0.0)

    def counted():
        taken = ledger.taken(snapshot, 1.0)[0]
        return snapshot.requested[0] + taken

    assert counted() == 2
    state.pod_seen(seen(pod("u", "a", devices=2)), 1.0)
    assert counted() == 2
    snapshot = state.publish(1.0)
    assert counted() == 2
    assert ledger.taken(snapshot, 1.0)[0] == 0


def test_a_pending_pod_that_changes_is_still_expected(state, told):
    state.pod_seen(SeenPod("u", None), 1.0)
    state.publish(1.0)
    assert told.news == []


def test_pods_that_are_gone_are_forgotten_even_if_never_bound(state, told):
    state.pod_seen(over("u"), 1.0)
    state.publish(1.0)
    assert told.news == [("forget", "u")]


def test_a_pod_bound_and_gone_between_two_snapshots_is_only_gone(state, told):
    state.pod_seen(seen(pod("u")), 1.0)
    state.pod_seen(over("u"), 2.0)
    state.publish(3.0)
    assert told.news == [("forget", "u")]


def test_pods_that_ended_give_back_what_they_had_in_lists_too(state):
    state.nodes_listed([facts("n1")])
    state.pods_listed([seen(pod("u", devices=2)), seen(pod("v", devices=1))], 1.0)
    state.pods_listed([over("u"), seen(pod("v", devices=1))], 8.0)
    snapshot = state.publish(9.0)
    assert (snapshot.requested.tolist(), snapshot.left_at.tolist()) == ([1], [8.0])


def test_a_long_list_is_taken_in_steps_and_the_ledger_hears_of_it_at_the_end(state, told):
    state.nodes_listed([facts("n1"), facts("n2")])
    state.pods_listed([seen(pod("old", "n1"))], 1.0)
    state.publish(1.0)
    told.news.clear()
    pods = [seen(pod(f"u{i}", "n2", devices=1)) for i in range(3000)]
    steps = 0
    for _ in state.listing_pods(pods, 2.0):
        steps += 1
        state.publish(2.0)
        assert told.news == []
    assert steps >= 7
    snapshot = state.publish(3.0)
    assert snapshot.requested.tolist() == [0, 3000]
    assert ("forget", "old") in told.news
    assert len(told.news) == 3001


def test_the_ledger_hears_which_pods_a_report_covers(state, told):
    state.report_arrived(report(pods=("u", "v")))
    state.report_arrived(report(pods=("u", "v"), at=5.0))
    state.publish(6.0)
    assert sorted(told.news) == [("covered", "u"), ("covered", "v")]


def test_roles_of_running_pods_move_with_them(state):
    state.nodes_listed([facts("n1"), facts("n2")])
    state.pod_seen(seen(pod("u", "n1", group="g", role=Role.PREFILL)), 1.0)
    state.pod_seen(seen(pod("w", "n2", group="g", role=Role.BOTH)), 1.0)
    found = state.publish(1.0).groups["g"]
    assert (found.prefill.tolist(), found.decode.tolist()) == ([0, 1], [1])
    state.pod_seen(seen(replace(pod("u", "n1", group="g", role=Role.PREFILL), running=False)), 2.0)
    assert state.publish(2.0).groups["g"].prefill.tolist() == [1]


# -- Reports over time -----------------------------------------------------------------------


def test_a_refused_report_is_counted_and_changes_nothing(state):
    state.nodes_listed([facts("n1")])
    state.report_arrived(report(seq=5, devices=(device(),)))
    with pytest.raises(SummaryRefusedError):
        state.report_arrived(report(seq=4, devices=()))
    assert state.refused == {"older": 1}
    assert state.publish(1.0).device_ok.tolist() == [[1]]


def test_word_that_nothing_changed_keeps_a_report_fresh(state):
    state.nodes_listed([facts("n1")])
    state.report_arrived(report(devices=(device(),)))
    first = state.publish(0.0)
    assert state.report_holds("n1", AGENT, 25.0, 60.0)
    second = state.publish(26.0)
    assert (second.reported_at.tolist(), second.report_seconds.tolist()) == ([25.0], [60.0])
    assert second.device_ok is first.device_ok
    assert not state.report_holds("n1", "http://other", 30.0, 60.0)
    assert not state.report_holds("n9", AGENT, 30.0, 60.0)


def test_a_lost_agents_report_ages_by_its_own_interval(state):
    state.nodes_listed([facts("n1")])
    state.report_arrived(report())
    assert state.publish(0.0).report_seconds.tolist() == [30.0]
    state.agent_lost("n1", AGENT)
    state.agent_lost("n7", AGENT)
    snapshot = state.publish(1.0)
    assert (snapshot.report_seconds.tolist(), snapshot.reported_at.tolist()) == ([5.0], [0.0])


def test_a_report_that_nobody_renews_is_forgotten(state):
    state.nodes_listed([facts("n1")])
    state.report_arrived(report(devices=(device(),), groups=(group(held=5),)))
    state.sweep(899.0)
    assert state.publish(899.0).groups["g"].holders.tolist() == [0]
    state.sweep(901.0)
    snapshot = state.publish(901.0)
    assert (snapshot.reported_at.tolist(), dict(snapshot.groups)) == ([float("-inf")], {})
    assert np.isnan(snapshot.free_ratio).all()
    assert not state.report_holds("n1", AGENT, 902.0, 30.0)


def test_sweeping_settles_measured_links(state):
    state.nodes_listed([facts("n1", "r1"), facts("n2", "r1")])
    state.report_arrived(report(paths=(path("n2", 3e9),)))
    assert dict(state.publish(0.0).links) == {}
    state.sweep(1.0)
    assert state.publish(1.0).links[1].bytes_per_second == 3e9
    assert state.measured_pairs == 1


# -- WorkerStatus ----------------------------------------------------------------------------


def status(node="n1", **fields):
    said = summary(node, boot="WorkerStatus", seq=0, interval_seconds=300.0, **fields)
    return SeenStatus(("ns", f"w-{node}"), said)


def test_a_worker_status_stands_in_where_no_agent_ever_spoke(state):
    state.nodes_listed([facts("n1")])
    state.status_seen(status(devices=(device(),)), 5.0)
    state.sweep(6.0)
    snapshot = state.publish(6.0)
    assert (snapshot.from_status.tolist(), snapshot.reported_at.tolist()) == ([1], [5.0])
    assert snapshot.report_seconds.tolist() == [300.0]
    state.report_arrived(report(at=7.0, devices=(device(health="failed"),)))
    state.sweep(8.0)
    snapshot = state.publish(8.0)
    assert (snapshot.from_status.tolist(), snapshot.device_ok.tolist()) == ([0], [[0]])


def test_a_worker_status_stands_in_for_a_lost_agent_only_when_it_is_newer(state):
    state.nodes_listed([facts("n1")])
    state.report_arrived(report(at=100.0))
    state.status_seen(status(), 200.0)
    state.sweep(201.0)
    assert state.publish(201.0).from_status.tolist() == [0]
    state.agent_lost("n1", AGENT)
    state.sweep(202.0)
    assert state.publish(202.0).from_status.tolist() == [1]


def test_a_stale_worker_status_does_not_hide_a_newer_report(state):
    state.nodes_listed([facts("n1")])
    state.status_seen(status(), 90.0)
    state.report_arrived(report(at=100.0))
    state.agent_lost("n1", AGENT)
    state.sweep(500.0)
    assert state.publish(500.0).from_status.tolist() == [0]


def test_a_renewed_worker_status_is_taken_and_an_unchanged_one_is_left(state):
    state.nodes_listed([facts("n1")])
    state.statuses_listed([status()], 5.0)
    state.sweep(6.0)
    first = state.publish(6.0)
    state.sweep(7.0)
    assert state.publish(7.0) is first
    state.status_seen(status(devices=(device(),)), 100.0)
    state.sweep(101.0)
    assert state.publish(101.0).reported_at.tolist() == [100.0]
    state.status_deleted(status())
    state.sweep(102.0)
    assert state.publish(102.0).reported_at.tolist() == [100.0]


def test_of_several_objects_of_a_node_each_change_counts_at_once(state):
    state.nodes_listed([facts("n1")])
    state.status_seen(replace(status(groups=(group(held=5),)), key=("ns", "a")), 5.0)
    state.sweep(6.0)
    state.status_seen(replace(status(groups=(group(held=2),)), key=("ns", "b")), 9.0)
    state.sweep(10.0)
    assert state.publish(10.0).groups["g"].held_bytes.tolist() == [7.0]
    assert state.publish(10.0).reported_at.tolist() == [5.0]


def test_an_old_worker_status_is_forgotten_and_not_taken_again(state):
    state.nodes_listed([facts("n1")])
    state.status_seen(status(devices=(device(),)), 0.0)
    state.sweep(899.0)
    assert state.publish(899.0).reported_at.tolist() == [0.0]
    state.sweep(901.0)
    forgotten = state.publish(901.0)
    assert forgotten.reported_at.tolist() == [float("-inf")]
    state.sweep(902.0)
    assert state.publish(902.0) is forgotten
    state.status_seen(status(devices=(device(),)), 950.0)
    state.sweep(951.0)
    assert state.publish(951.0).reported_at.tolist() == [950.0]
