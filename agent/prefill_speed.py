"""How long an engine's prefill of one token takes, from its own counters (pure).

Sums over the requests that finished between two scrapes are weighed by their tokens, older
ones fading. Scrapes whose requests computed next to nothing each are left out: they were
cache hits or got their KV from elsewhere, and a step's fixed cost says nothing about tokens.
"""

from nearkv.agent.engine_metrics import RankReading

_KEEP = 0.9
"""The weight that what is known keeps at each new scrape that says something."""
_ENOUGH_TOKENS_EACH = 64


class PrefillSpeed:
    """A fading, token-weighted mean of seconds per computed prompt token."""

    def __init__(self) -> None:
        self._last: tuple[float, float, float] | None = None
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """The present estimate; ``None`` before the first prefill of some length."""
        return self._seconds / self._tokens if self._tokens and self._seconds > 0 else None

    def observe(self, reading: RankReading) -> None:
        """Take a scrape; the first one, and one after a restart, only set the start."""
        sums = _sums(reading)
        if sums is None:
            return
        last, self._last = self._last, sums
        if last is None:
            return
        requests, seconds, tokens = (now - then for now, then in zip(sums, last, strict=True))
        if requests <= 0 or seconds <= 0 or tokens < requests * _ENOUGH_TOKENS_EACH:
            return
        self._seconds = self._seconds * _KEEP + seconds
        self._tokens = self._tokens * _KEEP + tokens


def _sums(reading: RankReading) -> tuple[float, float, float] | None:
    """Return requests, seconds and tokens so far.

    Engines that do not count computed tokens by request have a counter of all of them.
    """
    tokens = reading.prefill_computed_tokens
    if tokens is None:
        tokens = reading.computed_tokens
    if reading.prefills is None or reading.prefill_seconds is None or tokens is None:
        return None
    return reading.prefills, reading.prefill_seconds, tokens
