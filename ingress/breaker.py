"""The circuit breaker of one engine (pure).

Closed: requests go. Open: none go for a while. Half open: one goes as a trial, and how it ends
decides. It opens by failures in a row of different requests, by the share of failures over a
window, or at once where the engine could not even be reached; each time in a row for longer,
up to a bound.

A failure can be taken back: a request that fails on one engine after the other is at fault
itself.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

_OUTCOMES_KEPT = 256
"""How many of the last outcomes the share is taken over, at most."""
_MOST_DOUBLINGS = 30


class BreakerState(StrEnum):
    """What a breaker lets through: everything, nothing, or one trial."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When a breaker opens, and for how long.

    ``failures`` in a row, or ``failure_ratio`` of at least ``window_requests`` within
    ``window_seconds``. A trial that is not heard of for ``trial_seconds`` makes way for another.
    """

    failures: int = 3
    failure_ratio: float = 0.5
    window_seconds: float = 10.0
    window_requests: int = 10
    open_seconds: float = 2.0
    longest_seconds: float = 30.0
    trial_seconds: float = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Strike:
    """One failure that was counted; ``opened`` says that it opened the breaker, ``was`` from."""

    breaker: "Breaker"
    at: float
    opened: bool
    was: BreakerState


@dataclass(slots=True)
class Breaker:
    """One engine's breaker; times are seconds of any one clock."""

    rules: BreakerRules
    in_a_row: int = 0
    openings: int = 0
    """How often it opened without having been well in between."""
    until: float | None = None
    """End of the pause while open; ``None`` while closed."""
    trial_until: float | None = None
    closed_at: float = 0.0
    failed_at: float = 0.0
    outcomes: deque[tuple[float, bool]] = field(
        default_factory=lambda: deque(maxlen=_OUTCOMES_KEPT)
    )

    def state_at(self, now: float) -> BreakerState:
        """Return the state: the end of a pause needs no event."""
        if self.until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.until else BreakerState.HALF_OPEN

    def blocks(self, now: float) -> bool:
        """Tell whether a request should go elsewhere: open, or on trial already."""
        if self.until is None:
            return False
        return now < self.until or self.has_trial(now)

    def has_trial(self, now: float) -> bool:
        """Tell whether a trial is under way."""
        return self.trial_until is not None and now < self.trial_until

    def begin(self, now: float) -> bool:
        """Note that a request is sent; returns whether it is a trial.

        It is one while open, too: then there was nobody else to send it to.
        """
        if self.until is None or self.has_trial(now):
            return False
        self.trial_until = now + self.rules.trial_seconds
        return True

    def end_trial(self) -> None:
        """Note that a trial ended and said nothing, as where its client left."""
        self.trial_until = None

    def failed(self, now: float, *, reached: bool, stretch: float) -> Strike:
        """Note a failure; ``stretch`` is the jitter of a pause, about 1.

        ``reached`` says that the engine had taken the request. Failures while it is open belong
        to the same trouble, unless they are a trial's; they make the pause no longer.
        """
        was = self.state_at(now)
        on_trial = self.has_trial(now)
        self.in_a_row += 1
        self.failed_at = now
        self.outcomes.append((now, False))
        self.trial_until = None
        opens = was is BreakerState.HALF_OPEN or (was is BreakerState.OPEN and on_trial)
        if was is BreakerState.CLOSED:
            opens = not reached or self._is_too_much(now)
        if opens:
            self._open(now, stretch)
        return Strike(self, now, opens, was)

    def succeeded(self, now: float) -> bool:
        """Note a success; returns whether it closed the breaker.

        Successes of requests sent before it opened close nothing: an engine that fails every
        second request has them, too.
        """
        if self.until is not None and now < self.until and not self.has_trial(now):
            return False
        self.in_a_row = 0
        if self.until is None:
            self.outcomes.append((now, True))
            return False
        self._close(now)
        self.outcomes.clear()
        return True

    def is_well(self, now: float) -> bool:
        """Tell whether there is nothing left to remember."""
        if self.until is not None or self.in_a_row:
            return False
        return now - max(self.failed_at, self.closed_at) > self.rules.longest_seconds

    def retract(self, strike: Strike) -> None:
        """Take a failure back."""
        self.in_a_row = max(0, self.in_a_row - 1)
        if (strike.at, False) in self.outcomes:
            self.outcomes.remove((strike.at, False))
        if not strike.opened or self.until is None:
            return
        self.openings = max(0, self.openings - 1)
        if strike.was is not BreakerState.CLOSED:
            self.until = strike.at  # half open again
        elif self.in_a_row < self.rules.failures:  # or others' failures keep it open
            self._close(strike.at)

    def _open(self, now: float, stretch: float) -> None:
        if self.until is None and now - self.closed_at > self.rules.longest_seconds:
            self.openings = 0  # it was well for long
        doublings = min(self.openings, _MOST_DOUBLINGS)
        self.openings += 1
        pause = self.rules.open_seconds * 2**doublings * stretch
        self.until = now + min(pause, self.rules.longest_seconds)

    def _close(self, now: float) -> None:
        self.until = None
        self.trial_until = None
        self.closed_at = now

    def _is_too_much(self, now: float) -> bool:
        if self.in_a_row >= self.rules.failures:
            return True
        since = now - self.rules.window_seconds
        recent = [good for at, good in self.outcomes if at >= since]
        if len(recent) < self.rules.window_requests:
            return False
        return recent.count(False) >= self.rules.failure_ratio * len(recent)
