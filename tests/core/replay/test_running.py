"""Whole replays: the same router, a small fleet."""

import pytest

from nearkv.replay.errors import ReplayError
from nearkv.replay.fleet_feed import LinkProfile
from nearkv.replay.measuring import Figures, Percentiles, mean_of, percentiles
from nearkv.replay.peers import PEERS
from nearkv.replay.running import OWN_POLICIES, Variant, measure, replay
from tests.core.replay.fleets import arrival, fleet_of, trace_of, variant

GROUPS = trace_of(*(arrival(n * 0.5, n % 4) for n in range(40)))


def peer(name):
    return Variant(name, name, variant().settings)


@pytest.mark.parametrize("policy", [*OWN_POLICIES, *PEERS])
def test_every_policy_answers_every_request(policy):
    chosen = peer(policy) if policy in PEERS else variant(policy)
    figures = measure(GROUPS, fleet_of(3), chosen, seed=1)
    assert figures.answered == figures.requests == 40
    assert sum(figures.computed_tokens.values()) > 0
    assert figures.first_token_ms.p50 <= figures.first_token_ms.p99


@pytest.mark.parametrize("policy", ["cost", "random", "dynamo-style"])
def test_the_same_seed_gives_the_same_outcomes(policy):
    chosen = peer(policy) if policy in PEERS else variant(policy)
    one, again = (replay(GROUPS, fleet_of(3), chosen, seed=5) for _ in range(2))
    assert one == again


def test_repeated_prompts_go_where_they_are_cached():
    cost = measure(GROUPS, fleet_of(3), variant("cost"), seed=1)
    blind = measure(GROUPS, fleet_of(3), variant("round-robin"), seed=1)
    assert cost.hit_ratio == pytest.approx(36 / 40 * 160 / 163)
    assert blind.hit_ratio < cost.hit_ratio


@pytest.mark.parametrize("policy", ["string-trie", "llm-d-style", "dynamo-style", "dynamo-style-8"])
def test_peers_that_look_at_prefixes_find_some(policy):
    assert measure(GROUPS, fleet_of(3), peer(policy), seed=1).hit_ratio > 0.5


def test_the_index_hears_of_evictions():
    """With room for one prompt only, nothing is predicted that is not there any more."""
    tight = fleet_of(1, blocks=11)
    turns = trace_of(*(arrival(n * 2.0, n % 2) for n in range(10)))
    figures = measure(turns, tight, variant("cost"), seed=1)
    assert figures.hit_ratio == 0.0


def test_one_that_never_fits_is_refused_and_the_others_are_served():
    mixed = trace_of(arrival(0.0, 1, blocks=50), arrival(1.0, 2))
    figures = measure(mixed, fleet_of(1, blocks=20), variant("cost"), seed=1)
    assert figures.refused == {"too_long": 1}
    assert figures.answered == 1


def test_without_room_in_time_requests_are_refused_as_by_the_ingress():
    burst = trace_of(*(arrival(0.001 * n, n, output_tokens=2000) for n in range(40)))
    settings = {"admission": {"max_waiting": 3, "wait_seconds": 0.5}}
    fleet = fleet_of(1, blocks=300)
    figures = measure(burst, fleet, variant("cost", **settings), seed=1)
    assert figures.refused["queue_full"] > 0
    assert figures.refused["no_kv_room"] == 3
    assert figures.answered + sum(figures.refused.values()) == 40


def test_prefill_and_decode_engines_share_a_request():
    fleet = fleet_of(2, roles=["prefill", "decode"], link=LinkProfile(0.001, 1e12))
    one = trace_of(arrival(0.0, 1, blocks=40), arrival(5.0, 2, blocks=40))
    outcomes = replay(one, fleet, variant("cost", pd={"mode": "always"}), seed=1)
    assert [(o.source, o.engine) for o in outcomes] == [("e0", "e1")] * 2
    assert all(o.ended_at is not None for o in outcomes)
    # 643 tokens on P, the way, and one token on D.
    assert outcomes[1].first_token_at - 5.0 == pytest.approx(0.643 + 0.001 + 0.001, abs=1e-3)


def test_sessions_stay_where_they_were():
    turns = trace_of(*(arrival(n * 1.0, n, blocks=2, session="s") for n in range(6)))
    outcomes = replay(turns, fleet_of(3), variant("cost"), seed=1)
    assert len({o.engine for o in outcomes}) == 1


def test_the_beginning_may_be_left_out():
    whole = measure(GROUPS, fleet_of(3), variant("cost"), seed=1)
    warm = measure(GROUPS, fleet_of(3), variant("cost"), seed=1, warm_up_ratio=0.5)
    assert warm.requests == 20
    assert warm.hit_ratio > whole.hit_ratio


def test_progress_counts_up_to_all():
    told = []
    replay(GROUPS, fleet_of(2), variant("cost"), seed=1, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 40


def test_an_unknown_policy_is_named():
    with pytest.raises(ReplayError, match="'what' is none of"):
        replay(GROUPS, fleet_of(1), peer("what"), seed=1)


def test_percentiles_of_nothing_are_unknown():
    assert percentiles([]) == Percentiles(None, None, None)
    assert percentiles(list(range(1, 101))) == Percentiles(51, 91, 100)


def test_means_add_counts_and_leave_out_the_unknown():
    def figures(hit, refused):
        return Figures(
            requests=2,
            answered=1,
            hit_ratio=hit,
            first_token_ms=Percentiles(1.0, 2.0, 3.0),
            per_token_ms=Percentiles(),
            skew_ratio=1.0,
            refused=refused,
            split=1,
            computed_tokens={"e": 5},
            seconds=4.0,
        )

    mean = mean_of([figures(0.2, {"queue_full": 1}), figures(None, {"queue_full": 2})])
    assert (mean.hit_ratio, mean.requests, mean.refused) == (0.2, 4, {"queue_full": 3})
    assert mean.per_token_ms.p50 is None
