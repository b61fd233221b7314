"""Bursts and gangs: a scheduler that breaks ties at random, and a watch that lags behind."""

import random
from collections import Counter, deque
from dataclasses import replace

import pytest

from nearkv.extender.deciding import Scorer
from nearkv.extender.distance import DistanceConfig
from nearkv.extender.explaining import explain
from nearkv.extender.headroom import HeadroomConfig
from nearkv.extender.ledger import Ledger
from nearkv.extender.scoring import ScoreConfig
from tests.extender.snapshots import NEVER, Group, Node, ask, make_snapshot

NODES = [f"node-{number}" for number in range(10)]


class Cluster:
    """Nodes, a scheduler that picks at random among the best, and a watch that lags."""

    def __init__(self, *, seed=0, lag_seconds=0.3, devices=8, highest=10, **node):
        self.random = random.Random(seed)
        self.lag_seconds = lag_seconds
        self.devices = devices
        self.ledger = Ledger()
        scoring = ScoreConfig(highest=highest)
        self.scorer = Scorer(DistanceConfig(), HeadroomConfig(), scoring, self.ledger)
        self.snapshot = make_snapshot(
            [Node(name=name, devices=devices, **node) for name in NODES],
            groups={"g": Group(held=dict.fromkeys(NODES, 1e9))},
        )
        self.on_node = Counter()
        self.on_its_way = deque()

    def watch(self, now):
        """See what was bound long enough ago."""
        while self.on_its_way and self.on_its_way[0][0] <= now:
            _, pod, node = self.on_its_way.popleft()
            requested = self.snapshot.requested.copy()
            requested[self.snapshot.rows[node]] += pod.devices
            self.snapshot = replace(
                self.snapshot, requested=requested, version=self.snapshot.version + 1
            )
            self.ledger.bound(pod.uid, node, now)

    def scores(self, pod, now):
        offered = [n for n in NODES if self.on_node[n] + pod.devices <= self.devices]
        self.random.shuffle(offered)
        decision = self.scorer.prioritize(pod, offered, self.snapshot, now)
        return dict(zip(offered, decision.scores.tolist(), strict=True))

    def schedule(self, pod, now):
        self.watch(now)
        scores = self.scores(pod, now)
        best = [node for node, score in scores.items() if score == max(scores.values())]
        node = self.random.choice(best)
        self.on_node[node] += pod.devices
        self.on_its_way.append((now + self.lag_seconds, pod, node))
        return node


def burst(cluster, count=50, seconds=1.0):
    for number in range(count):
        cluster.schedule(ask(name=f"pod-{number}"), number * seconds / count)
    return cluster.on_node


@pytest.mark.parametrize("lag_seconds", [0.0, 0.3, 5.0], ids=["no-lag", "300-ms", "blind"])
@pytest.mark.parametrize("reported_at", [0.0, NEVER], ids=["reports", "no-reports"])
@pytest.mark.parametrize("highest", [10, 100])
def test_fifty_pods_in_a_second_spread_over_ten_equal_nodes(lag_seconds, reported_at, highest):
    for seed in range(20):
        cluster = Cluster(
            seed=seed, lag_seconds=lag_seconds, reported_at=reported_at, highest=highest
        )
        assert max(burst(cluster).values()) <= 6


def test_a_burst_of_pods_without_devices_spreads_while_none_of_it_is_seen():
    cluster = Cluster(lag_seconds=5.0, devices=0)
    for number in range(50):
        cluster.schedule(ask(name=f"pod-{number}", devices=0), number / 50)
    assert max(Counter(node for _, _, node in cluster.on_its_way).values()) <= 6


def test_a_pod_that_comes_alone_leaves_equal_nodes_to_the_scheduler():
    cluster = Cluster()
    for number in range(5):
        scores = cluster.scores(ask(name=f"pod-{number}"), now=number * 60.0)
        assert set(scores.values()) == {5}


def test_the_first_of_a_burst_is_left_to_the_scheduler_and_the_second_is_dealt_out():
    cluster = Cluster()
    assert set(cluster.scores(ask(name="first"), 0.0).values()) == {5}
    assert sorted(cluster.scores(ask(name="second"), 0.02).values()) == [5] * 9 + [6]


def test_a_simulated_gang_answers_alike_and_leaves_nothing_behind():
    cluster = Cluster()
    gang = [ask(name=f"member-{number}", devices=2) for number in range(8)]

    def simulate(now):
        return [cluster.scores(pod, now) for pod in gang]

    simulate(0.0)
    second = simulate(0.1)
    for turn in range(2, 50):
        assert simulate(turn / 10) == second
        taken = cluster.ledger.taken(cluster.snapshot, turn / 10)
        assert taken.sum() == pytest.approx(16.0)
        assert len(cluster.ledger) == 8
    assert not cluster.ledger.taken(cluster.snapshot, 60.0).any()


def test_asking_again_for_a_pod_answers_as_before():
    cluster = Cluster()
    cluster.scores(ask(name="other"), 0.0)
    answers = [cluster.scores(ask(name="pod"), 0.1) for _ in range(10)]
    assert all(answer == answers[0] for answer in answers)


class TestTimeline:
    """A pod's devices are counted once from the answer to the scheduler until it serves."""

    def test_of_a_pod_that_goes_the_usual_way(self):
        cluster, pod = Cluster(), ask(name="first")
        node = cluster.schedule(pod, 0.0)
        free = [self.free(cluster, node, 0.01)]
        cluster.watch(0.3)
        free.append(self.free(cluster, node, 0.31))
        self.report(cluster, node, at=16.0)
        free.append(self.free(cluster, node, 16.1))
        cluster.ledger.covered(pod.uid)
        free.append(self.free(cluster, node, 16.2))
        assert free == [pytest.approx(7.9), 7.0, 7.0, 7.0]

    def test_of_a_pod_whose_report_comes_before_the_watch(self):
        cluster, pod = Cluster(lag_seconds=20.0), ask(name="first")
        cluster.schedule(ask(name="before"), 0.0)
        node = cluster.schedule(pod, 0.1)
        assert self.free(cluster, node, 0.2) == pytest.approx(6.9, abs=0.01)
        self.report(cluster, node, at=10.0)
        cluster.ledger.covered(pod.uid)
        ratio = self.room(cluster, node, 10.1)["headroom_ratio"]
        cluster.watch(20.2)
        assert self.room(cluster, node, 20.3)["headroom_ratio"] == pytest.approx(ratio, abs=0.02)
        assert self.free(cluster, node, 20.4) == 7.0

    def report(self, cluster, node, at):
        """The agent reports one device of a node in use."""
        row = cluster.snapshot.rows[node]
        free_ratio = cluster.snapshot.free_ratio.copy()
        free_ratio[row, 0] = 0.08
        reported_at = cluster.snapshot.reported_at.copy()
        reported_at[:] = at
        cluster.snapshot = replace(cluster.snapshot, free_ratio=free_ratio, reported_at=reported_at)

    def room(self, cluster, node, now):
        """What the extender would tell of a node, without leaving a trace."""
        pod = ask(name="question")
        decision = cluster.scorer.prioritize(pod, NODES, cluster.snapshot, now)
        cluster.ledger.forget(pod.uid)
        (found,) = (e for e in explain(decision.record, 10)["scores"] if e["node"] == node)
        return found

    def free(self, cluster, node, now):
        return self.room(cluster, node, now)["free_devices"]
