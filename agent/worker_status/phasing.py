"""The moments at which one node of many writes (pure).

Each node has a moment of its own in a period that all share, by a hash of its name and the time of
day. So nodes that have something to say at the same time do not say it at the same time, and a
second has no more writes than there are nodes whose moment it is: 5,000 nodes are 25 for each
second of 200, and rarely 40. Random delays add up the same on average, but draw anew each time.
"""

import hashlib
from dataclasses import dataclass
from math import ceil, isfinite


@dataclass(frozen=True, slots=True)
class Phase:
    """Moments ``period_seconds`` apart, of which ``at`` is one; a period of 0 is every moment."""

    at: float
    period_seconds: float

    def next_at(self, moment: float) -> float:
        """Return the first of the moments that is not before another one."""
        if not self.period_seconds or not isfinite(moment):
            return moment
        periods = ceil((moment - self.at) / self.period_seconds)
        return self.at + periods * self.period_seconds


def phase_of(node: str, *, period_seconds: float, now: float, time_of_day: float) -> Phase:
    """Return a node's phase in terms of ``now``, a monotonic clock.

    The time of day is what nodes have in common. Where it is wrong, or is set later, that node's
    moment is another one, and no harm is done.
    """
    digest = hashlib.blake2b(node.encode(), digest_size=8).digest()
    moment = int.from_bytes(digest) / (1 << 64) * period_seconds
    since_seconds = (time_of_day - moment) % period_seconds if period_seconds else 0.0
    return Phase(now - since_seconds, period_seconds)
