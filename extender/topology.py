"""What ``/v1/topology`` shows: levels of distance as found, and where each group is (pure)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nearkv.extender.model import Floats, GroupFacts, Ints, MeasuredLink, Snapshot
from nearkv.extender.presets import Level

_MOST_ROWS = 200
"""Nodes of a group shown, and measured pairs; the counts beside them are of all."""

_SAME_NODE = 0


def describe_topology(snapshot: Snapshot, levels: Sequence[Level], now: float) -> dict[str, Any]:
    """Return the topology as JSON types; ages in seconds, unknown is ``null``."""
    names = ["same-node", *(level.name for level in levels), "beyond", "unknown"]
    return {
        "version": snapshot.version,
        "nodes": len(snapshot.names),
        "nodes_reported": int(np.isfinite(snapshot.reported_at).sum()),
        "nodes_reported_by_status": int(snapshot.from_status.astype(bool).sum()),
        "rdma": {
            "usable": int((snapshot.rdma > 0).sum()),
            "none": int((snapshot.rdma == 0).sum()),
            "unknown": int((snapshot.rdma < 0).sum()),
        },
        "devices": {
            "allocatable": int(snapshot.devices.sum()),
            "requested": int(snapshot.requested.sum()),
        },
        "levels": [
            _level(level, snapshot.labels[:, column]) for column, level in enumerate(levels)
        ],
        "measured": [
            {"class": names[number], **_measured(link, now)}
            for number, link in sorted(snapshot.links.items())
            if _SAME_NODE <= number < len(names)
        ],
        "measured_pairs": len(snapshot.pairs),
        "pairs": [
            {
                "source": snapshot.names[source],
                "node": snapshot.names[node],
                **_measured(link, now),
            }
            for (source, node), link in _first(snapshot.pairs.items())
        ],
        "groups": {
            name: _group(snapshot, facts, now) for name, facts in sorted(snapshot.groups.items())
        },
    }


def _first(items: Any) -> list[Any]:  # noqa: ANN401 (any iterable of pairs)
    return [item for item, _ in zip(items, range(_MOST_ROWS), strict=False)]


def _level(level: Level, values: Ints) -> dict[str, Any]:
    labelled = values[values > 0]
    return {
        "name": level.name,
        "labels": list(level.labels),
        "setup_seconds": level.cost.setup_seconds,
        "bytes_per_second": level.cost.bytes_per_second,
        "domains": len(np.unique(labelled)),
        "nodes_without": len(values) - len(labelled),
    }


def _measured(link: MeasuredLink, now: float) -> dict[str, Any]:
    return {
        "setup_seconds": link.setup_seconds,
        "bytes_per_second": link.bytes_per_second,
        "count": link.count,
        "age_seconds": _age(link.received_at, now),
    }


def _group(snapshot: Snapshot, facts: GroupFacts, now: float) -> dict[str, Any]:
    largest = np.argsort(-facts.held_bytes, kind="stable")[:_MOST_ROWS]
    return {
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "prefill_tokens_per_second": facts.prefill_tokens_per_second,
        "kv_free_bytes": _sum(facts.kv_free_bytes),
        "holders": len(facts.holders),
        "held_bytes": _sum(facts.held_bytes),
        "held_by": [
            {
                "node": snapshot.names[int(facts.holders[i])],
                "held_bytes": _known(facts.held_bytes[i]),
                "age_seconds": _age(float(facts.held_at[i]), now),
            }
            for i in largest.tolist()
        ],
        "prefill_pods": int(facts.prefill_pods.sum()),
        "prefill_nodes": _names(snapshot, facts.prefill),
        "decode_pods": int(facts.decode_pods.sum()),
        "decode_nodes": _names(snapshot, facts.decode),
    }


def _names(snapshot: Snapshot, rows: Ints) -> list[str]:
    return [snapshot.names[row] for row in rows[:_MOST_ROWS].tolist()]


def _sum(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.sum()) if len(known) else None


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _age(at: float, now: float) -> float | None:
    return max(0.0, now - at) if np.isfinite(at) else None
