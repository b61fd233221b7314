"""Freshness: fresh, aged, unknown; never seen is unknown."""

import pytest

from nearkv.freshness import Freshness, FreshnessLimits

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
