"""The fleet: agents' frames in, engines and matches out."""

import pytest

from nearkv.block_keys import pack_keys
from nearkv.ingress.fleet import StreamProtocolError, models_served
from nearkv.state.model import (
    BlockChange,
    Blocks,
    Cursor,
    Delta,
    EngineGauges,
    EngineState,
    Heartbeat,
    SnapshotEnd,
)
from tests.ingress.fleet_agent import CHAIN, A, Agent, B, engine_info


def sweep(fleet):
    for _ in fleet.index.sweep():
        pass


def test_a_snapshot_counts_when_it_is_whole(fleet, agent):
    agent.begin(engine_info("e1"))
    agent.blocks("e1", CHAIN[:4])
    assert fleet.match(CHAIN) == {}
    assert not fleet.engines
    assert not fleet.agents[A].synced
    agent.end()
    assert fleet.match(CHAIN) == {"e1": 4}
    assert fleet.agents[A].synced
    assert fleet.agents[A].connected
    assert fleet.agents[A].node == "n1"


def test_deltas_follow_a_snapshot(fleet, agent):
    agent.snapshot({"e1": CHAIN[:4], "e2": ()})
    agent.change("e1", added=CHAIN[4:6])
    agent.change("e2", added=CHAIN[:3])
    agent.change("e1", removed=CHAIN[5:])
    assert fleet.match(CHAIN) == {"e1": 5, "e2": 3}
    assert fleet.agents[A].cursor == agent.cursor


def test_the_order_within_a_change_is_cleared_removed_added(fleet, agent):
    agent.snapshot({"e1": CHAIN})
    agent.change("e1", cleared=True, removed=CHAIN[:3], added=CHAIN[:2])
    assert fleet.match(CHAIN) == {"e1": 2}


def test_cleared_empties_every_tier(fleet, agent):
    agent.snapshot({"e1": CHAIN[:4]})
    agent.change("e1", tier="CPU", added=CHAIN[4:])
    assert fleet.match(CHAIN) == {"e1": 10}
    agent.change("e1", cleared=True)
    assert fleet.match(CHAIN) == {}
    agent.change("e1", tier="CPU", added=CHAIN[:1])
    assert fleet.match(CHAIN) == {"e1": 1}


def test_a_prefix_goes_on_through_an_engines_tiers(fleet, agent):
    agent.begin(engine_info("e1"), engine_info("e2"))
    agent.blocks("e1", CHAIN[3:6], tier="CPU")
    agent.blocks("e1", (*CHAIN[:3], *CHAIN[6:8]))
    agent.blocks("e2", CHAIN[:2])
    agent.end()
    assert fleet.match(CHAIN) == {"e1": 8, "e2": 2}


def test_a_match_tells_how_much_is_how_near(fleet, agent):
    agent.snapshot({"a": CHAIN[:4], "b": CHAIN})
    assert fleet.match_tiers(CHAIN) == ({"a": 4, "b": 10}, {})
    agent.change("a", added=CHAIN[4:6], tier="CPU")
    agent.change("a", added=CHAIN[6:9], tier="STORAGE")
    assert fleet.match_tiers(CHAIN) == ({"a": 9, "b": 10}, {"a": (4, 6)})
    assert fleet.match(CHAIN) == {"a": 9, "b": 10}
    agent.change("a", removed=CHAIN[4:6], tier="CPU")
    assert fleet.match_tiers(CHAIN) == ({"a": 4, "b": 10}, {"a": (4, 4)})
    agent.change("a", cleared=True)
    assert fleet.match_tiers(CHAIN) == ({"b": 10}, {})


@pytest.mark.parametrize(
    ("tiers", "faster"),
    [
        pytest.param({"CPU": CHAIN}, (0, 10), id="host alone"),
        pytest.param({"DISK": CHAIN}, (0, 0), id="disk alone"),
        pytest.param({"CPU_PINNED": CHAIN[:3], "DISK": CHAIN[3:]}, (0, 3), id="no device"),
        pytest.param({"STORAGE": CHAIN, "GPU": CHAIN[:2], "CPU": CHAIN[:7]}, (2, 7), id="copies"),
        pytest.param({"CPU": CHAIN[:5], "CPU_PINNED": CHAIN[5:]}, (0, 10), id="two of one rank"),
    ],
)
def test_tiers_may_come_in_any_order_and_names(fleet, agent, tiers, faster):
    for begin in (True, False):  # in a snapshot, then one by one
        agent.begin(engine_info("a"))
        for tier, keys in tiers.items() if begin else ():
            agent.blocks("a", keys, tier=tier)
        agent.end()
        for tier, keys in () if begin else tiers.items():
            agent.change("a", added=keys, tier=tier)
        assert fleet.match_tiers(CHAIN) == ({"a": 10}, {"a": faster})
        agent.delta(gone=("a",))
        assert fleet.match_tiers(CHAIN) == ({}, {})
        for _ in fleet.index.sweep():
            pass
        assert fleet.index.size.slots == 0


def test_what_one_tier_drops_another_may_still_hold(fleet, agent):
    agent.snapshot({"e1": CHAIN[:4]})
    agent.change("e1", tier="CPU", added=CHAIN[2:6])
    agent.change("e1", removed=CHAIN[2:4])
    assert fleet.match(CHAIN) == {"e1": 6}


def test_a_new_snapshot_takes_over_without_a_gap(fleet, agent):
    agent.snapshot({"e1": CHAIN[:4], "e2": CHAIN})
    agent.begin(engine_info("e1"), engine_info("e3"))
    agent.blocks("e1", CHAIN[:7])
    assert fleet.match(CHAIN) == {"e1": 4, "e2": 10}, "the old one holds until the new is whole"
    agent.end()
    assert fleet.match(CHAIN) == {"e1": 7}
    assert set(fleet.engines) == {"e1", "e3"}
    sweep(fleet)
    assert fleet.match(CHAIN) == {"e1": 7}
    assert fleet.index.size.slots == 1


def test_a_snapshot_that_breaks_off_leaves_the_old_state(fleet, agent):
    agent.snapshot({"e1": CHAIN[:4]})
    agent.begin(engine_info("e1"))
    agent.blocks("e1", CHAIN)
    fleet.connection_lost(A, "reset")
    assert fleet.match(CHAIN) == {"e1": 4}
    assert not fleet.agents[A].connected
    assert fleet.agents[A].error == "reset"
    sweep(fleet)
    assert fleet.index.size.blocks == 4


def test_a_snapshot_that_begins_again_starts_from_nothing(fleet, agent):
    agent.begin(engine_info("e1"))
    agent.blocks("e1", CHAIN)
    agent.snapshot({"e1": CHAIN[:2]})
    assert fleet.match(CHAIN) == {"e1": 2}
    sweep(fleet)
    assert (fleet.index.size.blocks, fleet.index.size.slots) == (2, 1)


def test_a_lost_agents_engines_stay_and_age(fleet, agent):
    agent.snapshot({"e1": CHAIN}, gauges=[EngineGauges(id="e1")], now=10.0)
    fleet.connection_lost(A, "gone")
    assert fleet.match(CHAIN) == {"e1": 10}
    assert fleet.engines["e1"].age_seconds(70.0) == 60.0


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(Cursor("b1", 0, 2), id="gap"),
        pytest.param(Cursor("b1", 0, 0), id="repeated"),
        pytest.param(Cursor("b2", 0, 1), id="other boot"),
        pytest.param(Cursor("b1", 1, 1), id="other epoch"),
    ],
)
def test_a_delta_out_of_order_ends_the_stream_and_forgets_the_cursor(fleet, agent, seen):
    agent.snapshot({"e1": CHAIN[:4]})
    with pytest.raises(StreamProtocolError, match="expected after b1:0:0"):
        agent.send(Delta(cursor=seen, gone=("e1",)))
    assert fleet.agents[A].cursor is None
    assert fleet.match(CHAIN) == {"e1": 4}, "nothing of it is applied"


def test_a_heartbeat_that_is_ahead_tells_of_a_gap(fleet, agent):
    agent.snapshot({"e1": ()})
    with pytest.raises(StreamProtocolError):
        agent.send(Heartbeat(cursor=Cursor("b1", 0, 1), ages_seconds={}))
    assert fleet.agents[A].cursor is None


def impossible(frame):
    return pytest.param(frame, id=type(frame).__name__)


@pytest.mark.parametrize(
    "frame",
    [
        impossible(Delta(cursor=Cursor("b1", 0, 1))),
        impossible(Heartbeat(cursor=Cursor("b1", 0, 0), ages_seconds={})),
        impossible(Blocks(engine="e1", tier="GPU", keys=b"")),
        impossible(SnapshotEnd(cursor=Cursor("b1", 0, 0))),
    ],
)
def test_a_stream_begins_with_a_snapshot(fleet, agent, frame):
    with pytest.raises(StreamProtocolError):
        agent.send(frame)
    assert not fleet.agents[A].synced
    assert not fleet.engines


def test_blocks_between_snapshots_are_refused(fleet, agent):
    agent.snapshot({"e1": CHAIN[:2]})
    with pytest.raises(StreamProtocolError):
        agent.blocks("e1", CHAIN)
    assert fleet.match(CHAIN) == {"e1": 2}


def test_blocks_of_an_engine_nobody_announced_are_refused(fleet, agent):
    agent.begin(engine_info("e1"))
    with pytest.raises(StreamProtocolError, match="e2"):
        agent.blocks("e2", CHAIN)
    agent.end()
    with pytest.raises(StreamProtocolError, match="e2"):
        agent.change("e2", added=CHAIN)
    assert fleet.match(CHAIN) == {}


def test_half_a_key_is_refused(agent):
    agent.begin(engine_info("e1"))
    with pytest.raises(StreamProtocolError, match="multiple of 8"):
        agent.send(Blocks(engine="e1", tier="GPU", keys=b"\0" * 12))


def test_a_new_incarnation_has_neither_blocks_nor_readings(fleet, agent):
    agent.snapshot({"e1": CHAIN}, gauges=[EngineGauges(id="e1", requests_running=3)])
    agent.delta(engines=(engine_info("e1", incarnation="i2"),))
    assert fleet.match(CHAIN) == {}
    assert fleet.engines["e1"].gauges is None
    assert fleet.engines["e1"].age_seconds(0.0) is None
    agent.change("e1", added=CHAIN[:3])
    sweep(fleet)
    assert fleet.match(CHAIN) == {"e1": 3}


def test_news_of_the_same_incarnation_keep_its_blocks(fleet, agent):
    agent.snapshot({"e1": CHAIN}, gauges=[EngineGauges(id="e1", requests_running=3)])
    agent.delta(engines=(engine_info("e1", state=EngineState.DRAINING),))
    assert fleet.match(CHAIN) == {"e1": 10}
    assert fleet.engines["e1"].info.state is EngineState.DRAINING
    assert fleet.engines["e1"].gauges.requests_running == 3


def test_an_engine_restarted_within_one_delta_has_the_new_blocks_only(fleet, agent):
    agent.snapshot({"e1": CHAIN})
    agent.delta(
        engines=(engine_info("e1", incarnation="i2"),),
        blocks=(BlockChange(engine="e1", added=pack_keys(CHAIN[:2])),),
    )
    assert fleet.match(CHAIN) == {"e1": 2}


def test_gone_engines_are_gone(fleet, agent):
    agent.snapshot({"e1": CHAIN, "e2": CHAIN[:1]})
    agent.delta(gone=("e1", "never-known"))
    assert set(fleet.engines) == {"e2"}
    assert fleet.match(CHAIN) == {"e2": 1}


def test_an_engine_may_join_by_a_delta(fleet, agent):
    agent.snapshot({})
    agent.delta(
        engines=(engine_info("e1"),),
        blocks=(BlockChange(engine="e1", added=pack_keys(CHAIN)),),
        gauges=(EngineGauges(id="e1", age_seconds=1.0),),
        now=5.0,
    )
    assert fleet.match(CHAIN) == {"e1": 10}
    assert fleet.engines["e1"].age_seconds(6.0) == 2.0


def test_a_static_engine_gives_way_to_the_agents_word_on_its_url(fleet, agent):
    fleet.add_static_engine("static", "http://e1")
    fleet.add_static_engine("other", "http://elsewhere")
    agent.snapshot({"e1": CHAIN})
    assert set(fleet.engines) == {"e1", "other"}
    assert fleet.engines["e1"].agent == A


def test_a_static_engine_can_be_used_without_any_agent(fleet):
    fleet.add_static_engine("static", "http://s")
    view = fleet.engines["static"]
    assert view.info.state is EngineState.READY
    assert view.age_seconds(5.0) is None


def test_two_agents_do_not_disturb_each_other(fleet, agent):
    other = Agent(fleet, B, boot="x")
    agent.snapshot({"e1": CHAIN[:4]}, gauges=[EngineGauges(id="e1", requests_running=1)])
    other.snapshot({"e2": CHAIN[:6]})
    other.delta(
        gone=("e1",), gauges=(EngineGauges(id="e1", requests_running=9, age_seconds=9.0),), now=2.0
    )
    other.beat({"e1": 99.0}, now=3.0)
    with pytest.raises(StreamProtocolError):
        other.change("e1", added=CHAIN)
    fleet.connection_lost(B, "garbage")
    other.cursor = Cursor("y", 0, 0)
    other.snapshot({})
    assert fleet.match(CHAIN) == {"e1": 4}
    assert fleet.engines["e1"].gauges.requests_running == 1
    assert fleet.engines["e1"].age_seconds(3.0) == 3.0
    agent.change("e1", added=CHAIN[4:5])
    assert fleet.match(CHAIN) == {"e1": 5}


@pytest.mark.parametrize("how", ["snapshot", "delta"])
def test_an_engine_is_its_first_agent_s_while_that_one_is_heard(fleet, agent, how):
    agent.snapshot({"e1": CHAIN[:4]})
    other = Agent(fleet, B, boot="x", node="n2")
    if how == "snapshot":
        other.snapshot({"e1": CHAIN, "e2": CHAIN[:2]})
    else:
        other.snapshot({"e2": CHAIN[:2]})
        other.delta(engines=(engine_info("e1"),))
    other.change("e1", added=CHAIN)
    other.change("e2", added=CHAIN[2:3])
    agent.change("e1", added=CHAIN[4:5])
    assert fleet.match(CHAIN) == {"e1": 5, "e2": 3}
    assert fleet.engines["e1"].agent == A
    assert A in fleet.agents[B].error


@pytest.mark.parametrize("leave", ["connection_lost", "forget_agent"])
def test_when_its_agent_is_gone_another_one_may_speak_for_an_engine(fleet, agent, leave):
    agent.snapshot({"e1": CHAIN[:4]})
    other = Agent(fleet, B, boot="x", node="n2")
    other.snapshot({"e1": CHAIN[:6]})
    fleet.connection_lost(A, "away") if leave == "connection_lost" else fleet.forget_agent(A)
    with pytest.raises(StreamProtocolError):
        other.beat({}, now=1.0)  # what it said of the engine was dropped, so it has to begin anew
    other.snapshot({"e1": CHAIN[:6]})
    assert fleet.match(CHAIN) == {"e1": 6}
    other.change("e1", added=CHAIN[6:7])
    assert fleet.match(CHAIN) == {"e1": 7}


def test_a_new_agent_of_the_same_node_takes_over_at_once(fleet, agent):
    agent.snapshot({"e1": CHAIN[:4]})
    Agent(fleet, B, boot="x").snapshot({"e1": CHAIN[:6]})
    assert fleet.match(CHAIN) == {"e1": 6}
    assert fleet.engines["e1"].agent == B


def test_refused_engines_leave_nothing_in_the_index(fleet, agent):
    agent.snapshot({"e1": CHAIN[:4]})
    other = Agent(fleet, B, boot="x", node="n2")
    for _ in range(3):
        other.snapshot({"e1": CHAIN})
    sweep(fleet)
    assert fleet.index.size.blocks == 4


def test_heartbeats_keep_readings_young(fleet, agent):
    agent.snapshot({"e1": (), "e2": ()}, gauges=[EngineGauges(id="e1", age_seconds=1.0)], now=10.0)
    assert fleet.engines["e1"].age_seconds(10.0) == 1.0
    agent.beat({"e1": 0.5, "e2": 0.5, "nobody": 0.0}, now=20.0)
    assert fleet.engines["e1"].age_seconds(21.0) == 1.5
    assert fleet.engines["e2"].age_seconds(21.0) is None, "no reading, no age"
    assert fleet.agents[A].heard_at == 20.0


def test_engines_answer_to_model_and_adapter_names(fleet, agent):
    agent.snapshot({"e1": (), "e2": ()})
    agent.delta(
        engines=(
            engine_info("e1", models=("m", "alias")),
            engine_info("e2", models=("m",), adapters=("lora",)),
        )
    )
    served = models_served(fleet.engines.values())
    assert {name: [v.info.id for v in views] for name, views in served.items()} == {
        "m": ["e1", "e2"],
        "alias": ["e1"],
        "lora": ["e2"],
    }
