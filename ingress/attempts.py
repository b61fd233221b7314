"""What became of one request's attempts so far."""

from dataclasses import dataclass, field

from nearkv.ingress.breaker import Strike


@dataclass(slots=True)
class Attempts:
    """Failures of one request before the first byte.

    ``unreached`` engines know nothing of it; ``taken`` counts failures of engines that had it,
    ``blamed`` are these; ``strikes`` are what was counted against them and may be taken back;
    ``again`` counts waits for the same engine.
    """

    unreached: int = 0
    taken: int = 0
    again: int = 0
    blamed: set[str] = field(default_factory=set)
    strikes: list[Strike] = field(default_factory=list)
