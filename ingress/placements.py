"""Where requests went lately: each engine's share, and how much new KV it was given (pure).

Counts are halved whenever they have grown by a window, so the last few hundred requests
count most. This replica's own only: others spread theirs by the same rule.
"""

from dataclasses import dataclass

_WINDOW_REQUESTS = 512


@dataclass(slots=True)
class Placed:
    """What an engine was given lately: requests, and the tokens they added."""

    requests: float = 0.0
    new_tokens: float = 0.0


class Placements:
    """Fading counts of requests and of the tokens they added, by engine and incarnation."""

    def __init__(self, *, window_requests: int = _WINDOW_REQUESTS) -> None:
        self._window_requests = window_requests
        self._of: dict[tuple[str, str], Placed] = {}
        self._since_halving = 0

    def note(self, engine: str, incarnation: str, new_tokens: int) -> None:
        """Count a request that an engine was given."""
        placed = self._of.get((engine, incarnation))
        if placed is None:
            placed = self._of[engine, incarnation] = Placed()
        placed.requests += 1.0
        placed.new_tokens += new_tokens
        self._since_halving += 1
        if self._since_halving >= self._window_requests:
            self._since_halving = 0
            for each in self._of.values():
                each.requests /= 2
                each.new_tokens /= 2

    def at(self, engine: str, incarnation: str) -> Placed | None:
        """Return what an engine was given lately; ``None`` where it was given nothing yet."""
        return self._of.get((engine, incarnation))

    def join(self, engine: str, incarnation: str, new_tokens: float) -> Placed:
        """Start counting for an engine as if it had its share, so that nobody runs to it."""
        return self._of.setdefault((engine, incarnation), Placed(0.0, new_tokens))

    def forget(self, known: set[tuple[str, str]]) -> None:
        """Drop engines and incarnations that no longer exist."""
        self._of = {key: placed for key, placed in self._of.items() if key in known}
