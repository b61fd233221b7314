"""What a prefill takes, from the engine's word and from first bytes."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearkv.ingress.prefill_fit import PrefillFits, PrefillLine

USUAL = 5e-5


@pytest.fixture
def fits():
    return PrefillFits()


def line(fits, told=None):
    found = fits.line("e", told, USUAL)
    return found.fixed_seconds, found.seconds_per_token


def observe(fits, *, count=30, fixed=0.01, per_token=1e-4, tokens=(100, 4000), noise=0.0):
    draw = random.Random(count)
    for _ in range(count):
        n = draw.randint(*tokens)
        fits.observe("e", n, (fixed + n * per_token) * (1 + draw.uniform(-noise, noise)))


def test_at_first_an_engine_is_as_its_others_then_as_it_says(fits):
    assert line(fits) == (0.0, USUAL)
    assert line(fits, told=2e-4) == (0.0, 2e-4)


def test_idle_or_restarted_it_stays_what_it_was(fits):
    line(fits, told=2e-4)
    assert line(fits) == (0.0, 2e-4)
    observe(fits)
    assert line(fits) == pytest.approx((0.01, 1e-4), rel=0.01)


def test_first_bytes_give_the_fixed_part_too(fits):
    observe(fits, noise=0.1)
    fixed, per_token = line(fits, told=1e-4)
    assert fixed == pytest.approx(0.01, abs=0.006)
    assert per_token == pytest.approx(1e-4, rel=0.1)


def test_a_line_below_zero_is_not_believed(fits):
    for tokens in range(1000, 3000, 100):
        fits.observe("e", tokens, 1e-7 * tokens**2)  # longer prompts take more than their share
    fixed, per_token = line(fits, told=1e-4)
    assert fixed >= 0
    assert PrefillLine(fixed, per_token).seconds(100) > 0


def test_few_points_prove_nothing(fits):
    observe(fits, count=7)
    assert line(fits, told=3e-4) == (0.0, 3e-4)


def test_equal_lengths_give_no_slope_so_the_engine_s_word_stands(fits):
    observe(fits, tokens=(1000, 1000))
    assert line(fits, told=5e-5) == pytest.approx((0.06, 5e-5))
    assert line(fits, told=1e-2) == pytest.approx((0.0, 1.1e-4))  # slower than it was seen to be


def test_it_follows_an_engine_that_changes(fits):
    observe(fits, count=100)
    observe(fits, count=100, per_token=3e-4)
    assert line(fits)[1] == pytest.approx(3e-4, rel=0.1)


def test_one_stray_answer_moves_little(fits):
    observe(fits, count=100)
    fits.observe("e", 1000, 3600.0)
    assert PrefillLine(*line(fits)).seconds(1000) < 0.2


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(0, 1.0), (10, 0.0), (10, -1.0), (10, math.inf), (10, math.nan)]
)
def test_points_that_cannot_be_are_passed_over(fits, tokens, seconds):
    fits.observe("e", tokens, seconds)
    assert fits.points("e") == 0


def test_engines_that_are_gone_are_forgotten(fits):
    observe(fits)
    fits.forget({"other"})
    assert fits.points("e") == 0


points = st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e4)), max_size=40)


@given(points, st.none() | st.floats(1e-9, 1.0))
def test_whatever_is_seen_longer_never_takes_less(seen, told):
    fits = PrefillFits()
    for tokens, seconds in seen:
        fits.observe("e", tokens, seconds)
    found = fits.line("e", told, USUAL)
    assert found.fixed_seconds >= 0
    assert 0 < found.seconds_per_token < math.inf
