"""When a wait for a first byte is long enough to try another engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PatienceRules:
    """Limits: ``unreachable_seconds`` by the agent's word; a first token later than predicted.

    The latter is ``least_seconds`` plus ``factor`` times the prediction.
    """

    unreachable_seconds: float = 10.0
    least_seconds: float = 30.0
    factor: float = 10.0
