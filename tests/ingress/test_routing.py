"""Routing policies: candidates in, decision out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nearkv.freshness import Freshness, FreshnessLimits
from nearkv.ingress.candidates import CandidateBuilder, PromptView
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.ledger import Ledger
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.routing import Candidate, Gate, Policy, Rung, decide, decide_by_role, has_room
from nearkv.ingress.suspects import Suspects
from nearkv.state.model import EngineGauges, EngineInfo, EngineState

GB = 1_000_000_000
PLAIN = [policy for policy in Policy if policy is not Policy.COST]  # it has its own tests
FRESH, AGED, UNKNOWN = Freshness.FRESH, Freshness.AGED, Freshness.UNKNOWN
ROOMY = {"free_ratio": 0.5, "total_bytes": 20 * GB}
FULL = {"free_ratio": 0.05, "total_bytes": 20 * GB}


def choose(*candidates, policy=Policy.PREFIX_FIRST, turn=0, **more):
    decision = decide(policy, candidates, turn=turn, **more)
    return decision.engine, decision.reason


def engine(name, **fields):
    return Candidate(name, **({**ROOMY, "queue": 0} | fields))


def test_the_articles_example():
    # Article 4.4: both hold prefix-007, decode-1 has 12 GB free and prefill-1 has 14 GB. Its
    # printed outcome says decode-1, its rule (most free bytes) says prefill-1: the rule holds.
    prefill = engine("prefill-1", role="prefill", free_ratio=14 / 20, queue=2, cached_tokens=64)
    decode = engine("decode-1", role="decode", free_ratio=12 / 20, queue=1, cached_tokens=64)
    assert choose(prefill, decode) == ("prefill-1", "prefix_hit")


def test_a_decode_engine_that_alone_holds_the_prefix_gets_the_request():
    prefill = engine("prefill-1", role="prefill", free_ratio=0.9)
    decode = engine("decode-1", role="decode", free_ratio=0.2, queue=9, cached_tokens=16)
    assert choose(prefill, decode) == ("decode-1", "prefix_hit")


def test_the_longest_hit_comes_before_space_and_queue():
    best = engine("best", free_ratio=0.2, queue=50, cached_tokens=640)
    assert choose(engine("other", free_ratio=0.9, cached_tokens=624), best)[0] == "best"


@pytest.mark.parametrize("cached", [0, 64], ids=["miss", "hit"])
@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param({"free_ratio": 0.6, "queue": 9}, {"free_ratio": 0.5}, id="free KV first"),
        pytest.param({"queue": 1}, {"queue": 2}, id="then the queue"),
        pytest.param({"in_flight": 1}, {"in_flight": 2}, id="then our own requests"),
        pytest.param({"in_flight": 3}, {"queue": 4}, id="the longer of the two counts"),
        pytest.param(
            {"free_ratio": 0.3, "total_bytes": 80 * GB, "queue": 9},
            {"free_ratio": 0.9, "total_bytes": 20 * GB},
            id="bytes, not shares, where sizes are known",
        ),
        pytest.param(
            {"free_ratio": 0.9, "total_bytes": 20 * GB},
            {"free_ratio": 0.3, "total_bytes": None},
            id="shares, where one size is not",
        ),
    ],
)
def test_equal_hits_are_told_apart_by_space_then_load(better, worse, cached):
    better = engine("b", cached_tokens=cached, **better)
    worse = engine("a", cached_tokens=cached, **worse)
    for turn in range(2):
        assert choose(better, worse, turn=turn)[0] == "b"


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        pytest.param({"p": "prefill", "d": "decode"}, "p", id="prefill before decode"),
        pytest.param({"p": "both", "d": "decode"}, "p", id="both can prefill"),
        pytest.param({"d": "decode"}, "d", id="decode when there is nothing else"),
    ],
)
def test_a_miss_goes_to_a_prefill_engine(roles, expected):
    free = {"p": 0.3, "d": 0.9}
    engines = [engine(name, role=role, free_ratio=free[name]) for name, role in roles.items()]
    assert choose(*engines) == (expected, "prefix_miss")


@pytest.mark.parametrize(
    ("free_ratio", "total_bytes", "room"),
    [
        pytest.param(2 / 80, 80 * GB, True, id="2 GB of 80 are enough"),
        pytest.param(1.9 / 80, 80 * GB, False, id="less is not"),
        pytest.param(0.10, 1 * GB, True, id="a tenth of a small cache is enough"),
        pytest.param(0.09, 1 * GB, False, id="less of it is not"),
        pytest.param(0.10, None, True, id="a tenth where the size is unknown"),
        pytest.param(0.09, None, False, id="less where the size is unknown"),
        pytest.param(None, 80 * GB, True, id="unknown is not zero"),
        pytest.param(None, None, True, id="nothing known is not zero"),
        pytest.param(0.0, 80 * GB, False, id="zero is zero"),
    ],
)
def test_the_free_kv_gate(free_ratio, total_bytes, room):
    assert has_room(Candidate("e", free_ratio=free_ratio, total_bytes=total_bytes), Gate()) is room


def test_a_gate_of_nothing_lets_everything_pass():
    assert choose(engine("e", free_ratio=0.0), gate=Gate(0, 0.0)) == ("e", "prefix_miss")


def test_a_holder_below_the_gate_is_passed_over():
    holder = engine("holder", cached_tokens=640, **FULL)
    assert choose(holder, engine("other")) == ("other", "prefix_miss")


@pytest.mark.parametrize("policy", PLAIN, ids=str)
def test_only_prefix_first_refuses_for_lack_of_room(policy):
    chosen = choose(engine("a", **FULL), engine("b", **FULL), policy=policy)
    if policy is Policy.PREFIX_FIRST:
        assert chosen == (None, "no_kv_room")
    else:
        assert chosen[0] is not None


def test_an_engine_of_unknown_state_is_tried_before_a_request_is_refused():
    unknown = Candidate("unknown", freshness=UNKNOWN)
    assert choose(engine("full", cached_tokens=64, **FULL), unknown)[0] == "unknown"
    assert choose(engine("roomy", queue=99), unknown)[0] == "roomy"


def test_a_prediction_counts_less_with_age_and_with_broken_promises():
    aged = engine("aged", freshness=AGED, decay=0.25, cached_tokens=400)
    demoted = engine("demoted", trust=0.5, cached_tokens=300)
    fresh = engine("fresh", cached_tokens=128)
    assert choose(aged, demoted, fresh)[0] == "demoted"
    assert choose(aged, fresh)[0] == "fresh"
    assert choose(aged, engine("cold")) == ("aged", "prefix_hit")


@pytest.mark.parametrize(("freshness", "rung"), [(FRESH, Rung.FRESH), (AGED, Rung.AGED)])
@pytest.mark.parametrize("policy", PLAIN, ids=str)
def test_the_rung_tells_how_old_the_chosen_engines_data_is(policy, freshness, rung):
    assert decide(policy, [engine("e", freshness=freshness)], turn=0).rung is rung


@pytest.mark.parametrize("policy", [Policy.PREFIX_FIRST, Policy.LEAST_LOADED], ids=str)
def test_without_any_state_our_own_ledger_decides_then_the_turn(policy):
    blind = [Candidate(name, freshness=UNKNOWN, in_flight=n) for name, n in (("a", 2), ("b", 1))]
    decision = decide(policy, blind, turn=0)
    assert (decision.engine, decision.rung) == ("b", Rung.LEDGER)
    even = [replace(c, in_flight=1) for c in blind]
    turns = [decide(policy, even, turn=turn) for turn in range(4)]
    assert [d.engine for d in turns] == ["a", "b", "a", "b"]
    assert {d.rung for d in turns} == {Rung.ROUND_ROBIN}


@pytest.mark.parametrize("policy", PLAIN, ids=str)
def test_an_engine_to_avoid_is_used_only_alone(policy):
    shunned = engine("a", avoid="failing", cached_tokens=640)
    for turn in range(3):
        assert choose(shunned, engine("b", queue=50), policy=policy, turn=turn)[0] == "b"
    assert choose(shunned, policy=policy)[0] == "a"


@pytest.mark.parametrize("policy", PLAIN, ids=str)
def test_without_engines_there_is_no_engine(policy):
    assert choose(policy=policy) == (None, "no_engine")


def test_least_loaded_looks_at_queues_only():
    busy = engine("busy", queue=3, cached_tokens=640)
    idle = engine("idle", queue=1, **FULL)
    assert choose(busy, idle, policy=Policy.LEAST_LOADED) == ("idle", "least_loaded")


def test_round_robin_goes_round():
    engines = [engine("a", queue=9), engine("b"), engine("c", cached_tokens=64)]
    chosen = [choose(*engines, policy=Policy.ROUND_ROBIN, turn=turn)[0] for turn in range(6)]
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_equals_take_turns():
    chosen = {choose(engine("a"), engine("b"), turn=turn)[0] for turn in range(2)}
    assert chosen == {"a", "b"}


def test_a_hint_speaks_where_tokens_say_nothing():
    hinted, empty = engine("hinted", hinted=True), engine("empty", free_ratio=1.0)
    assert choose(hinted, empty) == ("hinted", "hint")
    assert choose(hinted, replace(empty, cached_tokens=16)) == ("empty", "prefix_hit")
    assert choose(replace(hinted, **FULL), empty) == ("empty", "prefix_miss")


# -- Properties ------------------------------------------------------------------------

ratios = st.floats(0, 1)
candidate = st.builds(
    Candidate,
    st.just(""),
    role=st.sampled_from(["both", "prefill", "decode"]),
    freshness=st.sampled_from(Freshness),
    decay=ratios,
    trust=ratios,
    cached_tokens=st.integers(0, 4096),
    free_ratio=st.none() | ratios,
    total_bytes=st.none() | st.integers(0, 100 * GB),
    queue=st.none() | st.integers(0, 5),
    in_flight=st.integers(0, 5),
    hinted=st.booleans(),
    avoid=st.sampled_from(["", "", "failing"]),
)
fleets = st.lists(candidate, min_size=1, max_size=6).map(
    lambda drawn: [replace(c, engine=f"e{i}") for i, c in enumerate(drawn)]
)
policies = st.sampled_from(PLAIN)
turns = st.integers(0, 20)


@given(fleets.flatmap(lambda f: st.tuples(st.just(f), st.permutations(f))), policies, turns)
def test_the_order_of_candidates_changes_nothing(orders, policy, turn):
    first, second = orders
    assert decide(policy, first, turn=turn) == decide(policy, second, turn=turn)


@given(fleets, policies, turns, st.integers(1, 4096))
def test_more_cached_tokens_never_lose_a_request(fleet, policy, turn, more):
    before = decide(policy, fleet, turn=turn)
    richer = [
        replace(c, cached_tokens=c.cached_tokens + more) if c.engine == before.engine else c
        for c in fleet
    ]
    assert decide(policy, richer, turn=turn).engine == before.engine


@given(fleets, policies, turns)
def test_whoever_may_answer_decides_whether_there_is_an_answer(fleet, policy, turn):
    decision = decide(policy, fleet, turn=turn)
    chosen = next((c for c in fleet if c.engine == decision.engine), None)
    usable = [c for c in fleet if not c.avoid] or fleet
    able = [c for c in usable if c.freshness is UNKNOWN or has_room(c, Gate())]
    if policy is Policy.PREFIX_FIRST:
        assert (chosen is not None) == bool(able)
        assert chosen is None or chosen in able
    else:
        assert chosen in usable


# -- A burst ---------------------------------------------------------------------------


def view(name, gauges):
    info = EngineInfo(
        id=name, incarnation="i", url="", state=EngineState.READY, block_size=16, role="both"
    )
    if gauges is None:
        return EngineView(info, "agent")
    return EngineView(info, "agent", EngineGauges(id=name, **gauges), gauges_at=0.0)


@pytest.mark.parametrize(
    "gauges",
    [
        pytest.param(
            {"kv_used_ratio": 0.0, "kv_total_tokens": 100_000, "requests_running": 0}, id="idle"
        ),
        pytest.param(
            {"kv_used_ratio": 0.3, "kv_total_tokens": 100_000, "requests_running": 5}, id="busy"
        ),
        pytest.param({}, id="no figures"),
        pytest.param(None, id="unknown"),
    ],
)
@pytest.mark.parametrize("tokens", [10, 2000], ids=["short", "long"])
@pytest.mark.parametrize("policy", PLAIN, ids=str)
def test_a_burst_spreads_evenly_before_any_scrape(policy, tokens, gauges):
    ledger = Ledger()
    builder = CandidateBuilder(ledger, ParityCheck(), Suspects(), FreshnessLimits())
    views = [view(name, gauges) for name in "abcd"]
    for turn in range(100):
        candidates = builder.build(views, PromptView(tokens, {}), now=1.0)
        ledger.open(decide(policy, candidates, turn=turn).engine, "i", tokens)
    counts = [ledger.at(name, "i").requests for name in "abcd"]
    assert sum(counts) == 100
    assert max(counts) - min(counts) <= 1


def by_role(*candidates, policy=Policy.PREFIX_FIRST):
    return [decision.engine for decision in decide_by_role(policy, candidates, turn=0)]


def test_by_role_there_is_a_choice_for_each_role_in_their_order():
    p, d, b = (engine(role[0], role=role) for role in ("prefill", "decode", "both"))
    assert by_role(p, d, b) == ["b", "d", "p"]
    assert by_role(p, d) == ["d", "p"]
    assert by_role(p) == ["p"]


@pytest.mark.parametrize("policy", PLAIN)
def test_by_role_a_choice_without_room_or_in_trouble_is_none(policy):
    d = engine("d", role="decode")
    assert by_role(engine("b", avoid="failing"), d, policy=policy) == ["d"]
    if policy is Policy.PREFIX_FIRST:
        assert by_role(engine("b", **FULL), d) == ["d"]


def test_by_role_there_is_an_answer_as_long_as_there_is_an_engine():
    failing = engine("d", role="decode", avoid="failing"), engine("p", role="prefill", avoid="x")
    assert by_role(*failing) == [choose(*failing)[0]]
    assert by_role() == [None]
    (decision,) = decide_by_role(Policy.PREFIX_FIRST, [engine("d", role="decode", **FULL)], turn=0)
    assert decision.reason == "no_kv_room"
