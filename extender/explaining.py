"""Why each node got its score: the compact record of a decision, read by people (pure)."""

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from nearkv.extender.distance import Bools, DistanceConfig, class_name
from nearkv.extender.fetching import NO_SOURCE, Basis, FetchTimes
from nearkv.extender.headroom import REASONS, DeviceRoom, Verdict
from nearkv.extender.model import UNKNOWN_NODE, Floats, Ints, Marks, PodAsk, Snapshot
from nearkv.extender.scoring import NOBODY, Scores

Float32s = np.ndarray[tuple[int], np.dtype[np.float32]]
Document = dict[str, Any]

_MOST_SOURCES = 8
_SHORT_ERROR = 1e-6
"""What a number may be off when it was kept in 32 bits."""
_NAME_BYTES = 120
"""About what a node's name takes, with its place in the tuple."""
_BARE_BYTES = 2500
"""About what a record takes without its nodes."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecisionRecord:
    """One answer to prioritize: arrays over the nodes that are kept, those that scored best.

    ``at`` is monotonic seconds. ``sources`` are (name, KV bytes or ``None``, as what).
    """

    ask: PodAsk
    at: float
    version: int
    distance: DistanceConfig
    basis: Basis
    prefix_tokens: int
    kv_bytes: float
    cap_ms: float
    source_count: int
    sources: tuple[tuple[str, float | None, str], ...]
    node_count: int
    flat: bool
    network_share: float
    dealt_to: str
    names: tuple[str, ...]
    source_names: tuple[str, ...]
    scores: Ints
    combined: Float32s
    network: Float32s
    headroom: Float32s
    fetch_ms: Float32s
    link_class: Marks
    source: Ints
    measured: Bools
    verdict: Marks
    free: Float32s
    age_seconds: Float32s
    kv_free_bytes: Float32s

    @property
    def size_bytes(self) -> int:
        """About what the record takes."""
        values = (getattr(self, field.name) for field in fields(self))
        arrays = sum(value.nbytes for value in values if isinstance(value, np.ndarray))
        names = len(self.names) + len(self.source_names) + len(self.sources)
        return _BARE_BYTES + int(arrays) + _NAME_BYTES * names


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Decided:
    """All that went into one answer to prioritize."""

    ask: PodAsk
    nodes: list[str]
    rows: Ints
    snapshot: Snapshot
    fetch: FetchTimes
    room: DeviceRoom
    scores: Scores
    now: float


def record_of(decided: Decided, distance: DistanceConfig, *, most_nodes: int) -> DecisionRecord:
    """Keep what explains a decision, for at most so many nodes."""
    rows, fetch, room, scores = decided.rows, decided.fetch, decided.room, decided.scores
    kept = _kept(scores, most_nodes)
    kept_rows = rows[kept]
    names = decided.snapshot.names
    used, source = np.unique(fetch.source[kept_rows], return_inverse=True)
    return DecisionRecord(
        ask=decided.ask,
        at=decided.now,
        version=decided.snapshot.version,
        distance=distance,
        basis=fetch.basis,
        prefix_tokens=fetch.prefix_tokens,
        kv_bytes=fetch.kv_bytes,
        cap_ms=fetch.cap_ms,
        source_count=len(np.union1d(fetch.counterparts, fetch.holders)),
        sources=_sources(fetch, names),
        node_count=len(rows),
        flat=scores.flat,
        network_share=scores.network_share,
        dealt_to="" if scores.dealt_to == NOBODY else names[scores.dealt_to],
        names=_names(decided, kept, kept_rows),
        source_names=tuple("" if row == NO_SOURCE else names[row] for row in used.tolist()),
        scores=scores.values[kept],
        combined=_short(scores.combined[kept]),
        network=_short(scores.network[kept]),
        headroom=_short(room.ratio[kept]),
        fetch_ms=_short(fetch.milliseconds[kept_rows]),
        link_class=fetch.link_class[kept_rows],
        source=source.astype(np.int32),
        measured=fetch.measured[kept_rows],
        verdict=room.verdict[kept],
        free=_short(room.free[kept]),
        age_seconds=_short(room.age_seconds[kept]),
        kv_free_bytes=_kv_free(decided, kept_rows),
    )


def _kept(scores: Scores, most: int) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """Return which candidates are kept: all in their order, or the best of them."""
    if len(scores.values) <= most:
        return np.arange(len(scores.values))
    # The whole number orders first: who was dealt a pod comes before nodes that are as good.
    return np.argpartition(-(scores.values + 0.5 * scores.combined), most)[:most]


def _names(decided: Decided, kept: Any, kept_rows: Ints) -> tuple[str, ...]:  # noqa: ANN401 (index array)
    """Return the kept nodes' names, as the snapshot's own strings where it knows them.

    Those of the request would stay in memory as long as the record does.
    """
    names, asked = decided.snapshot.names, decided.nodes
    if kept_rows.min(initial=0) != UNKNOWN_NODE:
        return tuple(map(names.__getitem__, kept_rows.tolist()))
    return tuple(
        asked[index] if row == UNKNOWN_NODE else names[row]
        for index, row in zip(kept.tolist(), kept_rows.tolist(), strict=True)
    )


def _short(values: Floats) -> Float32s:
    """Keep half of the digits; what is too large for that becomes infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _kv_free(decided: Decided, rows: Ints) -> Float32s:
    facts = decided.snapshot.groups.get(decided.ask.group)
    if facts is None or not len(facts.kv_free_bytes):
        return np.full(len(rows), np.nan, np.float32)
    free = np.where(rows == UNKNOWN_NODE, np.nan, facts.kv_free_bytes[rows])
    return _short(free)


def _sources(
    fetch: FetchTimes, names: tuple[str, ...]
) -> tuple[tuple[str, float | None, str], ...]:
    counterparts = fetch.counterparts[:_MOST_SOURCES].tolist()
    holders = fetch.holders[:_MOST_SOURCES].tolist()
    held = fetch.held_bytes[:_MOST_SOURCES].tolist()
    return (
        *((names[row], None, "counterpart") for row in counterparts),
        *((names[row], size, "holder") for row, size in zip(holders, held, strict=True)),
    )


def explain(record: DecisionRecord, limit: int) -> Document:
    """Return a decision as JSON types: at most ``limit`` nodes, the best first.

    ``at_monotonic_seconds`` is on the extender's own clock; whoever keeps records knows the time
    of day.
    """
    ask = record.ask
    order = np.lexsort((-record.combined, -record.scores))[: max(limit, 0)]
    return {
        "pod": f"{ask.namespace}/{ask.name}",
        "uid": ask.uid,
        "group": ask.group,
        "role": str(ask.role),
        "devices": ask.devices,
        "at_monotonic_seconds": record.at,
        "snapshot_version": record.version,
        "basis": str(record.basis),
        "prefix_tokens": record.prefix_tokens,
        "kv_bytes": record.kv_bytes,
        "recompute_ms": _number(record.cap_ms, 3),
        "source_count": record.source_count,
        "sources": [
            {"node": name, "as": kind, "held_bytes": size} for name, size, kind in record.sources
        ],
        "summary": _summary(record),
        "flat": record.flat,
        "network_share": _number(record.network_share, 4),
        "dealt_to": record.dealt_to or None,
        "nodes": record.node_count,
        "nodes_kept": len(record.names),
        "scores": [_explain_node(record, int(index)) for index in order],
    }


def _summary(record: DecisionRecord) -> str:
    if record.flat and not record.dealt_to:
        return "all nodes are equally good, so this extender has no say"
    if record.flat:
        said = "all nodes are equally good"
    elif record.basis is Basis.NONE:
        said = "no KV of the group and no engine to pair with is known: only headroom counts"
    else:
        said = f"{record.basis}: fetch time to {record.source_count} sources, and headroom"
    if record.dealt_to:
        said += f"; other pods are on their way, so {record.dealt_to} was put ahead"
    return said


def _explain_node(record: DecisionRecord, index: int) -> Document:
    cls = int(record.link_class[index])
    source = record.source_names[record.source[index]]
    return {
        "node": record.names[index],
        "score": int(record.scores[index]),
        "combined": _number(record.combined[index], 4),
        "network_term": _number(record.network[index], 4),
        "headroom_ratio": _number(record.headroom[index], 4),
        "class": class_name(record.distance, cls),
        "source": source or None,
        "fetch_ms": _number(record.fetch_ms[index], 3),
        "fetch_is": "measured" if record.measured[index] else "prior",
        "verdict": Verdict(int(record.verdict[index])).name.lower(),
        "free_devices": _number(record.free[index], 2),
        "report_age_seconds": _number(record.age_seconds[index], 1),
        "kv_free_bytes": _number(record.kv_free_bytes[index], 0),
        "why": f"{_why_network(record, index, source)}; {_why_room(record, index)}",
    }


def _why_network(record: DecisionRecord, index: int, source: str) -> str:
    if record.basis is Basis.NONE:
        return "nothing to fetch from is known"
    name = class_name(record.distance, int(record.link_class[index]))
    where = {
        "same-node": "is a source itself",
        "beyond": f"shares no level with {source}",
        "unknown": f"is at an unknown distance from {source}",
    }.get(name, f"is in the same {name} as {source}")
    mean = "" if record.basis is Basis.COUNTERPARTS else " on average"
    known = "measured" if record.measured[index] else "by labels"
    capped = ", as long as computing it again" if _is_capped(record, index) else ""
    return f"{where}, {record.fetch_ms[index]:.3g} ms to fetch{mean} ({known}){capped}"


def _is_capped(record: DecisionRecord, index: int) -> bool:
    return float(record.fetch_ms[index]) >= record.cap_ms * (1 - _SHORT_ERROR)


def _why_room(record: DecisionRecord, index: int) -> str:
    reason = REASONS[Verdict(int(record.verdict[index]))]
    free = float(record.free[index])
    if math.isnan(free) or record.verdict[index] == Verdict.NOT_ASKED:
        return reason
    return f"{free:.3g} devices are free by requests and ledger, {reason}"


def _number(value: float | np.floating[Any], digits: int) -> float | None:
    """Return a rounded number, or ``None`` for what JSON cannot say."""
    number = float(value)
    return round(number, digits) if math.isfinite(number) else None
