"""Freshness: every datum has an age, and is fresh, aged or unknown.

Missing is never zero: what was never seen has the age ``None`` and is unknown.
"""

from dataclasses import dataclass
from enum import Enum


class Freshness(Enum):
    """How far a datum can be trusted."""

    FRESH = "fresh"
    AGED = "aged"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class FreshnessLimits:
    """Ages in seconds up to which a datum counts as fresh, and after that as aged."""

    fresh_seconds: float = 3.0
    aged_seconds: float = 30.0

    def classify(self, age_seconds: float | None) -> Freshness:
        """Return the freshness of a datum of this age; ``None`` means never seen."""
        if age_seconds is None or age_seconds > self.aged_seconds:
            return Freshness.UNKNOWN
        return Freshness.FRESH if age_seconds <= self.fresh_seconds else Freshness.AGED
