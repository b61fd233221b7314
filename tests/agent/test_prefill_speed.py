"""Seconds per prefilled token, from counters of finished requests."""

import pytest

from nearkv.agent.engine_metrics import RankReading
from nearkv.agent.prefill_speed import PrefillSpeed


def reading(requests, seconds, tokens, **more):
    return RankReading(
        prefills=requests, prefill_seconds=seconds, prefill_computed_tokens=tokens, **more
    )


def speed_after(*readings):
    speed = PrefillSpeed()
    for one in readings:
        speed.observe(one)
    return speed.seconds_per_token


def test_the_first_scrape_says_nothing_about_now():
    assert speed_after(reading(100, 50.0, 1e6)) is None


def test_what_came_between_two_scrapes_counts():
    assert speed_after(reading(5, 9.0, 700), reading(6, 9.5, 1700)) == pytest.approx(0.0005)


def test_long_prefills_weigh_more_than_short_ones():
    speed = speed_after(reading(0, 0, 0), reading(1, 0.1, 100), reading(2, 1.1, 10_100))
    assert speed == pytest.approx((0.1 * 0.9 + 1.0) / (100 * 0.9 + 10_000))


def test_an_engine_that_became_slower_is_seen_to_be():
    speed, seconds, tokens = PrefillSpeed(), 0.0, 0.0
    for request in range(100):
        speed.observe(reading(request, seconds, tokens))
        seconds += 0.1 if request < 50 else 0.4
        tokens += 1000
    assert speed.seconds_per_token == pytest.approx(0.0004, rel=0.02)


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(
            reading(3, 3.0, 100 + 63 * 3), id="hits and pulled KV compute next to nothing"
        ),
        pytest.param(reading(0, 5.0, 9000), id="no request finished"),
        pytest.param(reading(1, 1.0, 9000), id="no time went by"),
        pytest.param(reading(1, 0.5, 50), id="counters fell"),
        pytest.param(reading(None, 5.0, 9000), id="requests unknown"),
        pytest.param(reading(3, None, 9000), id="seconds unknown"),
        pytest.param(reading(3, 5.0, None), id="tokens unknown"),
    ],
)
def test_scrapes_that_say_nothing_are_left_out(later):
    assert speed_after(reading(0, 1.0, 100), later) is None


def test_after_a_fall_of_the_counters_the_next_difference_counts():
    speed = speed_after(reading(50, 9.0, 9000), reading(1, 0.1, 100), reading(2, 0.2, 1100))
    assert speed == pytest.approx(0.0001)


def test_engines_that_do_not_count_tokens_by_request_have_a_counter_of_all():
    first = reading(0, 0.0, None, computed_tokens=0.0)
    assert speed_after(first, reading(1, 0.2, None, computed_tokens=400.0)) == pytest.approx(0.0005)
