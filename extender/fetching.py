"""How long a new engine would take to fetch a typical prefix, from each node (pure).

Its sources are the nodes that hold the group's KV, weighted by bytes, since any of them may have
the next prefix; and its counterparts (prefill engines for a decode pod, decode engines for a
prefill pod), of which the nearest counts, since the router pairs a request with a near one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from nearkv.extender.distance import (
    SAME_NODE,
    Bools,
    ClassCosts,
    DistanceConfig,
    LinkArrays,
    Places,
    PlaceTable,
    blend,
    class_costs,
    classes_between,
    usable,
)
from nearkv.extender.model import Floats, GroupFacts, Ints, Marks, PodAsk, Role, Snapshot

NO_SOURCE = -1
_MOST_TOKENS = 1 << 30
_MEASURED_FROM = 0.5
_LEAST_RATE = 1e-6
_MOST_RATE = 1e18
"""Bounds of what bytes for a token and tokens in a second can be."""


class Basis(StrEnum):
    """What the fetch times rest on."""

    COUNTERPARTS = "counterparts"
    HOLDERS = "holders"
    BOTH = "both"
    NONE = "none"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FetchTimes:
    """Predicted fetch times by row, in ms; one more entry at the end is for unknown nodes.

    So the row -1 of a node that is not in the snapshot reads what holds for it. ``source`` is
    the row of the source that counts most and ``link_class`` the distance from it; ``measured``
    tells whether that distance was measured. ``counterparts`` and ``holders`` are the rows that
    were looked at, ``held_bytes`` what the latter hold as far as that is trusted. All of it
    holds from ``computed_at`` to ``valid_until``.
    """

    milliseconds: Floats
    link_class: Marks
    source: Ints
    measured: Bools
    basis: Basis
    cap_ms: float
    kv_bytes: float
    prefix_tokens: int
    counterparts: Ints
    holders: Ints
    held_bytes: Floats
    computed_at: float
    valid_until: float


@dataclass(frozen=True, slots=True, eq=False)
class _Sources:
    """Rows of sources, each once, those that count most first."""

    rows: Ints
    weights: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Prefix:
    """The prefix that is to be fetched: its tokens, bytes, and the time to compute it again."""

    tokens: int
    size_bytes: float
    cap_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """Times from sources (columns) to nodes (rows)."""

    milliseconds: Floats
    classes: Marks
    measured: Bools
    sources: Ints
    weights: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Term:
    """What one kind of source makes of each row."""

    milliseconds: Floats
    link_class: Marks
    source: Ints
    measured: Bools

    def take(self, index: Places) -> "_Term":
        return _Term(
            self.milliseconds[index],
            self.link_class[index],
            self.source[index],
            self.measured[index],
        )

    def put(self, index: Places, other: "_Term") -> None:
        self.milliseconds[index] = other.milliseconds
        self.link_class[index] = other.link_class
        self.source[index] = other.source
        self.measured[index] = other.measured


_Reduce = Callable[[_Matrix], _Term]


def fetch_times(
    snapshot: Snapshot,
    ask: PodAsk,
    config: DistanceConfig,
    now: float,
    places: PlaceTable | None = None,
) -> FetchTimes:
    """Predict how long fetching a prefix takes on each node.

    ``places`` are those of the snapshot, where the caller has them. Without any source all
    times are equal.
    """
    facts = snapshot.groups.get(ask.group)
    prefix = _prefix(ask, facts, config)
    costs = class_costs(config, snapshot.links, size_bytes=prefix.size_bytes, now=now)
    if facts is None:
        return _nowhere(snapshot, config, prefix, costs, now)
    table = PlaceTable.of(snapshot.labels, snapshot.rdma) if places is None else places
    rows, weights = counterparts_of(facts, ask.role)
    counterparts = _chosen(rows, weights, table, config.max_sources)
    trust, held_until = config.held.trust(facts.held_at, now)
    held = np.where(np.isfinite(facts.held_bytes), facts.held_bytes, 0.0) * trust
    holders = _chosen(facts.holders, held, table, config.max_sources)
    if not len(counterparts.rows) and not len(holders.rows):
        return _nowhere(snapshot, config, prefix, costs, now, held_until)
    fetching = _Fetching(snapshot, config, prefix=prefix, costs=costs, places=table, now=now)
    term, basis = _combined(fetching, counterparts, holders)
    return FetchTimes(
        milliseconds=term.milliseconds,
        link_class=term.link_class,
        source=term.source,
        measured=term.measured,
        basis=basis,
        cap_ms=prefix.cap_ms,
        kv_bytes=prefix.size_bytes,
        prefix_tokens=prefix.tokens,
        counterparts=counterparts.rows,
        holders=holders.rows,
        held_bytes=holders.weights,
        computed_at=now,
        valid_until=min(fetching.valid_until, held_until),
    )


def counterparts_of(facts: GroupFacts, role: Role) -> tuple[Ints, Floats]:
    """Return the rows that an engine of this role fetches from or is fetched by, and the pods."""
    if role is Role.DECODE:
        return facts.prefill, facts.prefill_pods.astype(np.float64)
    if role is Role.PREFILL:
        return facts.decode, facts.decode_pods.astype(np.float64)
    rows = np.concatenate([facts.prefill, facts.decode])
    return rows, np.concatenate([facts.prefill_pods, facts.decode_pods]).astype(np.float64)


def _combined(
    fetching: "_Fetching", counterparts: _Sources, holders: _Sources
) -> tuple[_Term, Basis]:
    if not len(holders.rows):
        return fetching.term(counterparts, _nearest), Basis.COUNTERPARTS
    if not len(counterparts.rows):
        return fetching.term(holders, _mean), Basis.HOLDERS
    near = fetching.term(counterparts, _nearest)
    spread = fetching.term(holders, _mean)
    share = fetching.config.holders_weight
    mixed = (1.0 - share) * near.milliseconds + share * spread.milliseconds
    return _Term(mixed, near.link_class, near.source, near.measured), Basis.BOTH


class _Fetching:
    """One prediction: what all of its terms share."""

    def __init__(
        self,
        snapshot: Snapshot,
        config: DistanceConfig,
        *,
        prefix: _Prefix,
        costs: ClassCosts,
        places: PlaceTable,
        now: float,
    ) -> None:
        self.config = config
        self.valid_until = costs.valid_until
        self._snapshot = snapshot
        self._prefix = prefix
        self._costs = costs
        self._places = places
        self._needs_rdma = config.needs_rdma
        self._now = now

    def term(self, sources: _Sources, reduce: _Reduce) -> _Term:
        """Return the term of these sources: first by place, then for nodes that differ from it.

        Those are the sources themselves, and the nodes to which a pair was measured.
        """
        places = self._places
        source_places = places.of_row[sources.rows]
        distinct, first, member = np.unique(source_places, return_index=True, return_inverse=True)
        by_place = self._matrix(
            np.arange(len(places.labels)),
            distinct,
            rows=sources.rows[first],
            weights=np.bincount(member, sources.weights).astype(np.float64),
        )
        term = reduce(by_place).take(places.of_row)
        pairs = self._pairs_from(sources.rows)
        apart = np.unique(np.concatenate([sources.rows, pairs.nodes])).astype(np.intp)
        exact = self._matrix(
            places.of_row[apart], source_places, rows=sources.rows, weights=sources.weights
        )
        self._override(exact, apart, pairs)
        term.put(apart, reduce(exact))
        return term

    def _matrix(
        self, node_places: Places, source_places: Places, *, rows: Ints, weights: Floats
    ) -> _Matrix:
        places, costs = self._places, self._costs
        classes = classes_between(
            places.labels[node_places], places.labels[source_places], self.config
        )
        classes[node_places == places.unknown] = self.config.unknown_class
        lacks = places.lacks_rdma
        slow = lacks[node_places][:, None] | lacks[source_places][None, :]
        slow &= self._needs_rdma[classes]
        milliseconds = costs.milliseconds[classes]
        np.maximum(milliseconds, costs.without_rdma_ms, out=milliseconds, where=slow)
        np.minimum(milliseconds, self._prefix.cap_ms, out=milliseconds)
        measured = (costs.measured[classes] >= _MEASURED_FROM) & ~slow
        return _Matrix(milliseconds, classes, measured, rows, weights)

    def _override(self, matrix: _Matrix, nodes: Places, pairs: "_Pairs") -> None:
        """Put in what is known of single pairs: the same node, and what was measured."""
        own = np.searchsorted(nodes, matrix.sources)
        column = np.arange(len(matrix.sources))
        matrix.classes[own, column] = SAME_NODE
        same_ms = min(self._costs.milliseconds[SAME_NODE], self._prefix.cap_ms)
        matrix.milliseconds[own, column] = same_ms
        matrix.measured[own, column] = self._costs.measured[SAME_NODE] >= _MEASURED_FROM
        at = (np.searchsorted(nodes, pairs.nodes), pairs.columns)
        measured_ms = pairs.links.milliseconds(self._prefix.size_bytes)
        mixed = blend(matrix.milliseconds[at], measured_ms, pairs.trust)
        matrix.milliseconds[at] = np.minimum(mixed, self._prefix.cap_ms)
        matrix.measured[at] |= pairs.trust >= _MEASURED_FROM

    def _pairs_from(self, sources: Ints) -> "_Pairs":
        """Return the measured pairs that begin at a source and can be trusted somewhat."""
        columns = {row: column for column, row in enumerate(sources.tolist())}
        last = len(self._snapshot.names)
        found = [
            (columns[source], node, link)
            for (source, node), link in self._snapshot.pairs.items()
            if source in columns and 0 <= node < last and usable(link)
        ]
        links = LinkArrays.of([link for _, _, link in found])
        trust, until = links.trust(self.config.pairs, self.config.enough_count, self._now)
        self.valid_until = min(self.valid_until, until)
        return _Pairs(
            columns=np.array([column for column, _, _ in found], np.intp),
            nodes=np.array([node for _, node, _ in found], np.intp),
            links=links,
            trust=trust,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Measured pairs: the column of the source, the row of the node."""

    columns: Places
    nodes: Places
    links: LinkArrays
    trust: Floats


def _nearest(matrix: _Matrix) -> _Term:
    """Take the source that is fetched from fastest."""
    best = matrix.milliseconds.argmin(axis=1)
    return _picked(matrix, best, matrix.milliseconds[np.arange(len(best)), best])


def _mean(matrix: _Matrix) -> _Term:
    """Take the mean by weight, and name the source that gives most bytes for its time."""
    shares = matrix.weights / matrix.weights.sum()
    # Not a matrix product: its rounding may differ between rows that are equal.
    mean = (matrix.milliseconds * shares).sum(axis=1)
    best = (shares / matrix.milliseconds).argmax(axis=1)
    return _picked(matrix, best, mean)


def _picked(matrix: _Matrix, best: Places, milliseconds: Floats) -> _Term:
    at = (np.arange(len(best)), best)
    return _Term(milliseconds, matrix.classes[at], matrix.sources[best], matrix.measured[at])


def _chosen(rows: Ints, weights: Floats, places: PlaceTable, most: int) -> _Sources:
    """Return the sources that count: each row once, at most so many.

    Where there are more, one of each place is kept first: with the nearest of them a place is
    told right, and only details of single nodes are lost.
    """
    sound = (rows >= 0) & (rows < len(places.of_row) - 1) & (weights > 0)
    distinct, member = np.unique(rows[sound], return_inverse=True)
    total = np.bincount(member, weights[sound], minlength=len(distinct)).astype(np.float64)
    order = np.lexsort((distinct, -total))
    if len(order) > most:
        _, first = np.unique(places.of_row[distinct[order]], return_index=True)
        later = np.ones(len(order), np.bool_)
        later[first] = False
        order = order[np.lexsort((np.arange(len(order)), later))][:most]
    return _Sources(distinct[order].astype(np.int32), total[order])


def _prefix(ask: PodAsk, facts: GroupFacts | None, config: DistanceConfig) -> _Prefix:
    tokens = config.default_prefix_tokens if ask.prefix_tokens is None else ask.prefix_tokens
    tokens = min(max(tokens, 1), _MOST_TOKENS)
    per_token = _known(facts.kv_bytes_per_token if facts else None)
    per_token = per_token or config.default_kv_bytes_per_token
    speed = _known(facts.prefill_tokens_per_second if facts else None)
    speed = speed or config.default_prefill_tokens_per_second
    cap_ms = 1e3 * tokens / speed if config.recompute_cap else float("inf")
    return _Prefix(tokens, tokens * per_token, cap_ms)


def _known(value: float | None) -> float | None:
    """Return a rate that makes sense, else ``None``."""
    return value if value is not None and _LEAST_RATE < value < _MOST_RATE else None


def _nowhere(
    snapshot: Snapshot,
    config: DistanceConfig,
    prefix: _Prefix,
    costs: ClassCosts,
    now: float,
    valid_until: float = float("inf"),
) -> FetchTimes:
    """Return equal times for all nodes: there is nothing to fetch from."""
    count = len(snapshot.names) + 1
    unknown_ms = min(costs.milliseconds[config.unknown_class], prefix.cap_ms)
    nothing = np.zeros(0, np.int32)
    return FetchTimes(
        milliseconds=np.full(count, unknown_ms),
        link_class=np.full(count, config.unknown_class, np.int8),
        source=np.full(count, NO_SOURCE, np.int32),
        measured=np.zeros(count, np.bool_),
        basis=Basis.NONE,
        cap_ms=prefix.cap_ms,
        kv_bytes=prefix.size_bytes,
        prefix_tokens=prefix.tokens,
        counterparts=nothing,
        holders=nothing,
        held_bytes=np.zeros(0),
        computed_at=now,
        valid_until=min(costs.valid_until, valid_until),
    )
