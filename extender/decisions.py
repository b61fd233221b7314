"""The last decisions, kept for ``/v1/explain``: a ring bounded by count and by bytes."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One answer to the scheduler.

    ``at`` is wall-clock time in seconds, for people. ``describe`` makes the document for at
    most so many nodes; it works on what was kept, not on what is known by then.
    """

    pod: str
    uid: str
    verb: str
    at: float
    size_bytes: int
    describe: Callable[[int], Document]


class Decisions:
    """The latest decisions; the oldest go when there are too many, or they take too much."""

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._kept: deque[Decision] = deque()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """What the decisions take, as they say themselves."""
        return self._size_bytes

    def add(self, decision: Decision) -> None:
        """Keep a decision; one that alone is over the bound is not kept."""
        if decision.size_bytes > self._max_bytes or not self._max_count:
            return
        self._kept.append(decision)
        self._size_bytes += decision.size_bytes
        while len(self._kept) > self._max_count or self._size_bytes > self._max_bytes:
            self._size_bytes -= self._kept.popleft().size_bytes

    def latest(self, *, pod: str = "", uid: str = "") -> Iterator[Decision]:
        """Yield the decisions about a pod, by ``namespace/name`` or by UID, latest first."""
        for decision in reversed(self._kept):
            if (pod and decision.pod == pod) or (uid and decision.uid == uid):
                yield decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """What filter rejected: messages by node, apart for what no preemption could mend."""

    nodes: int
    failed: Mapping[str, str]
    unresolvable: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        entries = [*self.failed.items(), *self.unresolvable.items()]
        return 500 + sum(300 + len(name) + len(why) for name, why in entries)

    def describe(self, limit: int) -> Document:
        """Return it as JSON types, with at most ``limit`` nodes."""
        rejected = [
            *({"node": n, "why": why, "resolvable": True} for n, why in self.failed.items()),
            *({"node": n, "why": why, "resolvable": False} for n, why in self.unresolvable.items()),
        ]
        return {
            "nodes": self.nodes,
            "kept": self.nodes - len(rejected),
            "rejected": len(rejected),
            "rejections": rejected[:limit],
        }
