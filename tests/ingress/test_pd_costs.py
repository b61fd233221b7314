"""What a pair costs beside one engine."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.ingress.pd_costs import (
    CostTerms,
    EngineCost,
    is_clearly_less,
    local_seconds,
    pair_seconds,
)
from nearkv.ingress.quoting import Weights
from nearkv.path_cost import PathCost

TERMS = CostTerms(hop_seconds=0.002, hysteresis_ratio=0.1, weights=Weights(0.0, 0.0))
KV = 131_072
RDMA, SLOW_TCP = PathCost(0.001, 12.2e9), PathCost(0.001, 0.55e9)


def engine(missing, wait=0.0, decoding=0, per_token=141e-3 / 4096):
    return EngineCost(missing, per_token, wait, decoding)


def pair(source, target, path=RDMA, terms=TERMS):
    return pair_seconds(source, target, path, kv_bytes_per_token=KV, terms=terms)


def test_computing_here_takes_the_wait_and_what_is_missing():
    assert local_seconds(engine(4096, wait=0.5), TERMS) == pytest.approx(0.641)


def test_a_pair_takes_prefill_hop_set_up_and_bytes():
    # reference/transfer.md section 11: 4096 tokens of an 8B are 44 ms over 12.2 GB/s.
    assert pair(engine(4096), engine(4096)) == pytest.approx(
        0.141 + 0.002 + 0.001 + 0.044, rel=0.01
    )


def test_only_what_the_target_lacks_is_moved():
    assert pair(engine(4096), engine(96)) == pytest.approx(0.141 + 0.003 + 96 * KV / 12.2e9)


@pytest.mark.parametrize(
    ("wait_seconds", "extra_seconds"),
    [(0.1, 0.0), (0.143, 0.0), (0.643, 0.5)],
    ids=["shorter", "equal", "longer"],
)
def test_the_targets_queue_drains_while_the_source_computes(wait_seconds, extra_seconds):
    free = pair(engine(4096), engine(4096))
    assert pair(engine(4096), engine(4096, wait=wait_seconds)) - free == pytest.approx(
        extra_seconds
    )


def test_a_pull_from_a_holder_pays_where_the_path_is_fast_enough():
    here = local_seconds(engine(4096), TERMS)
    assert is_clearly_less(pair(engine(1), engine(4096), RDMA), here, TERMS)
    assert not is_clearly_less(pair(engine(1), engine(4096), SLOW_TCP), here, TERMS)


def test_two_idle_engines_are_never_faster_than_one():
    here = local_seconds(engine(4096), TERMS)
    assert not is_clearly_less(pair(engine(4096), engine(4096)), here, TERMS)


def test_a_busy_engine_makes_the_pair_pay():
    here = local_seconds(engine(4096, wait=0.5), TERMS)
    assert is_clearly_less(pair(engine(4096), engine(4096, wait=0.5)) - 0.36, here, TERMS)
    busy_source = pair(engine(4096, wait=0.5), engine(4096))
    assert not is_clearly_less(busy_source, here, TERMS)


def test_running_requests_put_a_price_on_a_prefill_beside_them():
    terms = CostTerms(weights=Weights(0.02, 0.0))
    assert local_seconds(engine(4096, decoding=50), terms) == pytest.approx(0.282)
    here = local_seconds(engine(4096, decoding=50), terms)
    assert is_clearly_less(pair(engine(4096), engine(4096, decoding=50), terms=terms), here, terms)


@pytest.mark.parametrize(
    ("seconds", "less"), [(0.9, True), (0.909, True), (0.91, False), (1.0, False)]
)
def test_less_by_a_tenth_is_clearly_less(seconds, less):
    assert is_clearly_less(seconds, 1.0, TERMS) is less


engines = st.builds(
    EngineCost,
    missing_tokens=st.integers(0, 100_000),
    seconds_per_token=st.floats(1e-7, 1e-2),
    wait_seconds=st.floats(0, 60),
    decoding=st.integers(0, 256),
)
paths = st.builds(PathCost, st.floats(0, 1), st.floats(1e6, 1e12))
prices = st.builds(
    CostTerms, weights=st.builds(Weights, st.floats(0, 1), st.floats(0, 5), st.floats(1, 10_000))
)


@given(engines, engines, paths, prices, st.integers(0, 100_000), st.integers(0, 100_000))
def test_more_cached_never_costs_more(source, target, path, terms, there, here):
    """Whichever side holds more of the prompt: neither the pair nor one engine gets dearer."""
    before = pair(source, target, path, terms)
    alone = local_seconds(target, terms)
    source = replace(source, missing_tokens=max(0, source.missing_tokens - there))
    target = replace(target, missing_tokens=max(0, target.missing_tokens - here))
    assert pair(source, target, path, terms) <= before
    assert local_seconds(target, terms) <= alone
