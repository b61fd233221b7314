"""Which peer to probe next, and when (pure; ``now`` in monotonic seconds).

The class measured longest ago comes first, and in it the peer measured longest ago. Peers whose
last probe differs from those before come before all, so that a change is confirmed soon.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nearkv.agent.probes.peers import Peer

NEVER = float("-inf")
_BUSY_SECONDS = 1.0
_REFUSED_SECONDS = 3.0
_LONGEST_REFUSED_SECONDS = 600.0
_FAILED_SECONDS = 30.0
_LONGEST_FAILED_SECONDS = 1800.0
_MAX_DOUBLINGS = 7
_REFUSED_SHARE = 6
_LONGEST_REFUSED_INTERVALS = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """When a peer's path was last measured, by whatever; ``is_suspect`` asks for another."""

    at: float = NEVER
    is_suspect: bool = False


@dataclass(slots=True)
class _Record:
    not_before: float = NEVER
    in_a_row: int = 0


MeasuredOf = Callable[[str], Measured]


class ProbePlan:
    """The timing of one node's probes. ``spread`` returns random numbers from 0.5 to 1.5."""

    def __init__(
        self, *, interval_seconds: float, fresh_seconds: float, spread: Callable[[], float]
    ) -> None:
        self._interval_seconds = interval_seconds
        self._fresh_seconds = fresh_seconds
        self._spread = spread
        self._records: dict[str, _Record] = {}
        self._refusals_in_a_row = 0

    def first_pause_seconds(self) -> float:
        """Return how long to wait after the start, so that agents started together do not meet."""
        return self._interval_seconds * self._spread()

    def pause_seconds(self, wait_seconds: float, *, suspects: bool) -> float:
        """Return how long until the next look; ``wait_seconds`` is what the budget needs."""
        if suspects:
            return wait_seconds + self._spread()
        return max(wait_seconds, self._interval_seconds) * self._spread()

    def idle_pause_seconds(self, wait_seconds: float, now: float) -> float:
        """Return how long to wait where nobody can be asked now: until one that was put off can."""
        pause = self.pause_seconds(wait_seconds, suspects=False)
        due = [kept.not_before - now for kept in self._records.values() if kept.not_before > now]
        return max(wait_seconds, min([pause, *due]))

    def refused_pause_seconds(self, wait_seconds: float) -> float:
        """Return how long to wait after a refusal, until another peer may be asked.

        The more peers refuse one after the other, the longer: then all of them have enough.
        """
        doubled = (1 << min(self._refusals_in_a_row, _MAX_DOUBLINGS)) / _REFUSED_SHARE
        seconds = self._interval_seconds * min(doubled, _LONGEST_REFUSED_INTERVALS)
        return max(wait_seconds, seconds) * self._spread()

    def busy_pause_seconds(self) -> float:
        """Return how long to wait for a node that moves KV just now."""
        return _BUSY_SECONDS * self._spread()

    def choose(
        self, by_class: Mapping[str, Sequence[Peer]], measured: MeasuredOf, now: float
    ) -> Peer | None:
        """Return the peer to probe now; ``None`` where all is fresh, or nobody can be asked."""
        known = {peer.node for peers in by_class.values() for peer in peers}
        self._records = {node: kept for node, kept in self._records.items() if node in known}
        best: tuple[tuple[bool, float, float, str], Peer] | None = None
        for peers in by_class.values():
            found = [(peer, measured(peer.node)) for peer in peers]
            class_at = max((last.at for _, last in found), default=NEVER)
            for peer, last in found:
                if not self._is_due(peer.node, last, now):
                    continue
                rank = (not last.is_suspect, class_at, last.at, peer.node)
                if best is None or rank < best[0]:
                    best = (rank, peer)
        return None if best is None else best[1]

    def succeeded(self, node: str) -> None:
        """Note that a peer was probed."""
        self._refusals_in_a_row = 0
        self._records.pop(node, None)

    def refused(self, node: str, now: float) -> None:
        """Note that a peer has something better to do; the more often, the later it is asked.

        Else a peer that many ask would be kept busy with saying no.
        """
        self._refusals_in_a_row += 1
        self._put_off(node, now, _REFUSED_SECONDS, _LONGEST_REFUSED_SECONDS)

    def failed(self, node: str, now: float) -> None:
        """Note that a probe failed: such a peer is asked ever more seldom."""
        self._put_off(node, now, _FAILED_SECONDS, _LONGEST_FAILED_SECONDS)

    def _put_off(self, node: str, now: float, seconds: float, longest_seconds: float) -> None:
        record = self._records.setdefault(node, _Record())
        doubled = seconds * (1 << min(record.in_a_row, _MAX_DOUBLINGS))
        record.in_a_row += 1
        record.not_before = now + min(doubled, longest_seconds) * self._spread()

    def _is_due(self, node: str, last: Measured, now: float) -> bool:
        record = self._records.get(node)
        if record is not None and now < record.not_before:
            return False
        return last.is_suspect or now - last.at >= self._fresh_seconds
