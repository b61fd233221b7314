"""Token buckets: so much per second, so much at once (pure)."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Holds at most ``burst`` and is filled by ``per_second``; times are in seconds.

    A request larger than the bucket is served from a full one and leaves a debt, so that it
    is not refused for ever.
    """

    per_second: float
    burst: float
    level: float
    at: float

    def take(self, amount: float, now: float) -> float:
        """Take an amount; returns 0, or the seconds to wait where nothing was taken."""
        self.level = min(self.burst, self.level + max(0.0, now - self.at) * self.per_second)
        self.at = max(self.at, now)
        needed = min(amount, self.burst)
        if self.level >= needed:
            self.level -= amount
            return 0.0
        return (needed - self.level) / self.per_second
