"""From the fleet to candidates: what is made of ages, readings and our own knowledge."""

import math

import pytest

from nearkv.freshness import Freshness, FreshnessLimits
from nearkv.ingress.candidates import CandidateBuilder, PromptView, cached_tokens
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.hints import PrefixHint
from nearkv.ingress.ledger import Ledger
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.routing import Policy, decide
from nearkv.ingress.suspects import Suspects
from nearkv.state.model import EngineGauges, EngineInfo, EngineState

NOW = 100.0


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def parity():
    return ParityCheck(enough_requests=1)


@pytest.fixture
def suspects():
    return Suspects()


@pytest.fixture
def build(ledger, parity, suspects):
    builder = CandidateBuilder(ledger, parity, suspects, FreshnessLimits(3.0, 30.0))

    def build(*views, **prompt):
        prompt = {"token_count": 100, "depths": {}} | prompt
        return builder.build(views, PromptView(**prompt), NOW)

    return build


def view(name="e", *, age=0.0, gauges=None, **info):
    info = {"incarnation": "i", "url": "", "state": EngineState.READY, "block_size": 16} | info
    reading = None if gauges is None else EngineGauges(id=name, **gauges)
    return EngineView(
        EngineInfo(id=name, **info), "agent", reading, None if age is None else NOW - age
    )


@pytest.mark.parametrize(
    ("depth", "token_count", "expected"),
    [
        pytest.param(0, 100, 0, id="nothing held"),
        pytest.param(3, 100, 48, id="part held"),
        pytest.param(6, 100, 96, id="all full blocks held"),
        pytest.param(6, 96, 80, id="whole prompt held, on a block's edge"),
        pytest.param(6, 97, 96, id="one token past the edge"),
        pytest.param(1, 16, 0, id="a prompt of one block is never cached"),
        pytest.param(1, 0, 0, id="no tokens"),
    ],
)
def test_the_last_token_is_always_computed(depth, token_count, expected):
    assert cached_tokens(16, depth, token_count) == expected


@pytest.mark.parametrize("block_size", [None, 0])
def test_without_a_block_size_nothing_is_predicted(block_size):
    assert cached_tokens(block_size, 3, 100) == 0


@pytest.mark.parametrize(
    ("age", "freshness", "decay"),
    [
        pytest.param(0.0, Freshness.FRESH, 1.0, id="new"),
        pytest.param(3.0, Freshness.FRESH, 1.0, id="fresh to the end"),
        pytest.param(16.5, Freshness.AGED, 0.5, id="half way"),
        pytest.param(30.0, Freshness.AGED, 0.0, id="aged to the end"),
        pytest.param(31.0, Freshness.UNKNOWN, 0.0, id="too old"),
        pytest.param(None, Freshness.UNKNOWN, 0.0, id="never read"),
    ],
)
def test_data_decays_with_age(build, age, freshness, decay):
    (candidate,) = build(view(age=age))
    assert candidate.freshness is freshness
    assert candidate.decay == pytest.approx(decay)


@pytest.mark.parametrize(
    ("gauges", "in_flight_tokens", "free"),
    [
        pytest.param({"kv_used_ratio": 0.4, "kv_total_tokens": 1000}, 0, 0.6, id="as read"),
        pytest.param({"kv_used_ratio": 0.4, "kv_total_tokens": 1000}, 700, 0.3, id="ours is more"),
        pytest.param({"kv_used_ratio": 0.4, "kv_total_tokens": 1000}, 300, 0.6, id="ours is less"),
        pytest.param({"kv_used_ratio": 0.0, "kv_total_tokens": 1000}, 9000, 0.0, id="never below"),
        pytest.param({"kv_used_ratio": 0.4}, 700, 0.6, id="size unknown"),
        pytest.param({"kv_used_ratio": 0.4, "kv_total_tokens": 0}, 700, 0.6, id="no size"),
        pytest.param({"kv_total_tokens": 1000}, 700, None, id="use unknown is not zero"),
        pytest.param(None, 700, None, id="no reading"),
    ],
)
def test_free_kv_is_the_reading_or_what_we_have_in_flight(
    build, ledger, gauges, in_flight_tokens, free
):
    ledger.open("e", "i", in_flight_tokens)
    (candidate,) = build(view(gauges=gauges))
    assert candidate.free_ratio == (None if free is None else pytest.approx(free))
    assert candidate.in_flight == 1


@pytest.mark.parametrize("used", [math.nan, math.inf, -math.inf, -3.0, 1e308])
def test_nonsense_readings_break_no_decision(build, used):
    gauges = {"kv_used_ratio": used, "kv_total_bytes": 10**9, "kv_total_tokens": 1000}
    candidates = build(view("a", gauges=gauges), view("b", gauges={}))
    assert 0.0 <= candidates[0].free_ratio <= 1.0
    assert decide(Policy.PREFIX_FIRST, candidates, turn=0).engine is not None


@pytest.mark.parametrize(
    ("gauges", "queue"),
    [
        pytest.param({"requests_running": 2, "requests_waiting": 3}, 5, id="both"),
        pytest.param({"requests_running": 2}, 2, id="running only"),
        pytest.param({"requests_waiting": 3}, None, id="running unknown"),
        pytest.param(None, None, id="no reading"),
    ],
)
def test_the_queue_is_all_requests_at_the_engine(build, gauges, queue):
    (candidate,) = build(view(gauges=gauges))
    assert candidate.queue == queue


@pytest.mark.parametrize("state", EngineState, ids=str)
def test_an_engine_that_is_not_ready_is_to_be_avoided(build, state):
    (candidate,) = build(view(state=state))
    assert candidate.avoid == ("" if state is EngineState.READY else state.value)


def test_a_suspect_is_to_be_avoided_in_this_incarnation_only(build, suspects):
    suspects.failed("e", "i", NOW)
    (failing,) = build(view())
    (restarted,) = build(view(incarnation="i2"))
    assert (failing.avoid, restarted.avoid) == ("failing", "")


def test_engines_already_tried_are_left_out(build):
    assert [c.engine for c in build(view("a"), view("b"), tried={"a"})] == ["b"]


def test_depths_become_tokens_by_each_engines_own_block_size(build):
    candidates = build(
        view("a"), view("b", block_size=32), view("c"), depths={"a": 3, "b": 2}, token_count=1000
    )
    assert [c.cached_tokens for c in candidates] == [48, 64, 0]


def test_a_demoted_engine_is_trusted_as_far_as_it_kept_its_word(build, parity):
    parity.observe("e", "i", predicted=100, reported=25)
    (candidate,) = build(view())
    assert candidate.trust == 0.25


@pytest.mark.parametrize(
    ("engine", "incarnation", "hinted"),
    [("e", "i", True), ("e", "old", False), ("other", "i", False)],
    ids=["same", "restarted", "another"],
)
def test_a_hint_names_one_incarnation(build, engine, incarnation, hinted):
    (candidate,) = build(view(), hint=PrefixHint((), engine, incarnation))
    assert candidate.hinted is hinted
