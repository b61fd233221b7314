"""What moving KV to this node costs, by the node it comes from (pure).

For each source node and path one model learns from finished pulls; what is published of a
pair is the path last used, at most once a second. ``now`` is in monotonic seconds.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from nearkv.agent.settings import PathPriorSettings
from nearkv.agent.transfer.memory_forms import WITHIN_NODE
from nearkv.path_cost import PathCost, PathCostModel
from nearkv.state.model import PathReading
from nearkv.transfer.backends.contract import Path

_MAX_PAIRS = 1024
_MAX_PATHS = 8
_PUBLISH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PathPriors:
    """What is assumed of a path before it was measured, by its class."""

    same_node: PathCost
    rdma: PathCost
    tcp: PathCost

    def of(self, path: Path) -> PathCost:
        """Return the prior of a path."""
        if path.name in WITHIN_NODE:
            return self.same_node
        return self.rdma if path.rdma else self.tcp


def path_priors(settings: PathPriorSettings) -> PathPriors:
    """Return the priors that the settings give."""
    return PathPriors(
        same_node=PathCost(settings.same_node_setup_seconds, settings.same_node_bytes_per_second),
        rdma=PathCost(settings.rdma_setup_seconds, settings.rdma_bytes_per_second),
        tcp=PathCost(settings.tcp_setup_seconds, settings.tcp_bytes_per_second),
    )


@dataclass(slots=True)
class _Pair:
    path: Path
    models: dict[str, PathCostModel] = field(default_factory=dict)
    used_at: float | None = None
    published_at: float | None = None
    dirty: bool = True
    bytes_total: int = 0
    pulls: int = 0
    inflight: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class PathCosts:
    """The costs of all pairs that end at this node."""

    def __init__(self, node: str, priors: PathPriors, *, max_pairs: int = _MAX_PAIRS) -> None:
        self._node = node
        self._priors = priors
        self._max_pairs = max_pairs
        self._pairs: OrderedDict[str, _Pair] = OrderedDict()
        self._dropped: list[str] = []

    def expect(self, source: str, path: Path) -> None:
        """Note that pulls from a node may come, over a path; what is known of it stays."""
        if source not in self._pairs:
            self._pair(source, path)

    def began(self, source: str, path: Path) -> None:
        """Note that a pull began."""
        self._pair(source, path).inflight += 1

    def ended(self, source: str, reason: str = "") -> None:
        """Note that a pull ended, and why it failed if it did."""
        pair = self._pairs.get(source)
        if pair is not None:
            pair.inflight = max(0, pair.inflight - 1)
            if reason:
                pair.failures[reason] += 1

    def succeeded(self, source: str, path: Path, *, size_bytes: int, now: float) -> None:
        """Note a pull that counts, and what it went over."""
        pair = self._pair(source, path)
        pair.dirty |= pair.path != path
        pair.path = path
        pair.used_at = now
        pair.pulls += 1
        pair.bytes_total += size_bytes

    def measured(
        self, source: str, path: Path, size_bytes: int, seconds: float, *, now: float
    ) -> None:
        """Learn from the time that a pull took, set-up and all."""
        pair = self._pair(source, path)
        model = pair.models.get(path.name)
        if model is None:
            if len(pair.models) >= _MAX_PATHS:
                pair.models.clear()
            model = pair.models[path.name] = PathCostModel(self._priors.of(path))
        model.observe(size_bytes, seconds, now=now)
        pair.dirty = True

    def take_news(self, now: float) -> list[PathReading]:
        """Return what is to be published now."""
        news = []
        for source, pair in self._pairs.items():
            due = pair.published_at is None or now - pair.published_at >= _PUBLISH_SECONDS
            if pair.dirty and due:
                pair.dirty = False
                pair.published_at = now
                news.append(self._reading(source, pair))
        return news

    def take_dropped(self) -> list[str]:
        """Return the source nodes that were forgotten for want of room."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def without_rdma(self) -> list[tuple[str, str]]:
        """Return the other nodes that KV came from without RDMA, with the path's name."""
        return [
            (source, pair.path.name)
            for source, pair in self._pairs.items()
            if pair.used_at is not None and pair.path.name not in WITHIN_NODE and not pair.path.rdma
        ]

    def describe(self, now: float) -> list[dict[str, Any]]:
        """Return all pairs as plain JSON types."""
        return [self._describe(source, pair, now) for source, pair in sorted(self._pairs.items())]

    def _describe(self, source: str, pair: _Pair, now: float) -> dict[str, Any]:
        reading = self._reading(source, pair)
        return {
            "source": source,
            "target": self._node,
            "path": pair.path.name,
            "rdma": pair.path.rdma,
            "detail": pair.path.detail,
            "pulls": pair.pulls,
            "bytes": pair.bytes_total,
            "in_flight": pair.inflight,
            "failures": dict(pair.failures),
            "setup_seconds": reading.setup_seconds,
            "bytes_per_second": reading.bytes_per_second,
            "measured": bool(reading.points),
            "age_seconds": None if pair.used_at is None else round(now - pair.used_at, 3),
        }

    def _reading(self, source: str, pair: _Pair) -> PathReading:
        model = pair.models.get(pair.path.name)
        cost = self._priors.of(pair.path) if model is None else model.cost
        return PathReading(
            source=source,
            target=self._node,
            path=pair.path.name,
            setup_seconds=cost.setup_seconds,
            bytes_per_second=cost.bytes_per_second,
            points=model.points if model is not None and model.is_measured else 0,
        )

    def _pair(self, source: str, path: Path) -> _Pair:
        pair = self._pairs.get(source)
        if pair is None:
            pair = self._pairs[source] = _Pair(path)
        self._pairs.move_to_end(source)
        while len(self._pairs) > self._max_pairs:
            # Pairs with a pull under way are used again when it ends.
            self._dropped.append(self._pairs.popitem(last=False)[0])
        return pair
