"""From the node's state to the facts of one pod's engine."""

import msgspec

from nearkv.agent.engine_metrics import RankReading
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.kubernetes.pod_engines import PodRules, read_engine
from nearkv.agent.node_state import NodeState
from nearkv.agent.state_log import StateLog
from nearkv.agent.worker_status.observing import observe
from nearkv.state.model import EngineState, EventsState
from tests.agent.kubernetes.things import pod

READING = RankReading(
    kv_used_ratio=0.25,
    requests_running=2,
    requests_waiting=3,
    kv_total_tokens=1000,
    kv_total_bytes=100_000,
    block_size=2,
    awake=True,
)
STORE = msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1, 2], 2]], 0])


class Node(NodeState):
    """A node's state with a clock that tests move by hand."""

    def __init__(self):
        self.seconds = 100.0
        log = StateLog(boot="b", node="n1", version="1")
        super().__init__(log, boot="b", flush_seconds=60.0, now=lambda: self.seconds)

    def add_rank(self, name="u-e", *, reading=READING, events=True):
        identity = EngineIdentity(
            name, "http://e", "n1", "tiny", ("tiny",), group="g", role="decode", engine_version="1"
        )
        tracker = EngineTracker(identity, self.log, secret=b"", table_limit_bytes=1 << 20)
        self.trackers[name] = tracker
        self.log.put_info(tracker.info)
        if events:
            tracker.on_message(0, STORE, self.seconds)
        if reading is not None:
            tracker.on_reading(reading, start_time_seconds=1.0, boot="b", now=self.seconds)
        return tracker


ENGINE = read_engine(pod(), PodRules())


def test_an_engine_that_never_answered():
    node = Node()
    node.problems["u-e"] = "http://e: connection refused"
    facts = observe(node, ENGINE)
    assert (facts.state, facts.events, facts.metrics_age_seconds) == (None, None, None)
    assert (facts.role, facts.group, facts.kv_used_ratio) == ("decode", "g", None)
    assert facts.problem == "http://e: connection refused"


def test_an_engine_of_one_rank():
    node = Node()
    node.add_rank()
    node.seconds += 2.0
    facts = observe(node, ENGINE)
    assert (facts.state, facts.events) == (EngineState.READY, EventsState.LIVE)
    assert (facts.model, facts.version, facts.ranks) == ("tiny", "1", 1)
    assert facts.metrics_age_seconds == 2.0
    assert (facts.kv_used_ratio, facts.kv_total_bytes) == (0.25, 100_000)
    assert facts.kv_bytes_per_token == 100
    assert facts.kv_held_bytes == 200  # one block of two tokens
    assert (facts.requests_running, facts.requests_waiting) == (2, 3)
    assert facts.blocks == {"GPU": 1}
    assert not facts.can_transfer


def test_ranks_are_added_up_and_the_worst_counts():
    node = Node()
    node.add_rank("u-e/dp0")
    other = node.add_rank("u-e/dp1")
    facts = observe(node, ENGINE)
    assert (facts.ranks, facts.kv_total_bytes, facts.kv_held_bytes) == (2, 200_000, 400)
    assert facts.blocks == {"GPU": 2}
    other.on_subscription(connected=False)
    other.on_unreachable()
    facts = observe(node, ENGINE)
    assert (facts.state, facts.events) == (EngineState.UNREACHABLE, EventsState.LOST)


def test_a_rank_that_is_not_known_makes_the_sum_unknown():
    node = Node()
    node.add_rank("u-e/dp0")
    node.add_rank("u-e/dp1", reading=None, events=False)
    facts = observe(node, ENGINE)
    assert (facts.kv_used_ratio, facts.kv_total_bytes, facts.kv_held_bytes) == (None, None, None)
    assert facts.metrics_age_seconds is None


def test_engines_of_other_pods_do_not_count():
    node = Node()
    node.add_rank("u-e2")
    node.add_rank("u-other/dp0")
    assert observe(node, ENGINE).state is None
