"""From a reading that swings to a value worth writing down (pure)."""

from math import exp

STEP_RATIO = 0.05
"""Shares are told in steps of so much."""

_MARGIN_STEPS = 1.0
_SMOOTH_SECONDS = 60.0


class SteadyRatio:
    """A share from 0 to 1, smoothed over a minute and told in steps of 5 %.

    A step is left only when the smoothed share is a whole step away from it, so that noise about
    a boundary shows as nothing, and what is told is never wrong by more than a step for long. What
    is unknown is so at once.
    """

    def __init__(self) -> None:
        self.shown: float | None = None
        self._smoothed = 0.0
        self._at = 0.0

    def take(self, ratio: float | None, now: float) -> float | None:
        """Take a reading; return the share to tell."""
        if ratio is None:
            self.shown = None
            return None
        if self.shown is None:
            self._smoothed = ratio
            self.shown = _nearest_step(ratio)
        else:
            weight = 1.0 - exp(-max(now - self._at, 0.0) / _SMOOTH_SECONDS)
            self._smoothed += weight * (ratio - self._smoothed)
            self._settle()
        self._at = now
        return self.shown

    def adopt(self, shown: float) -> None:
        """Go on from what was told before the agent started, unless that is wrong by now."""
        if self.shown is not None:
            self.shown = shown
            self._settle()

    def _settle(self) -> None:
        shown = self.shown
        if shown is not None and abs(self._smoothed - shown) > _MARGIN_STEPS * STEP_RATIO:
            self.shown = _nearest_step(self._smoothed)


def _nearest_step(ratio: float) -> float:
    return round(round(min(max(ratio, 0.0), 1.0) / STEP_RATIO) * STEP_RATIO, 2)


def round_bytes(ratio: float | None, total_bytes: int | None) -> int | None:
    """Return a share of a size in bytes, unknown where either is."""
    return None if ratio is None or total_bytes is None else round(ratio * total_bytes)


def two_digits(value: float | None) -> float | None:
    """Return a figure to two significant digits: more is noise."""
    return None if value is None else float(f"{value:.2g}")
