"""The online parity check (pure): do predicted cache hits come true.

A chat template, tokenizer or hash setting that differs between our view and the engine's
would silently turn every prediction into fiction. So each response that reports
``cached_tokens`` is compared with its prediction; an engine that disagrees too often is
demoted to approximate mode, in which its predicted hits count only as far as they have come
true, until they come true again.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum


class ParityMode(StrEnum):
    """Whether an engine's predicted hits are taken at face value."""

    EXACT = "exact"
    APPROXIMATE = "approximate"


@dataclass(slots=True)
class _Window:
    pairs: deque[tuple[int, int]] = field(default_factory=deque)
    agreed: int = 0
    total: int = 0
    mode: ParityMode = ParityMode.EXACT


class ParityCheck:
    """Compares predicted with reported cached tokens over a sliding window per engine."""

    def __init__(
        self,
        *,
        window_requests: int = 50,
        enough_requests: int = 10,
        demote_below_ratio: float = 0.8,
        promote_above_ratio: float = 0.95,
    ) -> None:
        self._window_requests = window_requests
        self._enough_requests = enough_requests
        self._demote_below_ratio = demote_below_ratio
        self._promote_above_ratio = promote_above_ratio
        self._of: dict[tuple[str, str], _Window] = {}

    def observe(self, engine: str, incarnation: str, *, predicted: int, reported: int) -> bool:
        """Take one response; returns True when the engine's mode changed."""
        window = self._of.setdefault((engine, incarnation), _Window())
        window.pairs.append((predicted, reported))
        window.agreed += predicted == reported
        window.total += 1
        if len(window.pairs) > self._window_requests:
            old_predicted, old_reported = window.pairs.popleft()
            window.agreed -= old_predicted == old_reported
        before = window.mode
        if len(window.pairs) >= self._enough_requests:
            ratio = window.agreed / len(window.pairs)
            if ratio < self._demote_below_ratio:
                window.mode = ParityMode.APPROXIMATE
            elif ratio >= self._promote_above_ratio:
                window.mode = ParityMode.EXACT
        return window.mode is not before

    def mode(self, engine: str, incarnation: str) -> ParityMode:
        """Return an engine's mode; one never heard of is exact."""
        window = self._of.get((engine, incarnation))
        return ParityMode.EXACT if window is None else window.mode

    def trust_ratio(self, engine: str, incarnation: str) -> float:
        """Return the share of a predicted hit to count on: 1 in exact mode."""
        window = self._of.get((engine, incarnation))
        if window is None or window.mode is ParityMode.EXACT:
            return 1.0
        predicted = sum(pair[0] for pair in window.pairs)
        reported = sum(pair[1] for pair in window.pairs)
        return min(1.0, reported / predicted) if predicted else 0.0

    def forget(self, known: set[tuple[str, str]]) -> None:
        """Drop engines and incarnations that are no longer known."""
        self._of = {key: window for key, window in self._of.items() if key in known}
