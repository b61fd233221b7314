"""Recompute against pull: the figures and the properties."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.break_even import Link, break_even_tokens, estimate_pull, recompute_seconds
from nearkv.kv_size import ModelShape

LLAMA_8B = ModelShape(
    layers=32, hidden_size=4096, attention_heads=32, kv_heads=8, head_dim=128,
    parameters=8_030_000_000,
)  # fmt: skip
H100 = 495e12
RDMA = Link("100g", 12.2e9)


@pytest.mark.parametrize(
    ("tokens", "milliseconds", "break_even_gbps"),
    [(1024, 33.7, 4.0), (4096, 141, 3.8), (32768, 1628, 2.6)],
    ids=str,
)
def test_an_8b_model_on_one_h100(tokens, milliseconds, break_even_gbps):
    estimate = estimate_pull(LLAMA_8B, tokens, RDMA, effective_flops=H100)
    assert estimate.recompute_seconds * 1e3 == pytest.approx(milliseconds, rel=0.01)
    assert estimate.break_even_bytes_per_second / 1e9 == pytest.approx(break_even_gbps, rel=0.02)


def test_cached_tokens_still_cost_attention():
    alone = recompute_seconds(LLAMA_8B, 1000, effective_flops=H100)
    behind = recompute_seconds(LLAMA_8B, 1000, effective_flops=H100, cached_tokens=8000)
    whole = recompute_seconds(LLAMA_8B, 9000, effective_flops=H100)
    before = recompute_seconds(LLAMA_8B, 8000, effective_flops=H100)
    assert behind > alone
    assert behind == pytest.approx(whole - before)


@given(gbps=st.floats(0.1, 200), setup=st.floats(0, 0.5))
def test_the_threshold_is_where_paying_begins(gbps, setup):
    link = Link("l", gbps * 1e9, setup)
    least = break_even_tokens(LLAMA_8B, link, effective_flops=H100)
    if least is None:
        assert not estimate_pull(LLAMA_8B, 1 << 24, link, effective_flops=H100).pays
        return
    assert estimate_pull(LLAMA_8B, least, link, effective_flops=H100).pays
    assert least == 1 or not estimate_pull(LLAMA_8B, least - 1, link, effective_flops=H100).pays


def test_a_model_of_unknown_weights_is_refused():
    unknown = ModelShape(layers=1, hidden_size=1, attention_heads=1, kv_heads=1, head_dim=1)
    with pytest.raises(ValueError, match="parameters"):
        recompute_seconds(unknown, 1, effective_flops=1.0)
    assert math.isfinite(unknown.kv_bytes_per_token)
