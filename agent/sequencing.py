"""Sequence numbers of one engine's event stream: gaps, repeats and restarts (pure).

vLLM numbers its messages from 0 at every process start and puts no epoch on the wire
(reference/vllm.md 1.6). A publisher never sends a number twice on one stream, so a live
number that does not rise means that the process is a new one.
"""

from dataclasses import dataclass
from enum import Enum


class Arrival(Enum):
    """What a live message turned out to be."""

    IN_ORDER = "in_order"
    FIRST = "first"
    REPEAT = "repeat"
    GAP = "gap"
    RESTART = "restart"


@dataclass(slots=True)
class SequenceTracker:
    """Follows one stream. ``applied`` is the last number applied, live or replayed."""

    applied: int | None = None
    last_live: int | None = None

    def classify(self, seq: int) -> Arrival:
        """Classify a live message without applying it."""
        if self.last_live is not None and seq <= self.last_live:
            return Arrival.RESTART
        if self.applied is None:
            return Arrival.IN_ORDER if seq == 0 else Arrival.FIRST
        if seq <= self.applied:
            # Only a number already covered by a replay; a fall below it with nothing live
            # seen since is told apart by the replay itself, which would have ended lower.
            return Arrival.REPEAT
        return Arrival.IN_ORDER if seq == self.applied + 1 else Arrival.GAP

    def saw_live(self, seq: int) -> None:
        """Note the number of a live message, whatever became of it."""
        self.last_live = seq

    def advance(self, seq: int) -> None:
        """Note that everything up to ``seq`` is applied."""
        self.applied = seq if self.applied is None else max(self.applied, seq)

    def restart(self) -> None:
        """Forget the stream: the next message may carry any number."""
        self.applied = None
        self.last_live = None

    @property
    def next_wanted(self) -> int:
        """The number to ask a replay from."""
        return 0 if self.applied is None else self.applied + 1
