"""Path cost: what moving bytes from here to there takes, learnt from transfers (pure).

Each transfer gives one point (bytes, seconds). A weighted least-squares line through them,
old points fading, gives the set-up time (its height) and the bandwidth (its slope). Before
there are enough points, and wherever the line makes no sense, the prior stands in: the cost
that labels suggest.
"""

from dataclasses import dataclass

_ENOUGH_POINTS = 5
_LEAST_SPREAD = 1e-6


@dataclass(frozen=True, slots=True)
class PathCost:
    """A predicted cost: seconds of set-up, and bytes per second after that."""

    setup_seconds: float
    bytes_per_second: float

    def seconds(self, size_bytes: float) -> float:
        """Return the predicted time for a transfer."""
        return self.setup_seconds + size_bytes / self.bytes_per_second


class PathCostModel:
    """Learns the cost of one path; ``fade`` is the weight that each newer point takes away."""

    def __init__(self, prior: PathCost, *, fade: float = 0.05) -> None:
        if not 0 < fade < 1:
            raise ValueError("fade must be between 0 and 1")
        self._prior = prior
        self._keep = 1.0 - fade
        self._weight = 0.0
        self._bytes = 0.0
        self._seconds = 0.0
        self._bytes_squared = 0.0
        self._bytes_seconds = 0.0
        self.points = 0
        self.observed_at: float | None = None

    def observe(self, size_bytes: int, seconds: float, *, now: float) -> None:
        """Take a finished transfer; points that cannot be are passed over."""
        if size_bytes <= 0 or not 0 < seconds < float("inf"):
            return
        keep = self._keep
        self._weight = self._weight * keep + 1.0
        self._bytes = self._bytes * keep + size_bytes
        self._seconds = self._seconds * keep + seconds
        self._bytes_squared = self._bytes_squared * keep + size_bytes * size_bytes
        self._bytes_seconds = self._bytes_seconds * keep + size_bytes * seconds
        self.points += 1
        self.observed_at = now

    @property
    def is_measured(self) -> bool:
        """Tell whether there are enough points to go by."""
        return self.points >= _ENOUGH_POINTS

    @property
    def cost(self) -> PathCost:
        """The present estimate."""
        if not self.is_measured:
            return self._prior
        mean_bytes = self._bytes / self._weight
        mean_seconds = self._seconds / self._weight
        spread = self._bytes_squared / self._weight - mean_bytes**2
        if spread > _LEAST_SPREAD * mean_bytes**2:
            slope = (self._bytes_seconds / self._weight - mean_bytes * mean_seconds) / spread
            setup = mean_seconds - slope * mean_bytes
            if slope > 0 and setup >= 0:
                return PathCost(setup, 1.0 / slope)
        return self._through_the_mean(mean_bytes, mean_seconds)

    def _through_the_mean(self, mean_bytes: float, mean_seconds: float) -> PathCost:
        """Fit the bandwidth alone, where all transfers were about as large.

        The prior's set-up is kept as far as the transfers leave room for it.
        """
        setup = min(self._prior.setup_seconds, mean_seconds / 2)
        return PathCost(setup, mean_bytes / (mean_seconds - setup))
