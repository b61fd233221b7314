"""The memory of all block tables together: who gives way, and when it is enough."""

from nearkv.agent.block_table import BYTES_PER_BLOCK
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.kv_events import BlockStored
from nearkv.agent.state_log import StateLog
from nearkv.agent.table_budget import keep_within
from nearkv.block_keys import unpack_keys
from nearkv.state.codec import FrameReader


class Node:
    """Engines with tables of their own in one log."""

    def __init__(self, *engines, table_limit_blocks=1000):
        self.log = StateLog(boot="b", node="n", version="1")
        self.trackers = {
            engine: EngineTracker(
                EngineIdentity(engine, "http://e", "n", "tiny", ("tiny",), key_model="tiny"),
                self.log,
                secret=b"",
                table_limit_bytes=table_limit_blocks * BYTES_PER_BLOCK,
            )
            for engine in engines
        }

    def store(self, engine, now, *handles, parent=None):
        tokens = [handle for handle in handles for _ in range(2)]
        event = BlockStored(list(handles), parent, tokens, 2)
        self.trackers[engine].table.apply([event], self.log.blocks_of(engine), now)

    def keep(self, blocks):
        return keep_within(self.trackers.values(), blocks * BYTES_PER_BLOCK) // BYTES_PER_BLOCK

    @property
    def held(self):
        return {engine: tracker.table.block_count for engine, tracker in self.trackers.items()}


def test_nothing_goes_while_all_fits():
    node = Node("a", "b")
    node.store("a", 0.0, 1, 2)
    node.store("b", 1.0, 3)
    assert (node.keep(3), node.held) == (0, {"a": 2, "b": 1})


def test_the_least_used_goes_first_whatever_engine_has_it():
    node = Node("a", "b")
    node.store("a", 0.0, 1, 2)
    node.store("b", 1.0, 3, 4)
    node.store("a", 2.0, 5, 6)
    assert (node.keep(5), node.held) == (1, {"a": 3, "b": 2})
    assert (node.keep(2), node.held) == (3, {"a": 2, "b": 0})


def test_consumers_are_told_of_what_went():
    node = Node("a")
    node.store("a", 0.0, 1, 2)
    node.log.seal()
    node.keep(1)
    (delta,) = FrameReader().feed(node.log.seal())
    (change,) = delta.blocks
    assert (len(unpack_keys(change.removed)), change.added) == (1, b"")
    assert node.trackers["a"].is_reduced


def test_a_table_gives_way_before_it_has_to_refuse():
    node = Node("a", table_limit_blocks=100)
    for handle in range(120):
        node.store("a", float(handle), handle)
        node.keep(10_000)
    counts = node.trackers["a"].table.counts
    assert (node.held, counts.refused, counts.evicted) == ({"a": 98}, 0, 22)


def test_orphans_give_way_before_blocks():
    node = Node("a", "b")
    node.store("a", 0.0, 1)
    node.store("b", 1.0, *range(10, 40), parent=9)
    assert node.trackers["b"].table.orphan_count == 30
    node.keep(2)
    assert (node.held, node.trackers["b"].table.orphan_count) == ({"a": 1, "b": 0}, 0)
    assert node.trackers["b"].table.counts.orphans_dropped == 30
