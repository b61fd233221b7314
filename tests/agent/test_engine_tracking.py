"""One engine as the agent sees it: gaps, restarts, sleep, silence.

Message ``n`` of the engine stores block ``n``: a prompt of its own, so that no block needs
another one to be known.
"""

from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkv.agent.engine_metrics import RankReading
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.sequencing import Arrival
from nearkv.agent.state_log import StateLog
from nearkv.block_keys import KeyNamespace, chain_keys, pack_tokens, root_key
from nearkv.state.codec import FrameReader
from nearkv.state.model import EngineState, EventsState

ROOT = root_key(KeyNamespace("tiny"))
KEYS = [chain_keys(ROOT, pack_tokens([n, n]), 2)[0] for n in range(40)]
CLEARED = ["AllBlocksCleared"]


def store(block):
    return ["BlockStored", [block], None, [block, block], 2, None, "GPU"]


def remove(block):
    return ["BlockRemoved", [block], "GPU"]


def message(*events):
    return msgspec.msgpack.encode([0.0, list(events), 0])


def messages(*blocks):
    """Messages numbered and named by their blocks."""
    return [(block, message(store(block))) for block in blocks]


class Engine:
    """A tracker, driven as the subscription drives it."""

    def __init__(self, boot="b1", **identity):
        self.boot = boot
        self.log = StateLog(boot=boot, node="n", version="1")
        self.tracker = EngineTracker(
            EngineIdentity("e", "http://e", "n", "tiny", ("tiny",), key_model="tiny", **identity),
            self.log,
            secret=b"",
            table_limit_bytes=1 << 20,
        )

    def live(self, seq, payload, replay=None):
        arrival = self.tracker.on_message(seq, payload, 0.0)
        if arrival not in (Arrival.IN_ORDER, Arrival.REPEAT):
            self.replayed(replay)
            self.tracker.on_message_after_replay(seq, payload, 0.0)
        return arrival

    def lives(self, *blocks):
        return [self.live(seq, payload) for seq, payload in messages(*blocks)]

    def replayed(self, replay):
        asked = self.tracker.next_wanted
        self.tracker.on_replay_started()
        self.tracker.on_replay(asked, replay(asked) if callable(replay) else replay, 0.0)

    def read(self, start=100.0, now=0.0, **reading):
        reading = RankReading(**{"awake": True, **reading})
        return self.tracker.on_reading(reading, start_time_seconds=start, boot=self.boot, now=now)

    @property
    def held(self):
        keys = self.tracker.table.keys_by_tier().get("GPU", [])
        return {KEYS.index(key) for key in keys}

    @property
    def events(self):
        published = self.log.infos["e"]
        assert published == self.tracker.info
        return published.events


@pytest.fixture
def engine():
    return Engine()


# -- The event stream ------------------------------------------------------------------------


def test_messages_in_order_make_a_live_table(engine):
    assert engine.lives(0, 1, 2) == [Arrival.IN_ORDER] * 3
    assert (engine.held, engine.events) == ({0, 1, 2}, EventsState.LIVE)
    assert engine.tracker.counts.messages == 3


@pytest.mark.parametrize("last", [3, 4, 6], ids=["short-of-live", "up-to-live", "beyond-live"])
def test_a_gap_is_filled_by_a_replay(engine, last):
    engine.lives(0, 1)
    assert engine.live(4, message(store(4)), messages(*range(2, last + 1))) is Arrival.GAP
    assert (engine.held, engine.events) == ({*range(max(last, 4) + 1)}, EventsState.LIVE)
    assert engine.tracker.counts.gaps == 1
    assert engine.tracker.next_wanted == max(last, 4) + 1


def test_what_a_replay_brought_early_is_not_applied_again(engine):
    engine.lives(0, 1)
    engine.live(4, message(store(4)), [*messages(2, 3, 4), (5, message(remove(0)))])
    assert engine.live(5, message(store(0))) is Arrival.REPEAT
    assert engine.live(6, message(store(6))) is Arrival.IN_ORDER
    assert engine.held == {1, 2, 3, 4, 6}


@pytest.mark.parametrize(
    ("replay", "held", "truncated"),
    [
        pytest.param([5, 6, 7, 8], {5, 6, 7, 8}, 1, id="cut-at-the-start"),
        pytest.param([2, 3, 6, 7, 8], {6, 7, 8}, 1, id="hole-inside"),
        pytest.param([2, 4, 6, 8], {8}, 3, id="several-holes"),
        pytest.param([2, 3], {8}, 0, id="cut-at-the-end"),
        pytest.param([], {8}, 0, id="empty"),
    ],
)
def test_a_replay_with_losses_leaves_only_what_came_after_them(engine, replay, held, truncated):
    engine.lives(0, 1)
    engine.live(8, message(store(8)), messages(*replay))
    assert (engine.held, engine.events) == (held, EventsState.PARTIAL)
    assert engine.tracker.counts.truncated_replays == truncated


def test_an_unanswered_replay_leaves_only_what_is_seen_from_now_on(engine):
    engine.lives(0, 1)
    engine.live(4, message(store(4)), None)
    engine.lives(5)
    assert (engine.held, engine.events) == ({4, 5}, EventsState.PARTIAL)
    assert engine.tracker.counts.unanswered_replays == 1


@pytest.mark.parametrize(
    ("replay", "held", "events"),
    [
        pytest.param([0, 1, 2, 3], {0, 1, 2, 3}, EventsState.LIVE, id="whole"),
        pytest.param([2, 3], {2, 3}, EventsState.PARTIAL, id="truncated"),
        pytest.param([], {3}, EventsState.PARTIAL, id="empty"),
        pytest.param(None, {3}, EventsState.PARTIAL, id="unanswered"),
    ],
)
def test_a_late_joiner_takes_what_the_replay_holds(engine, replay, held, events):
    replay = replay if replay is None else messages(*replay)
    assert engine.live(3, message(store(3)), replay) is Arrival.FIRST
    assert (engine.held, engine.events) == (held, events)


def test_a_replay_before_anything_live_is_enough(engine):
    engine.replayed(messages(0, 1))
    assert (engine.held, engine.events) == ({0, 1}, EventsState.LIVE)
    assert engine.lives(1, 2) == [Arrival.REPEAT, Arrival.IN_ORDER]


def test_an_engine_that_sent_nothing_yet_is_known_in_full(engine):
    engine.replayed([])
    assert (engine.held, engine.events) == (set(), EventsState.LIVE)


def test_a_clear_makes_a_partial_table_whole(engine):
    engine.live(3, message(store(3)), None)
    assert engine.events is EventsState.PARTIAL
    engine.live(4, message(CLEARED, store(9)))
    assert (engine.held, engine.events) == ({9}, EventsState.LIVE)


def test_a_broken_subscription_shows_and_heals(engine):
    engine.lives(0)
    engine.tracker.on_subscription(connected=False)
    assert (engine.held, engine.events) == ({0}, EventsState.LOST)
    engine.tracker.on_subscription(connected=True)
    assert engine.events is EventsState.LIVE


def test_what_cannot_be_read_is_counted_and_passed_over(engine):
    engine.lives(0)
    assert engine.live(1, b"\xc1") is Arrival.IN_ORDER
    assert engine.live(2, message(["New"], store(2), ["New"], 5)) is Arrival.IN_ORDER
    assert engine.live(3, message(["BlockStored", [3], None, [-1, 2], 2])) is Arrival.IN_ORDER
    assert engine.held == {0, 2}
    assert engine.tracker.counts.undecodable == 1
    assert engine.tracker.counts.skipped == {"unknown_tag": 2, "malformed": 1}
    assert engine.tracker.table.counts.bad_tokens == 1


def test_blocks_are_counted_as_the_engine_spoke_of_them(engine):
    engine.live(0, message(store(0), store(0), store(1)))
    engine.live(1, message(remove(0), remove(7)))
    counts = engine.tracker.counts
    assert (counts.blocks_stored, counts.blocks_removed) == (3, 2)


# -- Restarts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replay", "events"),
    [([(0, message(store(10)))], EventsState.LIVE), (None, EventsState.LIVE)],
    ids=["replayed", "unanswered"],
)
def test_a_number_that_falls_to_0_means_a_new_engine(engine, replay, events):
    engine.read()
    engine.lives(0, 1, 2)
    old = engine.tracker.incarnation
    assert engine.live(0, message(store(10)), replay) is Arrival.RESTART
    assert (engine.held, engine.events) == ({10}, events)
    assert engine.tracker.incarnation not in ("", old)
    assert engine.tracker.counts.restarts == 1


def test_a_restart_seen_late_is_partial_without_a_replay(engine):
    engine.lives(*range(6))
    assert engine.live(2, message(store(12)), None) is Arrival.RESTART
    assert (engine.held, engine.events) == ({12}, EventsState.PARTIAL)


def test_a_restart_seen_late_is_whole_with_a_replay(engine):
    engine.lives(*range(6))
    replay = [(seq, message(store(10 + seq))) for seq in range(3)]
    engine.live(2, message(store(12)), replay)
    assert (engine.held, engine.events) == ({10, 11, 12}, EventsState.LIVE)


def test_a_new_start_time_drops_everything_old(engine):
    assert engine.read(start=100.0) is False
    engine.lives(0, 1, 2)
    old = engine.tracker.incarnation
    assert engine.read(start=200.0) is True
    assert engine.held == set()
    assert engine.tracker.incarnation != old
    assert engine.live(0, message(store(10))) is Arrival.IN_ORDER
    assert engine.read(start=200.0) is False
    assert (engine.held, engine.events) == ({10}, EventsState.LIVE)
    assert engine.tracker.counts.restarts == 1


def test_a_restart_that_events_showed_first_is_not_taken_for_another(engine):
    engine.read(start=100.0)
    engine.lives(0, 1)
    engine.live(0, message(store(10)), [(0, message(store(10)))])
    incarnation = engine.tracker.incarnation
    assert engine.read(start=200.0) is False
    assert (engine.held, engine.tracker.incarnation) == ({10}, incarnation)
    assert engine.read(start=300.0) is True
    assert engine.held == set()


def test_an_engine_without_a_start_time_is_not_restarted_by_scrapes(engine):
    engine.read(start=None)
    engine.lives(0)
    assert engine.read(start=None) is False
    assert engine.held == {0}


def test_an_incarnation_keeps_its_name_over_agent_restarts():
    names = []
    for boot, start in [("b1", 100.0), ("b2", 100.0), ("b2", 100.25), ("b1", None), ("b2", None)]:
        engine = Engine(boot)
        engine.read(start=start)
        names.append(engine.tracker.incarnation)
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_a_restart_is_published_as_one_step(engine):
    engine.read()
    engine.lives(0, 1)
    engine.log.seal()
    engine.live(0, message(store(10)), [])
    (delta,) = FrameReader().feed(engine.log.seal())
    assert delta.engines[-1].incarnation == engine.tracker.incarnation
    assert delta.blocks[0].cleared
    assert b"".join(change.added for change in delta.blocks) == KEYS[10].to_bytes(8, "little")


# -- Scrapes ---------------------------------------------------------------------------------


def test_a_sleeping_engine_has_lost_its_cache(engine):
    engine.read()
    engine.lives(0, 1)
    engine.live(2, message(["BlockStored", [9], 8, [1, 2], 2]))
    assert engine.read(awake=False) is False
    assert engine.held == set()
    assert engine.tracker.table.orphan_count == 0
    assert engine.log.infos["e"].state is EngineState.ASLEEP
    engine.read(awake=True)
    engine.lives(3)
    assert engine.held == {3}
    assert engine.log.infos["e"].state is EngineState.READY


@pytest.mark.parametrize("awake", [True, None], ids=["awake", "unknown"])
def test_an_engine_not_known_to_sleep_keeps_its_blocks(engine, awake):
    engine.lives(0)
    engine.read(awake=awake)
    assert engine.held == {0}
    assert engine.log.infos["e"].state is EngineState.READY


def test_an_unreachable_engine_keeps_its_blocks(engine):
    engine.read(now=1.0)
    engine.lives(0)
    engine.tracker.on_unreachable()
    assert engine.log.infos["e"].state is EngineState.UNREACHABLE
    assert (engine.held, engine.tracker.metrics_at) == ({0}, 1.0)
    engine.read(now=2.0)
    assert engine.log.infos["e"].state is EngineState.READY


def test_an_engine_that_is_not_there_any_more_has_no_blocks(engine):
    engine.read(now=1.0)
    engine.lives(0, 1)
    engine.tracker.on_unreachable(nobody_listens=True)
    assert engine.held == {0, 1}, "its event stream still stands"
    engine.tracker.on_subscription(connected=False)
    engine.tracker.on_unreachable(nobody_listens=True)
    assert engine.held == set()
    assert engine.log.infos["e"].state is EngineState.UNREACHABLE
    engine.tracker.on_subscription(connected=True)
    engine.replayed(messages(0, 1))
    assert (engine.held, engine.events) == ({0, 1}, EventsState.LIVE)


# -- Memory ----------------------------------------------------------------------------------


def test_what_was_evicted_leaves_a_part_and_says_so(engine):
    engine.lives(0, 1, 2)
    assert engine.events is EventsState.LIVE
    assert engine.tracker.evict(1) > 0
    assert (engine.held, engine.events) == ({1, 2}, EventsState.PARTIAL)
    assert (engine.tracker.is_reduced, engine.tracker.table.counts.evicted) == (True, 1)
    engine.live(3, message(CLEARED, store(3)))
    assert (engine.held, engine.events) == ({3}, EventsState.LIVE)


def test_what_was_refused_leaves_a_part_and_says_so(engine):
    engine.live(0, message(store(0)))
    engine.tracker.table._limit_blocks = 1
    engine.live(1, message(store(1)))
    assert (engine.held, engine.events) == ({0}, EventsState.PARTIAL)


def test_a_replay_does_not_make_a_reduced_table_whole(engine):
    engine.lives(0, 1)
    engine.tracker.evict(1)
    engine.live(4, message(store(4)), replay=messages(2, 3))
    assert (engine.held, engine.events) == ({1, 2, 3, 4}, EventsState.PARTIAL)


def test_the_block_size_of_the_events_beats_that_of_the_metrics(engine):
    engine.read(block_size=16)
    assert engine.log.infos["e"].block_size == 16
    engine.lives(0)
    assert engine.log.infos["e"].block_size == 2


def test_a_restarted_engine_may_have_another_block_size(engine):
    engine.read(start=100.0, block_size=2)
    engine.lives(0)
    engine.read(start=200.0, block_size=4)
    assert engine.log.infos["e"].block_size == 4
    engine.live(0, message(["BlockStored", [1], None, [1, 2, 3, 4], 4]))
    assert engine.log.infos["e"].block_size == 4


def test_what_an_engine_does_not_say_stays_unknown(engine):
    engine.read()
    gauges = engine.log.gauges["e"]
    assert gauges.requests_running is None
    assert gauges.kv_total_bytes is None
    assert gauges.kv_used_bytes is None


def test_readings_become_whole_gauges(engine):
    engine.read(requests_running=3.0, kv_used_ratio=0.25, kv_total_bytes=1000, awake=None)
    gauges = engine.log.gauges["e"]
    assert (gauges.requests_running, gauges.kv_used_bytes, gauges.kv_free_bytes) == (3, 250, 750)


def test_bytes_per_token_give_the_size_where_the_engine_tells_tokens():
    engine = Engine(kv_bytes_per_token=100)
    engine.read(kv_total_tokens=768, kv_total_bytes=1)
    assert engine.log.gauges["e"].kv_total_bytes == 76_800


def test_a_consumer_can_tell_another_secret_by_the_key_check(engine):
    engine.read()
    assert engine.log.infos["e"].key_check == ROOT


# -- All of it at random ---------------------------------------------------------------------

steps = st.tuples(
    st.sampled_from(["store", "store", "remove", "clear", "restart"]),
    st.integers(0, 7),
    st.booleans(),  # lost on the way
    st.booleans(),  # a replay would be answered
)


def answer(kept, asked):
    return [(seq, payload) for seq, payload in kept if seq >= asked]


@given(st.lists(steps, max_size=30), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_a_live_table_is_the_engines_and_a_partial_one_a_part_of_it(history, window):
    engine = Engine()
    truth, sent, start = set(), [], 0.0
    engine.read(start=start)
    for what, block, lost, answered in history:
        if what == "restart":
            truth, sent, start = set(), [], start + 1
            engine.read(start=start)
            continue
        if what == "store":
            truth.add(block)
        elif what == "remove":
            truth.discard(block)
        else:
            truth.clear()
        event = {"store": store(block), "remove": remove(block), "clear": CLEARED}[what]
        sent.append((len(sent), message(event)))
        if lost:
            continue
        engine.live(*sent[-1], partial(answer, sent[-window:]) if answered else None)
        assert engine.held <= truth
        assert engine.held == truth or engine.events is EventsState.PARTIAL


def test_the_speed_of_prefill_is_published_and_forgotten_with_the_process(engine):
    sums = {"prefills": 0.0, "prefill_seconds": 0.0, "prefill_computed_tokens": 0.0}
    engine.read(**sums)
    assert engine.log.gauges["e"].prefill_seconds_per_token is None
    engine.read(prefills=2.0, prefill_seconds=0.5, prefill_computed_tokens=1000.0)
    assert engine.log.gauges["e"].prefill_seconds_per_token == pytest.approx(0.0005)
    engine.read(start=200.0, **sums)
    assert engine.log.gauges["e"].prefill_seconds_per_token is None
