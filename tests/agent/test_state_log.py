"""The log that consumers follow: deltas, cursors, snapshots, and the bound on all of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkv.agent import state_log
from nearkv.agent.block_table import BlockTable
from nearkv.agent.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from nearkv.agent.state_log import StateLog
from nearkv.block_keys import unpack_keys
from nearkv.state.codec import FrameReader
from nearkv.state.model import (
    Blocks,
    Cursor,
    Delta,
    EngineGauges,
    EngineInfo,
    Heartbeat,
    SnapshotBegin,
    SnapshotEnd,
)


def info(engine="e", incarnation="1", **fields):
    return EngineInfo(id=engine, incarnation=incarnation, url="http://e", **fields)


def read(frame):
    (decoded,) = FrameReader().feed(frame)
    return decoded


class Consumer:
    """Applies frames as the wire types' docstrings say; nothing but frames reaches it."""

    def __init__(self):
        self.cursor = None
        self.incarnations, self.gauges, self.blocks = {}, {}, {}

    def apply(self, frame):
        match read(frame):
            case SnapshotBegin() as begin:
                self.incarnations = {e.id: e.incarnation for e in begin.engines}
                self.gauges = {g.id: g for g in begin.gauges}
                self.blocks = {}
            case Blocks(engine=engine, tier=tier, keys=keys):
                self.blocks.setdefault((engine, tier), set()).update(unpack_keys(keys))
            case SnapshotEnd(cursor=cursor):
                self.cursor = cursor
            case Delta() as delta:
                assert delta.cursor.seq == self.cursor.seq + 1
                self.cursor = delta.cursor
                self._apply_delta(delta)

    def _apply_delta(self, delta):
        for engine in delta.gone:
            self._forget(engine)
            self.incarnations.pop(engine, None)
            self.gauges.pop(engine, None)
        for engine in delta.engines:
            if self.incarnations.get(engine.id) != engine.incarnation:
                self._forget(engine.id)
                self.gauges.pop(engine.id, None)
            self.incarnations[engine.id] = engine.incarnation
        for change in delta.blocks:
            if change.cleared:
                self._forget(change.engine)
            held = self.blocks.setdefault((change.engine, change.tier), set())
            held -= set(unpack_keys(change.removed))
            held |= set(unpack_keys(change.added))
        self.gauges.update((gauge.id, gauge) for gauge in delta.gauges)

    def _forget(self, engine):
        self.blocks = {place: keys for place, keys in self.blocks.items() if place[0] != engine}

    def catch_up(self, log, tables):
        deltas = log.after(self.cursor)
        if deltas is None:
            held = (
                (engine, tier, keys)
                for engine, table in tables.items()
                for tier, keys in table.keys_by_tier().items()
            )
            deltas = log.snapshot(held, now=0.0)
        for frame in deltas:
            self.apply(frame)

    @property
    def held(self):
        return {place: keys for place, keys in self.blocks.items() if keys}


@pytest.fixture
def log():
    return StateLog(boot="b", node="n", version="1")


def fill(log, count):
    return [
        log.put_gauges(EngineGauges(id="e", requests_running=n)) or log.seal() for n in range(count)
    ]


# -- Deltas ----------------------------------------------------------------------------------


def test_nothing_new_makes_no_delta(log):
    assert log.seal() is None
    assert log.blocks_of("e") is not None  # merely asking is not a change
    assert log.seal() is None
    assert log.cursor == Cursor("b", 0, 0)


def test_what_was_collected_is_sealed_once(log):
    log.put_info(info())
    log.put_gauges(EngineGauges(id="e", requests_running=1))
    log.blocks_of("e").add("GPU", [1, 2])
    log.blocks_of("e").remove("GPU", [2, 3])
    delta = read(log.seal())
    assert delta.cursor == log.cursor == Cursor("b", 0, 1)
    assert delta.engines == (info(),)
    assert delta.gauges == (EngineGauges(id="e", requests_running=1),)
    (change,) = delta.blocks
    assert unpack_keys(change.added) == (1,)
    assert set(unpack_keys(change.removed)) == {2, 3}
    assert not log.has_pending
    assert log.seal() is None


def test_an_equal_info_is_no_news(log):
    log.put_info(info())
    log.seal()
    log.put_info(info())
    assert log.seal() is None
    log.put_info(info(role="decode"))
    assert read(log.seal()).engines == (info(role="decode"),)


def test_readings_that_differ_in_age_only_make_no_delta(log):
    log.put_gauges(EngineGauges(id="e", requests_running=1, age_seconds=0.0))
    log.seal()
    log.put_gauges(EngineGauges(id="e", requests_running=1, age_seconds=5.0))
    assert log.seal() is None
    assert log.gauges["e"].age_seconds == 5.0
    log.put_gauges(EngineGauges(id="e", requests_running=0))
    assert read(log.seal()).gauges == (EngineGauges(id="e", requests_running=0),)


def test_a_clear_comes_before_what_was_added_after_it(log):
    changes = log.blocks_of("e")
    changes.add("GPU", [1])
    changes.clear()
    changes.add("CPU", [2])
    first, second = read(log.seal()).blocks
    assert (first.cleared, first.added) == (True, b"")
    assert (second.cleared, second.tier, unpack_keys(second.added)) == (False, "CPU", (2,))


def test_a_dropped_engine_is_gone_with_all_that_was_pending(log):
    log.put_info(info())
    log.seal()
    log.blocks_of("e").add("GPU", [1])
    log.put_gauges(EngineGauges(id="e"))
    log.drop_engine("e")
    assert read(log.seal()) == Delta(cursor=log.cursor, gone=("e",))
    assert (log.infos, log.gauges) == ({}, {})
    log.drop_engine("e")
    assert log.seal() is None


def test_a_new_incarnation_takes_the_old_reading_with_it(log):
    log.put_info(info())
    log.put_gauges(EngineGauges(id="e", requests_running=1))
    log.put_info(info(incarnation="2"))
    assert read(log.seal()).gauges == ()
    log.put_gauges(EngineGauges(id="e", requests_running=1))
    assert read(log.seal()).gauges == (EngineGauges(id="e", requests_running=1),)


def test_an_engine_dropped_and_found_again_is_news_in_full(log):
    log.put_info(info())
    log.put_gauges(EngineGauges(id="e", requests_running=1))
    log.seal()
    log.drop_engine("e")
    log.put_info(info())
    log.put_gauges(EngineGauges(id="e", requests_running=1))
    delta = read(log.seal())
    assert (delta.gone, len(delta.engines), len(delta.gauges)) == (("e",), 1, 1)


# -- Cursors and the ring --------------------------------------------------------------------


def test_a_known_cursor_gets_the_deltas_behind_it(log):
    deltas = fill(log, 4)
    for seq in range(5):
        assert log.after(Cursor("b", 0, seq)) == deltas[seq:]


@pytest.mark.parametrize(
    "cursor",
    [
        pytest.param(None, id="none"),
        pytest.param(Cursor("other", 0, 4), id="other-boot"),
        pytest.param(Cursor("b", 1, 4), id="other-epoch"),
        pytest.param(Cursor("b", 0, 5), id="from-the-future"),
        pytest.param(Cursor("b", 0, -1), id="negative"),
        pytest.param(Cursor("b", 0, -(10**30)), id="very-negative"),
    ],
)
def test_any_other_cursor_needs_a_snapshot(log, cursor):
    fill(log, 4)
    assert log.after(cursor) is None


def test_the_ring_is_bounded_in_bytes():
    log = StateLog(boot="b", node="n", version="1", ring_limit_bytes=500)
    deltas = fill(log, 100)
    assert 400 < log.ring_bytes <= 500
    kept = log.ring_bytes // len(deltas[-1])
    assert log.after(Cursor("b", 0, 100 - kept)) == deltas[-kept:]
    assert log.after(Cursor("b", 0, 100 - kept - 1)) is None


def test_a_delta_larger_than_the_ring_forces_snapshots():
    log = StateLog(boot="b", node="n", version="1", ring_limit_bytes=10)
    fill(log, 1)
    assert log.ring_bytes == 0
    assert log.after(Cursor("b", 0, 0)) is None
    assert log.after(Cursor("b", 0, 1)) == []


def test_a_delta_that_no_reader_accepts_is_never_handed_out(log, monkeypatch):
    fill(log, 1)
    monkeypatch.setattr(state_log, "MAX_FRAME_BYTES", 1000)
    log.blocks_of("e").add("GPU", range(1000))
    log.seal()
    assert log.after(Cursor("b", 0, 1)) is None
    monkeypatch.undo()
    log.put_info(info())
    next_delta = log.seal()
    assert log.after(Cursor("b", 0, 2)) == [next_delta]


# -- Snapshots -------------------------------------------------------------------------------


def test_a_snapshot_is_cut_into_parts(log):
    log.put_info(info())
    log.seal()
    frames = [read(f) for f in log.snapshot(iter([("e", "GPU", list(range(10_000)))]), now=0.0)]
    begin, *parts, end = frames
    assert (begin.cursor, begin.engines, begin.node) == (log.cursor, (info(),), "n")
    assert [len(unpack_keys(part.keys)) for part in parts] == [4096, 4096, 1808]
    assert end == SnapshotEnd(cursor=log.cursor)


def test_a_heartbeat_names_the_place_and_the_ages(log):
    fill(log, 1)
    assert read(log.heartbeat({"e": 1.5})) == Heartbeat(cursor=log.cursor, ages_seconds={"e": 1.5})


engines = st.sampled_from(["e1", "e2"])
some_blocks = st.lists(st.integers(0, 6), min_size=1, max_size=3)
tiers = st.sampled_from(["GPU", "CPU"])
steps = st.one_of(
    st.tuples(st.just("store"), engines, some_blocks, tiers),
    st.tuples(st.just("remove"), engines, some_blocks, tiers),
    st.tuples(st.sampled_from(["clear", "restart", "drop", "gauge", "evict"]), engines),
    st.tuples(st.sampled_from(["seal", "sync"])),
)


class Publisher:
    """Two engines' tables and their log."""

    def __init__(self, ring_limit_bytes):
        self.log = StateLog(boot="b", node="n", version="1", ring_limit_bytes=ring_limit_bytes)
        self.tables, self.starts = {}, 0

    def __call__(self, what, engine, blocks=(), tier="GPU"):
        table = self.tables.setdefault(engine, BlockTable(key_model="m"))
        if engine not in self.log.infos or what == "restart":
            table.clear()
            self.log.blocks_of(engine).clear()
            self.starts += 1
            self.log.put_info(info(engine, str(self.starts)))
        if what == "gauge":
            self.log.put_gauges(EngineGauges(id=engine, requests_running=self.starts))
        elif what == "drop":
            del self.tables[engine]
            self.log.drop_engine(engine)
        elif what == "evict":
            table.evict(1, self.log.blocks_of(engine))
        elif what != "restart":
            tokens = [block for block in blocks for _ in range(2)]
            event = {
                "store": BlockStored(list(blocks), None, tokens, 2, tier),
                "remove": BlockRemoved(list(blocks), tier),
                "clear": AllBlocksCleared(),
            }[what]
            table.apply([event], self.log.blocks_of(engine))

    @property
    def held(self):
        return {
            (engine, tier): set(keys)
            for engine, table in self.tables.items()
            for tier, keys in table.keys_by_tier().items()
            if keys
        }


@given(st.lists(steps, max_size=40), st.sampled_from([0, 200, 1 << 20]))
@settings(max_examples=150, deadline=None)
def test_a_consumer_of_snapshot_and_deltas_has_what_the_tables_have(history, ring_limit_bytes):
    publisher, consumer = Publisher(ring_limit_bytes), Consumer()
    for step in [*history, ("sync",)]:
        if step[0] not in ("seal", "sync"):
            publisher(*step)
            continue
        publisher.log.seal()
        if step[0] == "sync":
            consumer.catch_up(publisher.log, publisher.tables)
            assert consumer.cursor == publisher.log.cursor
            assert consumer.held == publisher.held
            assert consumer.gauges == publisher.log.gauges
            assert consumer.incarnations.keys() == publisher.log.infos.keys()
