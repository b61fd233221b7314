"""Policy cost: the engine that takes the fewest milliseconds, whatever the order of engines."""

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from nearkv.freshness import Freshness
from nearkv.ingress.cost_policy import Ask, CostRules, Entrant, decide_by_cost, gate_for
from nearkv.ingress.quoting import EngineTerms, Weights, quote
from nearkv.ingress.routing import Candidate, Gate, Rung, has_room_for

TOKENS = 4096
RULES = CostRules()
USUAL = EngineTerms()
GATE = Gate(0, 0.1)
FRESH, AGED, UNKNOWN = Freshness.FRESH, Freshness.AGED, Freshness.UNKNOWN


def entrant(name, *, terms=USUAL, requests=0.0, new_tokens=0.0, **fields):
    candidate = Candidate(name, **({"free_ratio": 0.5, "queue": 0} | fields))
    return Entrant(
        candidate,
        quote(candidate, terms, TOKENS, Weights()),
        requests,
        new_tokens,
    )


def choose(*entrants, rules=RULES, gate=GATE, **ask):
    decision = decide_by_cost(entrants, Ask(tokens=TOKENS, **ask), rules, gate)
    return decision.engine, decision.reason


def waiting(ms, **more):
    return {"terms": EngineTerms(wait_ms=ms, **more)}


def test_a_hit_is_followed_until_waiting_for_it_takes_longer_than_computing_elsewhere():
    # 4,000 of 4,096 tokens at 0.05 ms each, doubled for crowding: a lead of 400 ms.
    holder, other = {"cached_tokens": 4000}, entrant("b")
    assert choose(entrant("a", **holder, **waiting(390)), other) == ("a", "prefix_hit")
    assert choose(entrant("a", **holder, **waiting(410)), other) == ("b", "prefix_miss")


def test_requests_decoding_on_an_engine_send_a_long_prefill_elsewhere():
    busy = entrant("a", terms=EngineTerms(decoding=20))
    assert choose(busy, entrant("b"))[0] == "b"
    assert choose(entrant("a"), entrant("b", terms=EngineTerms(decoding=20)))[0] == "a"


@pytest.mark.parametrize("tier", ["host_tokens", "disk_tokens"])
def test_the_nearer_tier_is_preferred_and_the_further_still_beats_computing(tier):
    slow = EngineTerms(host_ms_per_token=0.01, disk_ms_per_token=0.02)
    device = entrant("d", cached_tokens=4000, terms=slow)
    further = entrant("a", cached_tokens=4000, **{tier: 4000}, terms=slow)
    assert choose(device, further)[0] == "d"
    assert choose(further, entrant("b", terms=slow))[0] == "a"


def test_a_session_stays_until_another_engine_is_clearly_cheaper():
    assert choose(entrant("a", hinted=True, **waiting(40)), entrant("b")) == ("a", "hint")
    assert choose(entrant("a", hinted=True, **waiting(60)), entrant("b"))[0] == "b"
    held = entrant("a", hinted=True, cached_tokens=64, **waiting(20))
    assert choose(held, entrant("b", cached_tokens=64)) == ("a", "prefix_hit")


def test_new_groups_settle_where_the_fewest_new_tokens_went():
    assert choose(entrant("a", new_tokens=10), entrant("b", new_tokens=9))[0] == "b"
    chosen = Counter(
        choose(*(entrant(name) for name in "abcd"), group=group)[0] for group in range(100)
    )
    assert set(chosen) == set("abcd")


def test_two_of_several_holders_are_drawn_and_the_less_loaded_one_serves():
    engines = [entrant(n, cached_tokens=4000, in_flight=i) for i, n in enumerate("abcdef")]
    chosen = Counter(choose(*engines, seed=seed * 7919)[0] for seed in range(600))
    assert chosen["f"] == 0  # it is never the less loaded one of two
    assert chosen["a"] > chosen["b"] > chosen["e"] > 0


def test_near_ties_do_not_give_hits_away():
    quick = {"ms_per_token": 1e-5}
    holder = entrant("a", cached_tokens=4000, in_flight=9, **waiting(0, **quick))
    assert all(
        choose(holder, entrant("b", **waiting(0, **quick)), seed=s)[0] == "a" for s in range(9)
    )


def test_a_holder_is_kept_where_another_engine_is_cheaper_by_next_to_nothing():
    holder = entrant("a", cached_tokens=4000, **waiting(1, ms_per_token=1e-5))
    idle = entrant("b", **waiting(0, ms_per_token=1e-5))
    assert idle.quote.cost_ms < holder.quote.cost_ms
    assert choose(holder, idle) == ("a", "prefix_hit")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, ("z", "floor_share"), id="hardly anything was given to it"),
        pytest.param({"requests": 5.0}, ("a", "prefix_hit"), id="it gets its share"),
        pytest.param({"in_flight": 1}, ("a", "prefix_hit"), id="not idle"),
        pytest.param({"queue": 1}, ("a", "prefix_hit"), id="others use it"),
        pytest.param(waiting(600), ("a", "prefix_hit"), id="too dear"),
    ],
)
def test_an_idle_engine_gets_a_floor_share(changes, expected):
    hot = entrant("a", cached_tokens=4000, requests=400.0)
    assert choose(hot, entrant("z", **changes)) == expected


def test_the_floor_share_waits_for_enough_requests_and_spares_urgent_ones():
    assert choose(entrant("a", cached_tokens=4000, requests=99.0), entrant("z"))[0] == "a"
    hot = entrant("a", cached_tokens=4000, requests=400.0)
    assert choose(hot, entrant("z"), priority=1)[0] == "a"
    assert choose(hot, entrant("z"), rules=CostRules(floor_share=0.0))[0] == "a"


def test_an_engine_without_room_for_what_is_new_is_passed_over_while_others_have_it():
    new = TOKENS - 4000
    small = entrant("a", cached_tokens=4000, free_tokens=new - 1)
    assert choose(small, entrant("b", free_tokens=TOKENS))[0] == "b"
    assert choose(small, entrant("b", free_tokens=TOKENS - 1))[0] == "a"
    enough = entrant("a", cached_tokens=4000, free_tokens=new)
    assert choose(enough, entrant("b", free_tokens=TOKENS))[0] == "a"


@pytest.mark.parametrize(
    ("held", "free_tokens", "expected"),
    [
        pytest.param(TOKENS - 500, 500, "a", id="room for the rest"),
        pytest.param(TOKENS - 500, 499, "b", id="no room for the rest"),
        pytest.param(TOKENS // 2 - 1, TOKENS, "b", id="has less than half"),
        pytest.param(TOKENS - 500, None, "b", id="room unknown"),
    ],
)
def test_a_full_engine_takes_prompts_that_it_has_most_of(held, free_tokens, expected):
    full = entrant("a", cached_tokens=held, free_ratio=0.01, free_tokens=free_tokens)
    assert choose(full, entrant("b"))[0] == expected


def test_prefill_engines_answer_only_where_nobody_else_can():
    prefill = entrant("p", role="prefill", cached_tokens=4000)
    assert choose(prefill, entrant("d", role="decode"))[0] == "d"
    assert choose(prefill, entrant("d", role="decode", free_ratio=0.0))[0] == "p"
    assert choose(prefill, entrant("d", role="decode"), roles=False)[0] == "p"


def test_low_priority_leaves_the_last_fifth_alone():
    tight = entrant("a", free_ratio=0.15)
    assert choose(tight, gate=gate_for(0, GATE))[0] == "a"
    assert choose(tight, gate=gate_for(-1, GATE)) == (None, "no_kv_room")
    assert gate_for(5, GATE) is GATE


def test_urgent_requests_look_to_their_own_time_and_others_twice_to_the_rest():
    usual, urgent, patient = (Weights().for_priority(p) for p in (0, 3, -3))
    quotes = [
        quote(Candidate("a"), EngineTerms(decoding=10), 1000, w) for w in (usual, urgent, patient)
    ]
    assert [q.disturb_ms for q in quotes] == pytest.approx([60.0, 0.0, 120.0])
    assert {q.first_token_ms for q in quotes} == {50.0}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="a new group"),
        pytest.param({"cached_tokens": 64}, id="equal holders"),
        pytest.param({"hinted": True}, id="several claim the session"),
        pytest.param({"freshness": UNKNOWN}, id="nothing is known"),
        pytest.param({"floor": True}, id="several are starved"),
    ],
)
def test_equal_engines_are_told_apart_by_the_request_and_not_by_their_order(fields):
    hot = [entrant("hot", cached_tokens=4000, requests=800.0)] if "floor" in fields else []
    fields = {} if hot else fields
    engines = [*hot, *(entrant(name, **fields) for name in "abcd")]
    for number in range(8):
        ask = {"seed": number * 7919, "group": number, "turn": number}
        assert len({choose(*order, **ask) for order in permutations(engines)}) == 1


# -- The ladder ------------------------------------------------------------------------


def test_down_the_ladder():
    def rung(*entrants):
        return decide_by_cost(entrants, Ask(tokens=TOKENS), RULES, GATE).rung

    assert rung(entrant("a"), entrant("b", freshness=UNKNOWN)) is Rung.FRESH
    assert rung(entrant("a", freshness=AGED), entrant("b", freshness=UNKNOWN)) is Rung.AGED
    assert (
        rung(entrant("a", freshness=UNKNOWN, in_flight=1), entrant("b", freshness=UNKNOWN))
        is Rung.LEDGER
    )
    assert (
        rung(entrant("a", freshness=UNKNOWN), entrant("b", freshness=UNKNOWN)) is Rung.ROUND_ROBIN
    )
    assert rung() is Rung.ROUND_ROBIN


def test_engines_of_unknown_state_are_used_before_anybody_is_refused():
    full, unknown = entrant("a", free_ratio=0.0), entrant("b", freshness=UNKNOWN)
    assert choose(full, unknown)[0] == "b"
    assert choose(full) == (None, "no_kv_room")
    assert choose() == (None, "no_engine")


def test_engines_to_avoid_are_used_only_where_there_are_no_others():
    assert choose(entrant("a", avoid="failing", cached_tokens=4000), entrant("b"))[0] == "b"
    assert choose(entrant("a", avoid="failing"))[0] == "a"


# -- Properties ------------------------------------------------------------------------

ratios = st.floats(0, 1)
milliseconds = st.floats(0, 2000)
terms = st.builds(
    EngineTerms,
    wait_ms=milliseconds,
    fixed_ms=st.floats(0, 50),
    ms_per_token=st.floats(1e-4, 1),
    decoding=st.integers(0, 64),
    host_ms_per_token=st.floats(0, 2),
    disk_ms_per_token=st.floats(0, 2),
)


@st.composite
def candidates(draw, name="e"):
    cached = draw(st.integers(0, TOKENS))
    disk = draw(st.integers(0, cached))
    host = draw(st.integers(0, cached - disk))
    return Candidate(
        name,
        role=draw(st.sampled_from(["both", "prefill", "decode"])),
        freshness=draw(st.sampled_from(Freshness)),
        decay=draw(ratios),
        trust=draw(ratios),
        cached_tokens=cached,
        host_tokens=host,
        disk_tokens=disk,
        free_ratio=draw(st.none() | ratios),
        queue=draw(st.none() | st.integers(0, 5)),
        in_flight=draw(st.integers(0, 5)),
        hinted=draw(st.booleans()),
        avoid=draw(st.sampled_from(["", "", "failing"])),
        free_tokens=draw(st.none() | st.integers(0, 2 * TOKENS)),
    )


@st.composite
def fleets(draw):
    return [
        Entrant(
            candidate := draw(candidates(f"e{i}")),
            quote(candidate, draw(terms), TOKENS, Weights()),
            draw(st.floats(0, 500)),
            draw(st.floats(0, 1e6)),
        )
        for i in range(draw(st.integers(1, 6)))
    ]


@st.composite
def near_ties(draw):
    """Return fleets of engines that are as good: who serves is up to the last rules."""
    few = st.sampled_from
    return [
        entrant(
            f"e{i}",
            cached_tokens=draw(few([0, 4000])),
            in_flight=draw(few([0, 1])),
            hinted=draw(few([False, False, True])),
            requests=draw(few([0.0, 500.0])),
            new_tokens=draw(few([0.0, 5000.0])),
            terms=EngineTerms(ms_per_token=1e-5),
        )
        for i in range(draw(st.integers(2, 6)))
    ]


asks = st.builds(
    Ask,
    seed=st.integers(0, 2**64 - 1),
    group=st.integers(0, 2**64 - 1),
    tokens=st.just(TOKENS),
    priority=st.integers(-1, 1),
    turn=st.integers(0, 9),
    roles=st.booleans(),
)


@given(
    candidates(),
    terms,
    st.integers(0, TOKENS),
    st.sampled_from(["device", "host_tokens", "disk_tokens"]),
)
def test_more_cached_never_costs_more(candidate, terms, more, tier):
    more = min(more, TOKENS - candidate.cached_tokens)
    changes = {"cached_tokens": candidate.cached_tokens + more}
    if tier != "device":
        changes[tier] = getattr(candidate, tier) + more
    before = quote(candidate, terms, TOKENS, Weights())
    after = quote(replace(candidate, **changes), terms, TOKENS, Weights())
    assert after.cost_ms <= before.cost_ms * (1 + 1e-9)
    assert after.first_token_ms <= before.first_token_ms * (1 + 1e-9)


@given(candidates(), terms, st.integers(1, TOKENS))
def test_nearer_never_costs_more(candidate, terms, moved):
    moved = min(moved, candidate.disk_tokens)
    nearer = replace(
        candidate,
        disk_tokens=candidate.disk_tokens - moved,
        host_tokens=candidate.host_tokens + moved,
    )
    costs = [quote(c, terms, TOKENS, Weights()).cost_ms for c in (nearer, candidate)]
    assert costs[0] <= costs[1] * (1 + 1e-9)


@given((fleets() | near_ties()).flatmap(lambda f: st.tuples(st.just(f), st.permutations(f))), asks)
def test_the_order_of_engines_changes_nothing(orders, ask):
    first, second = (decide_by_cost(fleet, ask, RULES, GATE) for fleet in orders)
    assert first == second


def has_memory_for_what_is_new(one):
    free_tokens = one.candidate.free_tokens
    return free_tokens is None or free_tokens >= TOKENS - one.quote.held_tokens


def may_take(one):
    return has_room_for(one.candidate, GATE, TOKENS, one.quote.held_tokens)


@given(fleets(), asks)
def test_gated_engines_get_nothing_while_another_can_serve(fleet, ask):
    decision = decide_by_cost(fleet, ask, RULES, GATE)
    usable = [e for e in fleet if not e.candidate.avoid] or fleet
    able = [e.candidate.engine for e in usable if e.candidate.freshness is UNKNOWN or may_take(e)]
    assert (decision.engine is None) == (not able)
    assert decision.engine is None or decision.engine in able


@given(fleets(), asks)
def test_what_is_chosen_is_never_much_dearer_than_the_cheapest(fleet, ask):
    ask = replace(ask, roles=False)
    decision = decide_by_cost(fleet, ask, RULES, GATE)
    known = [e for e in fleet if not e.candidate.avoid and e.candidate.freshness is not UNKNOWN]
    able = [e for e in filter(may_take, known) if has_memory_for_what_is_new(e)]
    assume(able)
    chosen = next(e for e in able if e.candidate.engine == decision.engine)
    best_ms = min(e.quote.cost_ms for e in able)
    allowed = max(
        RULES.near_tie_ms,
        best_ms * RULES.near_tie_ratio,
        best_ms * RULES.session_ratio + RULES.session_ms,
        RULES.floor_ms if decision.reason == "floor_share" else 0,
    )
    assert chosen.quote.cost_ms <= best_ms + allowed + 1e-6


@given(st.integers(2, 8), st.integers(0, 2**64 - 1))
def test_a_burst_of_equal_requests_spreads_evenly(engines, seed):
    given = [[0, 0.0] for _ in range(engines)]
    for number in range(12 * engines):
        fleet = [
            entrant(
                f"e{i}", in_flight=count, requests=count, new_tokens=tokens, **waiting(count * 205)
            )
            for i, (count, tokens) in enumerate(given)
        ]
        chosen, _ = choose(*fleet, seed=(seed + number * 0x9E3779B97F4A7C15) % 2**64)
        given[int(chosen[1:])][0] += 1
        given[int(chosen[1:])][1] += TOKENS
    counts = [count for count, _ in given]
    assert max(counts) - min(counts) <= 1


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 10), st.floats(1, 1e5))
def test_crowding_grows_with_what_is_computed_and_never_beyond_its_limit(one, other, weight, most):
    weights = Weights(crowding=weight, crowding_most_ms=most)
    low, high = sorted((one, other))
    assert 0 <= weights.crowding_ms(low) <= weights.crowding_ms(high) * (1 + 1e-9)
    assert weights.crowding_ms(high) <= min(most, weight * high) * (1 + 1e-9)
    assert Weights(crowding=weight).crowding_ms(high) == weight * high
