"""Troubles that users of other routers reported, as small replays: hot spots and giant misses."""

import pytest

from nearkv.replay.measuring import percentiles
from nearkv.replay.running import measure, replay
from nearkv.replay.traces import Arrival, chain_ids
from tests.core.replay.fleets import BLOCK, fleet_of, trace_of, variant

PREFIX = range(1, 101)
GIANT_TOKENS = 400_000


def prompt(at, ids, output_tokens=20):
    return Arrival(at, len(ids) * BLOCK + 3, output_tokens, chain_ids(ids))


def own(number, count=20):
    """Return ids of blocks that no other request has."""
    return range(1_000_000 * (number + 1), 1_000_000 * (number + 1) + count)


@pytest.mark.parametrize(
    ("gap_seconds", "most_skew"),
    [(0.5, 2.5), (0.02, 1.6), (0.008, 1.1)],
    ids=["idle", "half busy", "busy"],
)
def test_a_prefix_that_all_share_makes_no_hot_spot(gap_seconds, most_skew):
    """Always the best match means always the same engine of eight."""
    shared = [prompt(n * gap_seconds, [*PREFIX, *own(n)]) for n in range(400)]
    fleet = fleet_of(8, prefill_tokens_per_second=10_000.0, blocks=5000)
    figures = measure(trace_of(*shared), fleet, variant("cost"), seed=1)
    assert figures.skew_ratio <= most_skew
    assert min(figures.computed_tokens.values()) > 0
    assert figures.hit_ratio > 0.8, "each engine computed the prefix once"


def with_giants(every):
    """Return warm groups' requests and, each so many of them, one giant that nobody has cached."""
    for number in range(600):
        at = number * 0.03
        if number % every == every // 2:
            yield prompt(at, own(number, GIANT_TOKENS // BLOCK))
        group = number % 12
        yield prompt(at + 0.001, [*own(1000 + group, 100), *own(2000 + number, 10)])


def test_a_few_giant_misses_do_not_hurt_everybody_s_tail():
    """Giants take 8 s each of one engine; requests that are cached elsewhere never wait for one."""
    fleet = fleet_of(4, prefill_tokens_per_second=50_000.0, blocks=60_000, chunk_tokens=8192)
    trace = trace_of(*with_giants(every=100))

    def warm_p99_ms(policy):
        outcomes = replay(trace, fleet, variant(policy), seed=1)
        warm = [o for o in outcomes if o.arrival.prompt_tokens < GIANT_TOKENS][50:]
        assert len(warm) == 550
        assert all(o.first_token_at is not None for o in warm)
        times = [(o.first_token_at - o.arrival.at) * 1000 for o in warm]
        return percentiles(times).p99

    assert warm_p99_ms("cost") < 50  # one group's beginning computed once more, at the most
    assert warm_p99_ms("least-loaded") > 1000


def test_requests_that_share_their_kv_do_not_fill_an_engine_on_paper():
    """Counted whole, what is in flight here would be six times what the engine has."""
    begun = [prompt(0.0, [*PREFIX, *own(0, 2)], output_tokens=400)]
    burst = [prompt(3.0 + n * 0.001, [*PREFIX, *own(n + 1, 2)], 400) for n in range(10)]
    fleet = fleet_of(1, prefill_tokens_per_second=10_000.0, blocks=180)
    figures = measure(trace_of(*begun, *burst), fleet, variant("cost"), seed=1)
    assert figures.refused == {}
    assert figures.hit_ratio > 0.85
