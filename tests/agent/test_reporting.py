"""What people and Prometheus see of a node: unknown is shown as unknown."""

import asyncio
import json
import re

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nearkv.agent.engine_metrics import RankReading
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.metrics import NodeCollector
from nearkv.agent.node_state import NodeState
from nearkv.agent.state_log import StateLog
from nearkv.agent.status import describe_node
from nearkv.freshness import FreshnessLimits
from nearkv.state.codec import FrameReader
from nearkv.state.model import SnapshotBegin

FULL = RankReading(
    kv_used_ratio=0.25,
    requests_running=2,
    requests_waiting=0,
    prefix_hits_tokens=30,
    prefix_queries_tokens=100,
    kv_total_tokens=768,
    kv_total_bytes=1000,
    awake=True,
)
STORE = msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1, 2], 2]], 0])


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


class Node(NodeState):
    """A node's state with a clock that tests move by hand."""

    def __init__(self):
        self.clock = Clock()
        log = StateLog(boot="b", node="n", version="1")
        super().__init__(log, boot="b", flush_seconds=0.0, now=self.clock)

    def add_engine(self, name="e"):
        identity = EngineIdentity(name, f"http://{name}", "n", "tiny", ("tiny",), key_model="tiny")
        tracker = EngineTracker(identity, self.log, secret=b"", table_limit_bytes=1 << 20)
        self.add(tracker)
        return tracker

    def read(self, tracker, reading):
        tracker.on_reading(reading, start_time_seconds=1.0, boot="b", now=self.now())

    def describe(self):
        return describe_node(self, node="n", started_at=90.0, limits=FreshnessLimits())

    def samples(self):
        registry = CollectorRegistry()
        registry.register(NodeCollector(self))
        text = generate_latest(registry).decode()
        return [
            (sample.name.removeprefix("nearkv_agent_"), sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def values(self):
        return {name: value for name, labels, value in self.samples() if "reason" not in labels}


@pytest.fixture
async def node():
    return Node()


# -- Status ----------------------------------------------------------------------------------


async def test_an_engine_never_read_is_unknown_in_every_number(node):
    node.add_engine()
    (engine,) = node.describe()["engines"]
    assert engine["freshness"] == "unknown"
    numbers = [
        key for key in engine if re.match("kv_|requests_|prefix_|metrics_age|events_age", key)
    ]
    assert len(numbers) == 10
    assert all(engine[key] is None for key in numbers)


async def test_a_reading_shows_with_its_age_and_freshness(node):
    tracker = node.add_engine()
    node.read(tracker, FULL)
    tracker.on_message(0, STORE, node.now())
    node.clock.seconds += 5
    (engine,) = node.describe()["engines"]
    assert (engine["kv_used_bytes"], engine["kv_free_bytes"]) == (250, 750)
    assert (engine["metrics_age_seconds"], engine["events_age_seconds"]) == (5, 5)
    assert (engine["freshness"], engine["state"], engine["events"]) == ("aged", "ready", "live")
    assert engine["blocks"] == {"GPU": 1}


async def test_the_status_is_plain_json_with_the_nodes_own_facts(node):
    node.read(node.add_engine("b"), FULL)
    node.add_engine("a")
    status = json.loads(json.dumps(node.describe()))
    assert (status["component"], status["node"], status["uptime_seconds"]) == ("agent", "n", 10)
    assert [engine["id"] for engine in status["engines"]] == ["a", "b"]


async def test_problems_are_named_once_for_each_engine(node):
    for name in ("e1", "e10"):
        tracker = node.add_engine(name)
        tracker.on_message(0, STORE, 0.0)
        tracker.on_unreachable()
    node.problems["e10"] = "/metrics: refused"
    node.add_engine("silent")
    partial = node.add_engine("late")
    partial.on_replay(0, None, 0.0)
    problems = [text.split(":")[0] for text in node.describe()["problems"]]
    assert sorted(problems) == ["e1", "e10", "late", "silent"]


async def test_an_engine_still_looked_for_is_a_problem_too(node):
    node.problems["e"] = "http://e does not answer: refused"
    assert node.describe()["problems"] == ["e: http://e does not answer: refused"]


# -- Metrics ---------------------------------------------------------------------------------


async def test_what_is_unknown_has_no_sample(node):
    node.read(node.add_engine(), RankReading(requests_running=0))
    values = node.values()
    assert values["gpu_running_requests"] == 0
    for name in ("gpu_queue_depth", "kv_cache_used_bytes", "kv_cache_prefix_hits_tokens_total"):
        assert name not in values


async def test_the_series_that_operators_ask_for_are_there(node):
    tracker = node.add_engine()
    node.read(tracker, FULL)
    tracker.on_message(0, STORE, node.now())
    node.clock.seconds += 2
    expected = {
        "kv_cache_prefix_hits_tokens_total": 30,
        "kv_cache_prefix_miss_tokens_total": 70,
        "kv_cache_used_bytes": 250,
        "kv_cache_free_bytes": 750,
        "kv_cache_total_capacity_bytes": 1000,
        "kv_cache_total_capacity_tokens": 768,
        "gpu_queue_depth": 0,
        "gpu_running_requests": 2,
        "metrics_age_seconds": 2,
        "engine_up": 1,
        "blocks": 1,
        "event_messages_total": 1,
        "blocks_stored_total": 1,
        "blocks_removed_total": 0,
    }
    values = node.values()
    assert {name: values.get(name) for name in expected} == expected


async def test_misses_stay_unknown_where_only_hits_are_told(node):
    node.read(node.add_engine(), RankReading(prefix_hits_tokens=30))
    assert node.values()["kv_cache_prefix_hits_tokens_total"] == 30
    assert "kv_cache_prefix_miss_tokens_total" not in node.values()


async def test_engines_are_told_apart_and_no_label_grows_with_the_cache(node):
    for name in ("e1", "e2"):
        tracker = node.add_engine(name)
        node.read(tracker, FULL)
        tracker.on_message(0, STORE, node.now())
    for name, labels, _ in node.samples():
        assert labels.keys() <= {"engine", "model", "tier", "reason"}, name
        assert labels.get("engine") in (None, "e1", "e2")


async def test_trouble_is_counted_by_reason(node):
    tracker = node.add_engine()
    tracker.on_message(0, msgspec.msgpack.encode([0, [["New"], ["New"]]]), 0.0)
    tracker.on_message(1, b"\xc1", 0.0)
    counts = {labels["reason"]: value for _, labels, value in node.samples() if "reason" in labels}
    assert (counts["unknown_tag"], counts["undecodable"], counts["gap"]) == (2, 1, 0)


async def test_names_follow_prometheus_rules(node):
    node.read(node.add_engine(), FULL)
    families = list(NodeCollector(node).collect())
    assert len({family.name for family in families}) == len(families) > 15
    for family in families:
        assert re.fullmatch(r"nearkv_agent_[a-z][a-z0-9_]*", family.name)
        assert not re.search(r"_(ms|milliseconds|kb|mb|gb|percent|count|sum|total)$", family.name)
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")


# -- The state as a whole --------------------------------------------------------------------


async def test_changes_wake_whoever_waits_and_only_then(node):
    waiting = asyncio.create_task(node.wait_for_news(5.0))
    await asyncio.sleep(0)
    node.add_engine()
    assert await waiting is True
    assert node.log.cursor.seq == 1
    assert await node.wait_for_news(0.01) is False


async def test_a_snapshot_holds_what_was_not_yet_sealed(node):
    node.add_engine().on_message(0, STORE, 0.0)
    frames = [frame for data in node.snapshot() for frame in FrameReader().feed(data)]
    assert isinstance(frames[0], SnapshotBegin)
    assert frames[0].cursor.seq == 1
    assert frames[0].engines == (node.trackers["e"].info,)
    assert len(frames[1].keys) == 8


async def test_a_snapshot_is_of_its_moment_however_late_it_is_read(node):
    tracker = node.add_engine()
    tracker.on_message(0, STORE, 0.0)
    frames = node.snapshot()
    tracker.restart(noticed_by_events=True)
    node.log.seal()
    begin, blocks, end = (f for data in frames for f in FrameReader().feed(data))
    assert begin.cursor == end.cursor
    assert begin.engines[0].incarnation == ""
    assert len(blocks.keys) == 8


async def test_only_what_was_read_has_an_age(node):
    node.read(node.add_engine("e1"), FULL)
    node.add_engine("e2")
    node.clock.seconds += 3
    assert node.ages_seconds() == {"e1": 3}


async def test_a_dropped_engine_leaves_no_trace(node):
    node.read(node.add_engine(), FULL)
    node.drop("e")
    assert (node.trackers, node.log.infos, node.describe()["engines"]) == ({}, {}, [])
