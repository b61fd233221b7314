"""Shares that do not swing with their readings."""

import random

from nearkv.agent.worker_status.steadying import SteadyRatio, round_bytes, two_digits


def shown(readings, seconds=5.0):
    """Return what was told, each value once, of readings taken in a row."""
    steady = SteadyRatio()
    told = []
    for number, reading in enumerate(readings):
        value = steady.take(reading, number * seconds)
        if not told or told[-1] != value:
            told.append(value)
    return told


def test_steps_of_five_percent():
    assert [shown([ratio])[0] for ratio in (0.0, 0.02, 0.03, 0.5, 0.974, 1.0)] == [
        *(0.0, 0.0, 0.05, 0.5, 0.95, 1.0)
    ]


def test_noise_about_a_boundary_shows_nothing():
    draw = random.Random(1)
    assert shown([0.475 + draw.uniform(-0.06, 0.06) for _ in range(720)]) in ([0.5], [0.45])


def test_a_lasting_change_shows_within_a_few_minutes():
    told = shown([0.2] * 12 + [0.8] * 60)
    assert told[0] == 0.2
    assert told[-1] in (0.75, 0.8)


def test_a_burst_of_seconds_hardly_shows():
    assert max(shown([0.2] * 12 + [1.0] * 2 + [0.2] * 60)) <= 0.35


def test_unknown_is_so_at_once_and_what_comes_after_it_is_new():
    assert shown([0.9, None, 0.1]) == [0.9, None, 0.1]


def test_what_was_told_before_is_kept_where_it_is_near():
    steady = SteadyRatio()
    steady.take(0.52, 0.0)
    steady.adopt(0.55)
    assert steady.shown == 0.55
    steady.adopt(0.8)
    assert steady.shown == 0.5


def test_figures():
    assert round_bytes(0.05, 1 << 30) == 53687091
    assert round_bytes(None, 5) is round_bytes(0.5, None) is None
    assert (two_digits(123456.0), two_digits(0.001234), two_digits(None)) == (
        120000.0,
        0.0012,
        None,
    )
