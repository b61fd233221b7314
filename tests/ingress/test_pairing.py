"""Choosing a pair: who may be what, who has room, who is cheapest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.ingress.pairing import Need, PairCandidate, choose_pair
from nearkv.ingress.pd_costs import CostTerms, EngineCost
from nearkv.path_cost import PathCost

TERMS = CostTerms()
NEED = Need(room_tokens=1000, holder_tokens=100)
AGENT = ("agent", "c1")


def engine(name, role="both", *, missing=900, cached=0, wait=0.0, **more):
    fields = {
        "node": "n1",
        "compat": AGENT,
        "kv_bytes_per_token": 1000,
        "free_tokens": 50_000.0,
        "load": 0,
    } | more
    return PairCandidate(
        engine=name,
        role=role,
        cached_tokens=cached,
        cost=EngineCost(missing, 1e-4, wait),
        **fields,
    )


def path(_source, _target):
    return PathCost(0.001, 1e9)


def choose(*engines, turn=0, path_between=path):
    choice = choose_pair(engines, NEED, path_between, TERMS, turn=turn)
    pair = choice.pair
    return choice.why if pair is None else (pair.source.engine, pair.target.engine)


def test_prefill_computes_and_decode_answers():
    assert choose(engine("d", "decode"), engine("p", "prefill")) == ("p", "d")


def test_an_engine_of_both_roles_can_be_either():
    assert choose(engine("b"), engine("p", "prefill")) == ("p", "b")
    assert choose(engine("b"), engine("d", "decode")) == ("b", "d")


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param([], id="nobody"),
        pytest.param([engine("b")], id="one engine is no pair"),
        pytest.param([engine("p", "prefill"), engine("q", "prefill")], id="two for prefill"),
        pytest.param([engine("d", "decode"), engine("e", "decode")], id="two for decode"),
        pytest.param([engine("a"), engine("b", compat=("agent", "c2"))], id="another layout"),
        pytest.param([engine("a"), engine("b", compat=("nixl", "c1"))], id="another mode"),
    ],
)
def test_there_is_no_pair(engines):
    assert choose(*engines) == "no_pair"


def test_compat_is_looked_at_pair_by_pair():
    engines = [
        engine("p1", "prefill", compat=("nixl", "x")),
        engine("p2", "prefill", wait=9.0),
        engine("d2", "decode"),
        engine("d3", "decode", compat=("nixl", "y")),
    ]
    assert choose(*engines) == ("p2", "d2")


def test_a_decode_engine_is_a_source_only_where_it_holds_the_prompt():
    target = engine("d", "decode")
    assert choose(engine("h", "decode", missing=101), target) == "no_pair"
    assert choose(engine("h", "decode", missing=100, cached=800), target) == ("h", "d")


@pytest.mark.parametrize("full", ["p", "d"])
def test_both_sides_need_room_for_the_whole_prompt(full):
    def free(name):
        return 999.0 if name == full else 1000.0

    engines = [engine("p", "prefill"), engine("d", "decode")]
    sized = [engine(c.engine, c.role, free_tokens=free(c.engine)) for c in engines]
    assert choose(*sized) == "no_room"
    assert choose(*sized, engine("b")) != "no_room"


def test_room_that_is_unknown_is_not_zero():
    engines = engine("p", "prefill", free_tokens=None), engine("d", "decode", free_tokens=None)
    assert choose(*engines) == ("p", "d")


def test_the_cheapest_source_is_taken():
    busy = engine("p1", "prefill", wait=1.0)
    free = engine("p2", "prefill")
    holder = engine("p3", "prefill", missing=10, cached=890, wait=0.01)
    target = engine("d", "decode")
    assert choose(busy, free, target) == ("p2", "d")
    assert choose(busy, free, holder, target) == ("p3", "d")


def test_the_nearer_target_is_taken():
    def path_between(_source, target):
        return PathCost(0.001, 1e9 if target.node == "n1" else 1e6)

    near, far = engine("d2", "decode"), engine("d1", "decode", node="n2")
    assert choose(engine("p", "prefill"), near, far, path_between=path_between) == ("p", "d2")


def test_near_equals_are_told_apart_by_the_targets_load():
    source = engine("p", "prefill")
    engines = [engine(f"d{n}", "decode", load=load) for n, load in enumerate((3, 1, 2))]
    assert choose(source, *engines) == ("p", "d1")


def test_equals_take_turns():
    engines = [engine(f"p{n}", "prefill") for n in range(2)]
    engines += [engine(f"d{n}", "decode") for n in range(2)]
    assert {choose(*engines, turn=turn) for turn in range(4)} == {
        (p, d) for p in ("p0", "p1") for d in ("d0", "d1")
    }


@pytest.mark.parametrize(
    ("source", "target", "outcome"),
    [(0, 0, "pd"), (64, 64, "pd"), (32, 64, "pd"), (96, 64, "pull")],
)
def test_a_pull_is_a_pair_whose_source_holds_more(source, target, outcome):
    engines = engine("p", "prefill", cached=source), engine("d", "decode", cached=target)
    assert choose_pair(engines, NEED, path, TERMS, turn=0).pair.outcome == outcome


def test_a_large_fleet_is_searched_in_part_and_the_best_is_in_it():
    engines = [engine(f"p{n:03}", "prefill", wait=1 + n) for n in range(200)]
    engines += [engine(f"d{n:03}", "decode", missing=900 - n) for n in range(200)]
    asked = []

    def path_between(source, target):
        asked.append((source, target))
        return path(source, target)

    assert choose(*engines, path_between=path_between)[0] == "p000"
    assert len(asked) <= 64


@given(
    engines=st.lists(
        st.builds(
            engine,
            st.sampled_from("abcdef"),
            st.sampled_from(["prefill", "decode", "both"]),
            missing=st.integers(0, 900),
            compat=st.sampled_from([AGENT, ("agent", "c2"), ("nixl", "c1")]),
            free_tokens=st.sampled_from([None, 0.0, 1000.0]),
            load=st.integers(0, 3),
        ),
        unique_by=lambda c: c.engine,
    ),
    turn=st.integers(0, 100),
)
def test_whatever_the_fleet_a_pair_is_two_engines_that_fit(engines, turn):
    pair = choose_pair(engines, NEED, path, TERMS, turn=turn).pair
    if pair is not None:
        assert pair.source.engine != pair.target.engine
        assert pair.source.compat == pair.target.compat
        assert pair.target.role != "prefill"
        assert pair.source.role != "decode" or pair.source.cost.missing_tokens <= 100
        assert 0.0 not in (pair.source.free_tokens, pair.target.free_tokens)
