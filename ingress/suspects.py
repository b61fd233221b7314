"""Engines that just failed us: left alone for a while, then tried again (pure).

The agent will say within seconds that an engine is gone; until then this keeps requests
from running into it one after another. It is advice, not a ban: when nobody else is left,
a suspect is tried all the same.
"""

from dataclasses import dataclass

_MOST_DOUBLINGS = 30
"""Failures are counted without end; beyond this many the pause is at its longest anyway."""


@dataclass(slots=True)
class _Record:
    failures: int
    until: float


class Suspects:
    """Exponential cool-down by engine and incarnation."""

    def __init__(self, *, cooldown_seconds: float = 2.0, longest_seconds: float = 30.0) -> None:
        self._cooldown_seconds = cooldown_seconds
        self._longest_seconds = longest_seconds
        self._of: dict[tuple[str, str], _Record] = {}

    def failed(self, engine: str, incarnation: str, now: float) -> None:
        """Note a failure before the first byte.

        Failures while the engine is left alone already belong to the same trouble (requests
        that were on their way); they make the pause no longer.
        """
        record = self._of.get((engine, incarnation))
        if record is not None and now < record.until:
            return
        failures = 1 if record is None else record.failures + 1
        doublings = min(failures - 1, _MOST_DOUBLINGS)
        pause = min(self._cooldown_seconds * 2**doublings, self._longest_seconds)
        self._of[engine, incarnation] = _Record(failures, now + pause)

    def succeeded(self, engine: str, incarnation: str) -> None:
        """Note a success: the record is wiped."""
        if self._of:
            self._of.pop((engine, incarnation), None)

    def is_suspect(self, engine: str, incarnation: str, now: float) -> bool:
        """Tell whether an engine is best left alone now."""
        if not self._of:
            return False
        record = self._of.get((engine, incarnation))
        return record is not None and now < record.until

    def forget(self, known: set[tuple[str, str]]) -> None:
        """Drop records of engines and incarnations that are no longer known."""
        self._of = {key: record for key, record in self._of.items() if key in known}
