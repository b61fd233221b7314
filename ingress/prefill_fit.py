"""What computing a prompt takes on each engine, fitted online (pure).

``seconds = fixed + tokens * seconds per token``. The engine's own histograms, by way of its
agent, give the seconds per token of long prefills. What they cannot give, the fixed part of a
request (a step, a hop, the first token), comes from first bytes seen here: a weighted
least-squares line through (tokens computed, seconds), older points fading.

Robust by construction: a line needs enough points and must make sense, else the engine's own
word stands; an engine that is idle, or that restarted, keeps what was last known of it until
it says something new; one that never said anything is taken for an average of its model.
"""

import math
from dataclasses import dataclass

_FADE = 0.05
_ENOUGH_POINTS = 8
_LEAST_SPREAD = 0.05
_MOST_APART = 8.0
"""A line this many times slower or quicker per token than the engine's word is not believed."""
_OUTLIER = 5.0
_MOST_ENGINES = 10_000


@dataclass(frozen=True, slots=True)
class PrefillLine:
    """The time to compute a prompt: fixed seconds, and seconds for each token."""

    fixed_seconds: float
    seconds_per_token: float

    def seconds(self, tokens: float) -> float:
        """Return the time for so many tokens."""
        return self.fixed_seconds + tokens * self.seconds_per_token


@dataclass(slots=True)
class _Sums:
    """Fading sums over the points seen, and the engine's own last word."""

    told: float | None = None
    points: int = 0
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0
    line: PrefillLine | None = None


class PrefillFits:
    """One fit for each engine; an engine's id outlives its restarts."""

    def __init__(self) -> None:
        self._of: dict[str, _Sums] = {}

    def line(self, engine: str, told: float | None, usual: float) -> PrefillLine:
        """Return the present line of an engine.

        ``told`` is what it now says of seconds per token, ``usual`` what others take.
        """
        sums = self._of.get(engine)
        if sums is None:
            if told is None:
                return PrefillLine(0.0, usual)
            sums = self._open(engine)
        line = sums.line
        if line is None or (told != sums.told and told is not None):
            if told is not None:
                sums.told = told
            line = sums.line = _fit(sums)
        return line or PrefillLine(0.0, usual)

    def observe(self, engine: str, tokens: int, seconds: float) -> None:
        """Take the time from dispatch to first byte of a request that had not to wait.

        Points far off the line are cut to a multiple of it: they had other reasons.
        """
        if tokens <= 0 or not 0 < seconds < math.inf:
            return
        sums = self._of.get(engine) or self._open(engine)
        line = sums.line or _fit(sums) if sums.points >= _ENOUGH_POINTS else None
        if line is not None:
            seconds = min(seconds, _OUTLIER * line.seconds(tokens))
        keep = 1.0 - _FADE
        sums.points += 1
        sums.weight = sums.weight * keep + 1.0
        sums.tokens = sums.tokens * keep + tokens
        sums.seconds = sums.seconds * keep + seconds
        sums.tokens_squared = sums.tokens_squared * keep + tokens * tokens
        sums.tokens_seconds = sums.tokens_seconds * keep + tokens * seconds
        sums.line = None

    def points(self, engine: str) -> int:
        """Return how many first bytes an engine's line stands on."""
        sums = self._of.get(engine)
        return 0 if sums is None else sums.points

    def forget(self, known: set[str]) -> None:
        """Drop engines that no longer exist."""
        self._of = {engine: sums for engine, sums in self._of.items() if engine in known}

    def _open(self, engine: str) -> _Sums:
        if len(self._of) >= _MOST_ENGINES:
            self._of.clear()
        return self._of.setdefault(engine, _Sums())


def _fit(sums: _Sums) -> PrefillLine | None:
    """Return the line through the points, or what the engine says; ``None``: nothing is known."""
    told = sums.told
    if sums.points < _ENOUGH_POINTS:
        return None if told is None else PrefillLine(0.0, told)
    mean_tokens, mean_seconds = sums.tokens / sums.weight, sums.seconds / sums.weight
    spread = sums.tokens_squared / sums.weight - mean_tokens**2
    if spread > _LEAST_SPREAD * mean_tokens**2:
        covariance = sums.tokens_seconds / sums.weight - mean_tokens * mean_seconds
        slope = covariance / spread
        fixed = mean_seconds - slope * mean_tokens
        if slope > 0 and fixed >= 0 and _is_near(slope, told):
            return PrefillLine(fixed, slope)
    if told is not None and told * mean_tokens <= mean_seconds:
        return PrefillLine(mean_seconds - told * mean_tokens, told)
    return PrefillLine(0.0, mean_seconds / mean_tokens)


def _is_near(slope: float, told: float | None) -> bool:
    return told is None or told / _MOST_APART <= slope <= told * _MOST_APART
