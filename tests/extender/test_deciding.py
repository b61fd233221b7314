from dataclasses import replace

import numpy as np
import pytest

from nearkv.extender import deciding
from nearkv.extender.deciding import FAILED_HARDWARE, FOREIGN_MEMORY, Scorer
from nearkv.extender.distance import DistanceConfig
from nearkv.extender.headroom import HeadroomConfig
from nearkv.extender.ledger import Ledger
from nearkv.extender.presets import PRESETS
from nearkv.extender.scoring import ScoreConfig
from tests.extender.snapshots import Group, Node, ask, make_cluster, make_snapshot

USED, CLEAN = 0.08, 0.99
NODES = [
    Node(name="source", labels=("r1", "z1", "e")),
    Node(name="same-rack", labels=("r1", "z1", "e")),
    Node(name="same-zone", labels=("r2", "z1", "e")),
    Node(name="same-region", labels=("r3", "z2", "e")),
    Node(name="foreign", labels=("r1", "z1", "e"), free=(USED,) * 8),
    Node(name="failed", labels=("r1", "z1", "e"), ok=(0,) * 8),
]
SNAPSHOT = make_snapshot(NODES, groups={"g": Group(held={"source": 1e9})})


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def scorer(ledger):
    return Scorer(DistanceConfig(), HeadroomConfig(), ScoreConfig(), ledger)


def scores(scorer, names, pod=None, snapshot=SNAPSHOT, now=0.0):
    return scorer.prioritize(pod or ask(), names, snapshot, now).scores.tolist()


class TestFilter:
    names = ("same-rack", "failed", "unheard-of", "foreign", "same-zone")

    def test_rejects_what_cannot_work_and_says_why(self, scorer):
        decision = scorer.filter(ask(), list(self.names), SNAPSHOT, 0.0)
        assert decision.kept == ["same-rack", "unheard-of", "same-zone"]
        assert decision.failed == {"foreign": FOREIGN_MEMORY}
        assert decision.unresolvable == {"failed": FAILED_HARDWARE}

    @pytest.mark.parametrize("pod", [ask(group=""), ask(devices=0)], ids=["not ours", "no devices"])
    def test_leaves_other_pods_alone(self, scorer, pod):
        assert scorer.filter(pod, list(self.names), SNAPSHOT, 0.0).kept == list(self.names)

    def test_expects_nothing(self, scorer, ledger):
        scorer.filter(ask(), list(self.names), SNAPSHOT, 0.0)
        assert len(ledger) == 0

    def test_of_no_nodes(self, scorer):
        assert scorer.filter(ask(), [], SNAPSHOT, 0.0).kept == []


def test_nearer_nodes_score_higher(scorer):
    names = ["same-region", "same-rack", "source", "same-zone"]
    region, rack, source, zone = scores(scorer, names)
    assert region < zone < rack < source == 10


def test_pods_that_are_not_ours_get_neutral_scores_and_leave_nothing(scorer, ledger):
    decision = scorer.prioritize(ask(group=""), ["source", "same-zone"], SNAPSHOT, 0.0)
    assert decision.scores.tolist() == [5, 5]
    assert decision.record is None
    assert len(ledger) == 0


def test_a_group_that_is_not_known_is_placed_by_headroom(scorer):
    half_full = replace(NODES[0], requested=4)
    snapshot = make_snapshot([half_full, NODES[1]])
    assert scores(scorer, ["source", "same-rack"], snapshot=snapshot) == [5, 10]


@pytest.mark.parametrize("names", [["source"], ["source"] * 3, ["unheard-of"]])
def test_one_node_gets_the_highest_score(scorer, names):
    assert scores(scorer, names) == [10] * len(names)


def test_unknown_nodes_get_the_cost_of_unknown_distance(scorer):
    near, unknown, other = scores(scorer, ["same-rack", "unheard-of", "strange"])
    assert unknown == other < near


def test_no_nodes_no_scores(scorer, ledger):
    assert scores(scorer, []) == []
    assert len(ledger) == 0


def test_the_pod_is_expected_on_the_best_node(scorer, ledger):
    scorer.prioritize(ask(devices=2), ["same-rack", "same-zone"], SNAPSHOT, 0.0)
    assert ledger.taken(SNAPSHOT, 0.0).tolist() == [0, 2, 0, 0, 0, 0, 0]


def test_nodes_that_tie_share_the_pod(scorer, ledger):
    snapshot = make_snapshot([Node(name="a"), Node(name="b")])
    scorer.prioritize(ask(devices=2), ["a", "b"], snapshot, 0.0)
    assert ledger.taken(snapshot, 0.0).tolist() == [1, 1, 0]


def test_pods_without_a_uid_are_told_apart_by_name(scorer, ledger):
    scorer.prioritize(ask(name="one", uid=""), ["same-rack", "source"], SNAPSHOT, 0.0)
    scorer.prioritize(ask(name="two", uid=""), ["same-rack", "source"], SNAPSHOT, 0.0)
    assert len(ledger) == 2


class TestKeeping:
    """Work is done again exactly when what it was made from has changed."""

    @pytest.fixture
    def counted(self, monkeypatch):
        calls = []
        real = deciding.fetch_times
        monkeypatch.setattr(
            deciding, "fetch_times", lambda *arguments: calls.append(1) or real(*arguments)
        )
        return calls

    @pytest.mark.parametrize(
        ("change", "times"),
        [
            ({"version": 2}, 1),
            ({"requested": SNAPSHOT.requested.copy()}, 1),
            ({"labels": SNAPSHOT.labels.copy()}, 1),
            ({"links": dict(SNAPSHOT.links)}, 1),
            ({"labels": SNAPSHOT.labels[::-1]}, 2),
            ({"rdma": np.zeros(6, np.int8)}, 2),
            ({"groups": {"g": replace(SNAPSHOT.groups["g"])}}, 2),
        ],
        ids=["version", "requests", "equal labels", "equal links", "labels", "rdma", "group"],
    )
    def test_of_fetch_times(self, scorer, counted, change, times):
        for snapshot in (SNAPSHOT, replace(SNAPSHOT, **change)):
            scores(scorer, ["source", "same-zone"], snapshot=snapshot)
        assert len(counted) == times

    def test_of_fetch_times_until_trust_changes(self, scorer, counted):
        for now in (0.0, 90.0, 90.5, 91.0):
            scores(scorer, ["source"], now=now)
        assert len(counted) == 2

    def test_is_bounded(self, scorer):
        for tokens in range(500):
            scores(scorer, ["source"], pod=ask(prefix_tokens=tokens + 1))
        assert len(scorer._times._kept) <= 64

    def test_of_rows_until_nodes_change(self, scorer):
        names = ["source", "same-zone"]
        before = scores(scorer, names)
        turned = make_snapshot(NODES[::-1], groups={"g": Group(held={"same-zone": 1e9})})
        after = scores(scorer, names, snapshot=turned)
        assert before == after[::-1]


def test_filter_looks_at_memory_as_each_pod_needs_it(scorer):
    snapshot = make_snapshot([Node(name="a", free=(0.6,) * 8)])
    kept = [
        scorer.filter(ask(memory_ratio=ratio), ["a"], snapshot, 0.0).kept
        for ratio in (0.9, 0.5, 0.9)
    ]
    assert kept == [[], ["a"], []]


def test_a_large_cluster_is_scored_whole(scorer):
    snapshot = make_cluster(5000)
    levels = DistanceConfig(levels=PRESETS["aws"][:4])
    scorer = Scorer(levels, HeadroomConfig(), ScoreConfig(), Ledger(), record_nodes=100)
    decision = scorer.prioritize(ask(), list(snapshot.names), snapshot, 0.0)
    assert len(decision.scores) == 5000
    best = int(decision.scores.argmax())
    assert snapshot.groups["g"].holders.tolist().count(best) or decision.scores[best] >= 8
    assert decision.record.size_bytes < 100_000
