"""What one rank counts; plain numbers so that a request costs little, rendered on scrape."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

# fmt: off
_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
# fmt: on


class Distribution:
    """A histogram: counts per bucket and a sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a bucket's bound belongs to the bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def token_bounds(limit: int) -> list[float]:
    """Return 1, 2, 5, 10, ... up to ``limit``, vLLM's buckets for token counts."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > limit:
                return bounds
            bounds.append(float(step * scale))
        scale *= 10


def _request_seconds() -> Distribution:
    return Distribution(_REQUEST_SECONDS)


def _first_token_seconds() -> Distribution:
    return Distribution(_FIRST_TOKEN_SECONDS)


@dataclass(slots=True)
class RankStatistics:
    """Counters, gauges and histograms of one rank since its start; times in seconds."""

    context_tokens: int
    started_at: float
    waiting: int = 0
    running: int = 0
    queries_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    transferred_tokens: int = 0
    external_queries_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
    )
    first_token: Distribution = field(default_factory=_first_token_seconds)
    end_to_end: Distribution = field(default_factory=_request_seconds)
    queue: Distribution = field(default_factory=_request_seconds)
    inference: Distribution = field(default_factory=_request_seconds)
    prefill: Distribution = field(default_factory=_request_seconds)
    decode: Distribution = field(default_factory=_request_seconds)
    prompt_tokens: Distribution = field(init=False)
    generation_tokens: Distribution = field(init=False)
    computed_per_request: Distribution = field(init=False)

    def __post_init__(self) -> None:
        bounds = token_bounds(self.context_tokens)
        self.prompt_tokens = Distribution(bounds)
        self.generation_tokens = Distribution(bounds)
        self.computed_per_request = Distribution(bounds)

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens of all requests, from whatever source."""
        return self.cached_tokens + self.computed_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed here."""
        return self.device_hit_tokens + self.host_hit_tokens + self.transferred_tokens
