import json
import math

import pytest

from nearkv.extender.deciding import Scorer
from nearkv.extender.distance import DistanceConfig
from nearkv.extender.explaining import explain
from nearkv.extender.headroom import HeadroomConfig
from nearkv.extender.ledger import Ledger
from nearkv.extender.scoring import ScoreConfig
from tests.extender.snapshots import NEVER, Group, Node, ask, make_snapshot, measured

NODES = [
    Node(name="source", labels=("r1", "z1", "e")),
    Node(name="rack", labels=("r1", "z1", "e"), requested=2, reported_at=-3.0),
    Node(name="zone", labels=("r2", "z1", "e"), reported_at=NEVER),
    Node(name="elsewhere", labels=("r4", "z4", "x")),
    Node(name="bare", labels=("", "", "")),
]
NAMES = [*(node.name for node in NODES), "unheard-of"]


def explained(*, group=None, names=NAMES, limit=10, config=None, ledger=None, **more):
    facts = Group(held={"source": 2e9}, kv_free={"rack": 5e9}) if group is None else group
    snapshot = make_snapshot(NODES, groups={"g": facts}, **more)
    distance = DistanceConfig() if config is None else config
    scorer = Scorer(distance, HeadroomConfig(), ScoreConfig(), ledger or Ledger())
    record = scorer.prioritize(ask(devices=1), names, snapshot, 0.0).record
    document = explain(record, limit)
    json.dumps(document, allow_nan=False)
    return document


def node(document, name):
    (found,) = (entry for entry in document["scores"] if entry["node"] == name)
    return found


def test_a_decision_says_whose_it_was_and_what_it_rests_on():
    document = explained()
    assert document["pod"] == "default/pod"
    assert document["basis"] == "holders"
    assert document["recompute_ms"] == pytest.approx(819.2)
    assert document["sources"] == [{"node": "source", "as": "holder", "held_bytes": 2e9}]
    assert (document["nodes"], document["nodes_kept"]) == (6, 6)


def test_a_node_says_how_far_it_is_and_what_room_it_has():
    found = node(explained(), "rack")
    assert found["class"] == "rack"
    assert found["source"] == "source"
    assert found["fetch_ms"] == pytest.approx(24.86, rel=1e-3)
    assert found["fetch_is"] == "prior"
    assert (found["free_devices"], found["headroom_ratio"]) == (6.0, 0.75)
    assert (found["verdict"], found["report_age_seconds"]) == ("fresh", 3.0)
    assert found["kv_free_bytes"] == 5e9
    assert found["why"] == (
        "is in the same rack as source, 24.9 ms to fetch on average (by labels); "
        "6 devices are free by requests and ledger, the report is fresh"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("source", "is a source itself, 7.46 ms"),
        ("elsewhere", "shares no level with source, 819 ms to fetch on average (by labels), as"),
        ("bare", "is at an unknown distance from source"),
        ("zone", "there is no report, or it is too old to count"),
        ("unheard-of", "the node is not known yet"),
    ],
)
def test_why_is_a_sentence(name, words):
    assert words in node(explained(), name)["why"]


def test_what_is_unknown_is_null():
    found = node(explained(), "unheard-of")
    assert found["free_devices"] is None
    assert found["report_age_seconds"] is None
    assert found["kv_free_bytes"] is None


def test_measured_times_are_told_apart():
    found = node(explained(pairs={("source", "rack"): measured(1, 20)}), "rack")
    assert found["fetch_is"] == "measured"
    assert "(measured)" in found["why"]


def test_counterparts_are_named_with_the_nearest():
    document = explained(group=Group(prefill={"source": 1, "elsewhere": 1}))
    assert node(document, "elsewhere")["source"] == "elsewhere"
    assert {source["as"] for source in document["sources"]} == {"counterpart"}


def test_the_best_come_first_and_no_more_than_asked_for():
    document = explained(limit=2)
    assert [entry["node"] for entry in document["scores"]] == ["source", "rack"]
    assert explained(limit=-1)["scores"] == []


def test_without_sources_it_says_that_only_headroom_counts():
    document = explained(group=Group())
    assert "only headroom counts" in document["summary"]
    assert "nothing to fetch from" in document["scores"][0]["why"]
    assert document["scores"][0]["source"] is None


def test_equal_nodes_are_said_to_be_equal():
    document = explained(group=Group(), names=["source", "elsewhere"])
    assert document["flat"]
    assert "no say" in document["summary"]


def test_a_pod_dealt_out_in_a_burst_is_said_to_be():
    ledger = Ledger()
    ledger.expect("other", ["zone"], 1, 0.0)
    document = explained(ledger=ledger)
    assert document["dealt_to"] == "source"
    assert "other pods are on their way, so source was put ahead" in document["summary"]


def test_of_equal_nodes_in_a_burst_the_one_put_ahead_is_named():
    ledger = Ledger()
    ledger.expect("other", ["source"], 0, 0.0)
    document = explained(group=Group(), names=["source", "elsewhere"], ledger=ledger)
    assert (document["flat"], document["dealt_to"]) == (True, "elsewhere")
    assert "no say" not in document["summary"]
    assert "so elsewhere was put ahead" in document["summary"]


def test_an_uncapped_time_is_null_not_infinite():
    document = explained(config=DistanceConfig(recompute_cap=False))
    assert document["recompute_ms"] is None
    assert all(math.isfinite(entry["fetch_ms"]) for entry in document["scores"])


def test_a_record_keeps_the_best_of_many_nodes():
    nodes = [Node(name=f"n{i}", requested=i % 8) for i in range(300)]
    snapshot = make_snapshot(nodes)
    scorer = Scorer(DistanceConfig(), HeadroomConfig(), ScoreConfig(), Ledger(), record_nodes=20)
    record = scorer.prioritize(ask(), [n.name for n in nodes], snapshot, 0.0).record
    document = explain(record, 100)
    assert (document["nodes"], document["nodes_kept"]) == (300, 20)
    assert {entry["free_devices"] for entry in document["scores"]} == {8.0}
    assert record.size_bytes < 10_000
