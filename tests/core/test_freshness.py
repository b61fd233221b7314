"""Freshness: fresh, aged, unknown; never seen is unknown."""

import itertools

import pytest

from nearkv.freshness import Freshness, FreshnessLimits, worst

LIMITS = FreshnessLimits(fresh_seconds=3, aged_seconds=30)


@pytest.mark.parametrize(
    ("age_seconds", "expected"),
    [
        (0, Freshness.FRESH),
        (3, Freshness.FRESH),
        (3.001, Freshness.AGED),
        (30, Freshness.AGED),
        (30.001, Freshness.UNKNOWN),
        (None, Freshness.UNKNOWN),
    ],
)
def test_age_decides(age_seconds, expected):
    assert LIMITS.classify(age_seconds) is expected


@pytest.mark.parametrize("order", list(itertools.permutations(Freshness)), ids=str)
def test_the_worst_wins_in_any_order(order):
    assert worst(*order) is Freshness.UNKNOWN
    assert worst(*(f for f in order if f is not Freshness.UNKNOWN)) is Freshness.AGED
    assert worst(order[0]) is order[0]
