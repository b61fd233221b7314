"""What moving KV to this node costs, by the node it comes from (pure).

For each source node and path one model learns from finished pulls, and probes fill in where
there were none; of the two, the one with the newer measurement counts. What is published of a
pair is the path last used, at most once a second. ``now`` is in monotonic seconds.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from nearkv.agent.probes.by_class import MeasuredCost
from nearkv.agent.probes.peers import Peer
from nearkv.agent.probes.planning import NEVER, Measured
from nearkv.agent.probes.readings import ProbeReading, ProbeReadings, ratio_between
from nearkv.agent.settings import PathPriorSettings
from nearkv.agent.transfer.memory_forms import WITHIN_NODE
from nearkv.path_cost import PathCost, PathCostModel
from nearkv.state.model import PathReading
from nearkv.transfer.backends.contract import Path

_MAX_PAIRS = 1024
_MAX_PATHS = 8
_PUBLISH_SECONDS = 1.0
_SHIFT_RATIO = 1.5
_SHIFT_PULLS = 5
"""So many pulls in a row that took so much longer, or less, than foretold: the path is another."""

_PROBES_TO_OUTDATE = 2

PULLS, PROBES = "pulls", "probes"
"""What a cost was measured by."""


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
class _Strays:
    """The last pulls that took otherwise than foretold, all of them longer or all less."""

    longer: bool = True
    pulls: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class _Pair:
    path: Path
    agent: str = ""
    models: dict[str, PathCostModel] = field(default_factory=dict)
    strays: dict[str, _Strays] = field(default_factory=dict)
    probed: dict[str, ProbeReadings] = field(default_factory=dict)
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

    def succeeded(
        self, source: str, path: Path, *, size_bytes: int, now: float, agent: str = ""
    ) -> None:
        """Note a pull that counts, what it went over, and whom ``agent`` (a URL) was asked."""
        pair = self._pair(source, path)
        pair.agent = agent or pair.agent
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
        shifted = _shifted(pair.strays, path.name, model, size_bytes, seconds)
        if shifted:
            model = pair.models[path.name] = PathCostModel(self._priors.of(path))
            for its_bytes, its_seconds in shifted:
                model.observe(its_bytes, its_seconds, now=now)
        else:
            model.observe(size_bytes, seconds, now=now)
        pair.dirty = True

    def probed(self, source: str, path: Path, reading: ProbeReading) -> None:
        """Learn from a probe; where pulls went over another path, theirs is still the pair's."""
        pair = self._pair(source, path)
        if pair.used_at is None:
            pair.path = path
        if path.name not in pair.probed and len(pair.probed) >= _MAX_PATHS:
            pair.probed.clear()
        readings = pair.probed.setdefault(path.name, ProbeReadings())
        model = pair.models.get(path.name)
        if model is not None and _refutes(model, readings):
            readings.clear()
        readings.add(reading)
        if model is not None and _outdates(readings, model):
            # Pulls that come now would be averaged with those of a path that is no more.
            del pair.models[path.name]
        pair.dirty = True

    def last_measured(self, source: str) -> Measured:
        """Return when a pair was last measured.

        That pulls took another way than probes do is no reason to probe it over and over.
        """
        pair = self._pairs.get(source)
        if pair is None:
            return Measured()
        measured = self._measured(source, pair)
        times = [readings.at for readings in pair.probed.values() if readings.at is not None]
        if measured is not None:
            times.append(measured.at)
        readings = pair.probed.get(pair.path.name)
        by_probes = measured is not None and measured.by == PROBES
        return Measured(
            at=max(times, default=NEVER),
            is_suspect=by_probes and readings is not None and readings.is_suspect,
        )

    def all_measured(self) -> list[MeasuredCost]:
        """Return what was measured of the paths in use."""
        found = (self._measured(source, pair) for source, pair in self._pairs.items())
        return [measured for measured in found if measured is not None]

    def pulled_from(self) -> list[Peer]:
        """Return the agents of the nodes that KV came from."""
        return [Peer(node, pair.agent) for node, pair in self._pairs.items() if pair.agent]

    def take_news(self, now: float) -> list[PathReading]:
        """Return what is to be published now."""
        news = []
        for source, pair in self._pairs.items():
            due = pair.published_at is None or now - pair.published_at >= _PUBLISH_SECONDS
            if pair.dirty and due:
                pair.dirty = False
                pair.published_at = now
                news.append(self._reading(source, pair, now))
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
        reading = self._reading(source, pair, now)
        measured = self._measured(source, pair)
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
            "measured_by": None if measured is None else measured.by,
            "measurements": reading.points,
            "measured_age_seconds": None if measured is None else round(now - measured.at, 3),
            "age_seconds": None if pair.used_at is None else round(now - pair.used_at, 3),
        }

    def _reading(self, source: str, pair: _Pair, now: float) -> PathReading:
        measured = self._measured(source, pair)
        cost = self._priors.of(pair.path) if measured is None else measured.cost
        return PathReading(
            source=source,
            target=self._node,
            path=pair.path.name,
            setup_seconds=cost.setup_seconds,
            bytes_per_second=cost.bytes_per_second,
            points=0 if measured is None else measured.count,
            age_seconds=0.0 if measured is None else max(now - measured.at, 0.0),
        )

    def _measured(self, source: str, pair: _Pair) -> MeasuredCost | None:
        """Return what was measured of the path in use, by pulls or probes, whichever is newer."""
        name = pair.path.name
        model, readings = pair.models.get(name), pair.probed.get(name)
        pulled_at = model.observed_at if model is not None and model.is_measured else None
        probed_at = None if readings is None else readings.at
        if (
            model is not None
            and pulled_at is not None
            and (probed_at is None or pulled_at >= probed_at)
        ):
            return MeasuredCost(source, name, model.cost, model.points, pulled_at, PULLS)
        cost = None if readings is None else readings.cost
        if readings is None or cost is None or probed_at is None:
            return None
        return MeasuredCost(source, name, cost, len(readings), probed_at, PROBES)

    def _pair(self, source: str, path: Path) -> _Pair:
        pair = self._pairs.get(source)
        if pair is None:
            pair = self._pairs[source] = _Pair(path)
        self._pairs.move_to_end(source)
        while len(self._pairs) > self._max_pairs:
            # Pairs with a pull under way are used again when it ends.
            self._dropped.append(self._pairs.popitem(last=False)[0])
        return pair


def _shifted(
    strays: dict[str, _Strays], name: str, model: PathCostModel, size_bytes: int, seconds: float
) -> list[tuple[int, float]]:
    """Note how a pull compares with what was foretold; returns those that say it is another path.

    Alone, the model would need dozens of pulls to follow a link that has changed.
    """
    if not model.is_measured or size_bytes <= 0 or not 0 < seconds < float("inf"):
        return []
    foretold = model.cost.seconds(size_bytes)
    if ratio_between(seconds, foretold) <= _SHIFT_RATIO:
        strays.pop(name, None)
        return []
    longer = seconds > foretold
    kept = strays.get(name)
    if kept is None or kept.longer != longer:
        kept = strays[name] = _Strays(longer)
    kept.pulls.append((size_bytes, seconds))
    return strays.pop(name).pulls if len(kept.pulls) >= _SHIFT_PULLS else []


def _outdates(readings: ProbeReadings, model: PathCostModel) -> bool:
    """Tell whether probes agree with each other, but not with the pulls before them."""
    cost = readings.cost
    if cost is None or len(readings) < _PROBES_TO_OUTDATE or readings.is_suspect:
        return False
    return ratio_between(cost.bytes_per_second, model.cost.bytes_per_second) > _SHIFT_RATIO


def _refutes(model: PathCostModel, readings: ProbeReadings) -> bool:
    """Tell whether pulls after the last probe found another path than it did."""
    cost, probed_at = readings.cost, readings.at
    if not model.is_measured or cost is None or probed_at is None:
        return False
    is_newer = model.observed_at is not None and model.observed_at > probed_at
    ratio = ratio_between(cost.bytes_per_second, model.cost.bytes_per_second)
    return is_newer and ratio > _SHIFT_RATIO
