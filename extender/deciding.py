"""Decisions for the scheduler: which nodes cannot work for a pod, and how good the others are.

Filter keeps no state, since scheduling is simulated and repeated. Prioritize writes down where
the pod will probably land, in the ledger; nothing else outlives a call but results that are kept
because what they were made from has not changed.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from nearkv.extender.distance import DistanceConfig, PlaceTable
from nearkv.extender.explaining import Decided, DecisionRecord, record_of
from nearkv.extender.fetching import FetchTimes, fetch_times
from nearkv.extender.headroom import Candidates, DeviceRoom, HeadroomConfig, Readings, device_room
from nearkv.extender.ledger import MOST_SHARES, Ledger
from nearkv.extender.model import Floats, GroupFacts, Ints, PodAsk, Role, Snapshot
from nearkv.extender.scoring import Deal, ScoreConfig, Scores, best_of, score

_MOST_KEPT_TIMES = 64

FOREIGN_MEMORY = "too few GPUs that are not in use by processes outside of Kubernetes"
FAILED_HARDWARE = "too few GPUs that have not failed"
"""Without numbers or names, since the scheduler adds up nodes with equal reasons."""


@dataclass(frozen=True, slots=True, eq=False)
class FilterDecision:
    """Nodes that may work, and those that cannot, each with its reason.

    ``kept`` is in the order of the question. Preemption may try ``failed`` nodes; nothing that
    the scheduler could do helps with ``unresolvable`` ones.
    """

    kept: list[str]
    failed: dict[str, str]
    unresolvable: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class PriorityDecision:
    """A score for each node, in the order of the question (``scores[i]`` is for ``nodes[i]``).

    ``record`` explains it; it is ``None`` for pods that are not ours.
    """

    nodes: list[str]
    scores: Ints
    record: DecisionRecord | None


class Scorer:
    """Decides for one extender; calls must not overlap.

    ``record_nodes`` is how many nodes a decision's record keeps.
    """

    def __init__(
        self,
        distance: DistanceConfig,
        headroom: HeadroomConfig,
        scoring: ScoreConfig,
        ledger: Ledger,
        *,
        record_nodes: int = 1000,
    ) -> None:
        self._distance = distance
        self._headroom = headroom
        self._scoring = scoring
        self._ledger = ledger
        self._record_nodes = record_nodes
        self._times = _KeptTimes(distance)
        self._readings = _KeptReadings()
        self._rows = _KeptRows()

    def filter(
        self, ask: PodAsk, nodes: list[str], snapshot: Snapshot, now: float
    ) -> FilterDecision:
        """Return which nodes can work for the pod; ``now`` is monotonic seconds.

        Only fresh facts that time does not change make a node fail; what is not known never does.
        """
        if not ask.group or ask.devices <= 0 or not nodes:
            return FilterDecision(nodes, {}, {})
        rows = self._rows.get(snapshot, nodes)
        nothing_taken = np.zeros(len(snapshot.names) + 1)
        room = self._room(ask, snapshot, rows, nothing_taken, now)
        if not room.rejects.any():
            return FilterDecision(nodes, {}, {})
        unresolvable = np.flatnonzero(room.unresolvable)
        failed = np.flatnonzero(room.rejects & ~room.unresolvable)
        kept = np.flatnonzero(~room.rejects)
        return FilterDecision(
            kept=[nodes[index] for index in kept.tolist()],
            failed={nodes[index]: FOREIGN_MEMORY for index in failed.tolist()},
            unresolvable={nodes[index]: FAILED_HARDWARE for index in unresolvable.tolist()},
        )

    def prioritize(
        self, ask: PodAsk, nodes: list[str], snapshot: Snapshot, now: float
    ) -> PriorityDecision:
        """Score the nodes for the pod; ``now`` is monotonic seconds.

        The pod is then expected on the best of them. Asking again for the same pod answers as if
        it had not been asked before.
        """
        single = _is_one_node(nodes)
        if not ask.group or not nodes:
            neutral = self._scoring.highest if single else self._scoring.highest // 2
            return PriorityDecision(nodes, np.full(len(nodes), neutral, np.int32), None)
        rows = self._rows.get(snapshot, nodes)
        uid = ask.uid or f"{ask.namespace}/{ask.name}"
        self._ledger.forget(uid)
        expected = self._ledger.expected(snapshot, now)
        fetch = self._times.get(snapshot, ask, now)
        room = self._room(ask, snapshot, rows, expected.devices, now)
        in_burst = len(self._ledger) > 0
        scores = score(
            fetch,
            room,
            rows,
            self._scoring,
            single=single,
            deal=Deal(seed=_seed(uid), crowd=expected.pods) if in_burst else None,
        )
        self._ledger.expect(uid, _best(nodes, scores), ask.devices, now)
        decided = Decided(
            ask=ask,
            nodes=nodes,
            rows=rows,
            snapshot=snapshot,
            fetch=fetch,
            room=room,
            scores=scores,
            now=now,
        )
        record = record_of(decided, self._distance, most_nodes=self._record_nodes)
        return PriorityDecision(nodes, scores.values, record)

    def _room(
        self, ask: PodAsk, snapshot: Snapshot, rows: Ints, taken: Floats, now: float
    ) -> DeviceRoom:
        readings = self._readings.get(snapshot, ask.memory_ratio)
        candidates = Candidates(rows, taken, readings)
        return device_room(snapshot, ask, candidates, now, self._headroom)


def _best(nodes: list[str], scores: Scores) -> list[str]:
    """Return the nodes that scored best; one more than the ledger writes down is enough."""
    best = np.flatnonzero(best_of(scores.values))[: MOST_SHARES + 1]
    return [nodes[index] for index in best.tolist()]


def _is_one_node(nodes: list[str]) -> bool:
    return bool(nodes) and all(node == nodes[0] for node in nodes)


def _seed(uid: str) -> int:
    """Return a number that every replica makes of this pod."""
    return xxhash.xxh3_64_intdigest(uid.encode(errors="surrogatepass"))


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Fetch times, with what they were made from."""

    facts: GroupFacts
    links: Mapping[int, Any]
    pairs: Mapping[tuple[int, int], Any]
    places: PlaceTable
    times: FetchTimes

    def holds(self, snapshot: Snapshot, facts: GroupFacts, places: PlaceTable, now: float) -> bool:
        return (
            self.facts is facts
            and self.places is places
            and self.times.computed_at <= now <= self.times.valid_until
            and (self.links is snapshot.links or self.links == snapshot.links)
            and (self.pairs is snapshot.pairs or self.pairs == snapshot.pairs)
        )


class _KeptTimes:
    """The last fetch times by group, role and prefix, and the places of the last snapshot.

    Snapshots share what has not changed, so most new ones leave both as they are.
    """

    def __init__(self, config: DistanceConfig) -> None:
        self._config = config
        self._labels: Ints | None = None
        self._rdma: Any = None
        self._places: PlaceTable | None = None
        self._kept: OrderedDict[tuple[str, Role, int | None], _Kept] = OrderedDict()

    def get(self, snapshot: Snapshot, ask: PodAsk, now: float) -> FetchTimes:
        """Return fetch times, anew where anything that they rest on has changed."""
        facts = snapshot.groups.get(ask.group)
        if facts is None:
            return fetch_times(snapshot, ask, self._config, now)
        places = self._places_of(snapshot)
        key = (ask.group, ask.role, ask.prefix_tokens)
        kept = self._kept.get(key)
        if kept is None or not kept.holds(snapshot, facts, places, now):
            times = fetch_times(snapshot, ask, self._config, now, places)
            kept = _Kept(facts, snapshot.links, snapshot.pairs, places, times)
            self._kept[key] = kept
        self._kept.move_to_end(key)
        while len(self._kept) > _MOST_KEPT_TIMES:
            self._kept.popitem(last=False)
        return kept.times

    def _places_of(self, snapshot: Snapshot) -> PlaceTable:
        if self._places is None or not (
            _equal(self._labels, snapshot.labels) and _equal(self._rdma, snapshot.rdma)
        ):
            self._places = PlaceTable.of(snapshot.labels, snapshot.rdma)
            # None of it holds any more, and each would keep the old places in memory.
            self._kept.clear()
        self._labels, self._rdma = snapshot.labels, snapshot.rdma
        return self._places


class _KeptRows:
    """The rows of the last list of nodes: prioritize mostly asks about those that filter kept."""

    def __init__(self) -> None:
        self._by_name: Mapping[str, int] | None = None
        self._nodes: list[str] = []
        self._found: Ints = np.zeros(0, np.int32)

    def get(self, snapshot: Snapshot, nodes: list[str]) -> Ints:
        """Return the row of each node; comparing strings is cheaper than hashing them."""
        if self._by_name is not snapshot.rows or nodes != self._nodes:
            self._found = snapshot.rows_of(nodes)
            self._nodes = nodes.copy()
            self._by_name = snapshot.rows
        return self._found


class _KeptReadings:
    """The readings of the last snapshot."""

    def __init__(self) -> None:
        self._free_ratio: Any = None
        self._device_ok: Any = None
        self._readings: Readings | None = None

    def get(self, snapshot: Snapshot, memory_ratio: float) -> Readings:
        """Return the readings, counted anew where they have changed."""
        if (
            self._readings is None
            or self._readings.memory_ratio != memory_ratio
            or self._free_ratio is not snapshot.free_ratio
            or self._device_ok is not snapshot.device_ok
        ):
            self._readings = Readings.of(snapshot, memory_ratio)
            self._free_ratio, self._device_ok = snapshot.free_ratio, snapshot.device_ok
        return self._readings


def _equal(kept: Any, new: Any) -> bool:  # noqa: ANN401 (arrays of any kind)
    return kept is new or np.array_equal(kept, new)
