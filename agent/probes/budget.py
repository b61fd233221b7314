"""What probes may cost a node (pure; ``now`` in monotonic seconds).

After each probe there is a pause in which what it took is made up for, and only
``BURST_SECONDS`` of such pauses may be put off: two questions that come together are both
answered, and a surprise is looked into at once. So over any time the average is kept but for
these seconds and the last probe. Half of a node's budget is for asking, the other half for
answering.
"""

from dataclasses import dataclass

SIDES = 2
"""Asking and answering."""

BURST_SECONDS = 20.0

PROBE_BYTES = 4 << 20
SMALL_BYTES = 4 << 10
SMALL_PULLS = 3
_MESSAGE_BYTES = 8 << 10


@dataclass(frozen=True, slots=True, order=True)
class ProbeCost:
    """What one probe takes of one node: bytes on the wire, and seconds of a core."""

    size_bytes: int
    cpu_seconds: float


_WIRE_BYTES = int(1.06 * (PROBE_BYTES + SMALL_PULLS * SMALL_BYTES)) + _MESSAGE_BYTES
"""With the headers of packets of 1,500 bytes, and what the agents say to each other."""

_WITHIN_AGENT = ProbeCost(_WIRE_BYTES, 0.005)
"""Measured: 4.2 ms for each side, messages and all (ADR 13)."""

_BY_MOVER = ProbeCost(_WIRE_BYTES, 0.8)
"""Measured: 0.7 s for a mover that loads NIXL, from its start to its end (ADR 13)."""


REFUSAL = ProbeCost(_MESSAGE_BYTES, 0.001)
"""A question that is answered with no."""


def cost_of(backend: str) -> ProbeCost:
    """Return what a probe over a transport is taken to cost."""
    return _WITHIN_AGENT if backend == "tcp" else _BY_MOVER


class Budget:
    """The budget of one side of a node."""

    def __init__(self, *, bytes_per_second: float, cpu_ratio: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._cpu_ratio = cpu_ratio
        self._free_at = float("-inf")

    def wait_seconds(self, now: float) -> float:
        """Return how long until the next probe can be paid for; 0 when it can be now."""
        return max(0.0, self._free_at - BURST_SECONDS - now)

    def take(self, cost: ProbeCost, now: float) -> bool:
        """Pay for a probe; False, and nothing taken, where too much is to be made up for."""
        if self.wait_seconds(now):
            return False
        self._pay(cost, now)
        return True

    def was_refused(self, cost: ProbeCost, now: float) -> None:
        """Pay for a refusal only, in place of the probe that was paid for."""
        self._free_at -= self._pause_seconds(cost)
        self._pay(REFUSAL, now)

    def refuses(self, now: float) -> None:
        """Pay for saying no, beside what is still to be made up for."""
        self._pay(REFUSAL, now)

    def _pay(self, cost: ProbeCost, now: float) -> None:
        self._free_at = max(now, self._free_at) + self._pause_seconds(cost)

    def _pause_seconds(self, cost: ProbeCost) -> float:
        return max(cost.size_bytes / self._bytes_per_second, cost.cpu_seconds / self._cpu_ratio)


def half_of(*, bytes_per_second: float, cpu_ratio: float) -> Budget:
    """Return the budget of one side of a node, of bounds for both."""
    return Budget(bytes_per_second=bytes_per_second / SIDES, cpu_ratio=cpu_ratio / SIDES)
