"""The ``status`` of a WorkerStatus as JSON, and what of it is worth a write (pure).

Field names are those of the CRD (``deploy/crds``); those that the extender falls back to are the
summary's in camelCase. What is not known is left out, never zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nearkv.agent.worker_status.conditions import READY, Condition
from nearkv.agent.worker_status.observing import EngineFacts
from nearkv.agent.worker_status.steadying import round_bytes, two_digits
from nearkv.node_summary import DeviceSummary, PathSummary

Json = dict[str, Any]
MAX_OBJECT_BYTES = 4096
"""Of the whole object as the API server keeps it, ``managedFields`` included."""

_MAX_PATHS = 8
_SURROUNDING_BYTES = 1300
"""What an object has beside its status and its name, which stands there twice: measured with
kube-apiserver 1.36, two thirds of it ``managedFields``."""
_LONGEST_NAME = 253
_LONGEST_VERSION = 64
_OPTIONAL = ("paths", "cachedPrefixes", "devices", "blocks", "groups")
_NEWS = (
    *("node", "role", "group", "model", "engineVersion", "ranks", "transferMode"),
    *("kvCacheUsedPercent", "kvCacheTotalBytes", "cachedPrefixes", "devices", "rdma"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is the node's own; told with one engine of it only, to spare writes."""

    devices: Sequence[DeviceSummary] | None = None
    rdma: bool | None = None
    paths: Sequence[PathSummary] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that goes into one status. Ratios are steady; ``node_facts`` is ``None`` elsewhere."""

    node: str
    observed_at: str
    interval_seconds: float
    facts: EngineFacts
    used_ratio: float | None
    held_ratio: float | None
    conditions: Sequence[Condition]
    prefixes: Sequence[str] | None = None
    prefix_count: int | None = None
    node_facts: NodeFacts | None = None


def compose(report: Report) -> Json:
    """Return the status."""
    facts = report.facts
    total_bytes = facts.kv_total_bytes
    used_bytes = round_bytes(report.used_ratio, total_bytes)
    free_bytes = None
    if used_bytes is not None and total_bytes is not None:
        free_bytes = total_bytes - used_bytes
    status = {
        "observedAt": report.observed_at,
        "intervalSeconds": round(report.interval_seconds),
        "node": report.node,
        "role": facts.role,
        "group": facts.group[:_LONGEST_NAME],
        "model": facts.model[:_LONGEST_NAME],
        "engineVersion": facts.version[:_LONGEST_VERSION],
        "ranks": facts.ranks if facts.ranks > 1 else None,
        "transferMode": facts.transfer_mode,
        "kvCacheUsedPercent": None if report.used_ratio is None else round(100 * report.used_ratio),
        "kvCacheUsedBytes": used_bytes,
        "kvCacheFreeBytes": free_bytes,
        "kvCacheTotalBytes": total_bytes,
        "queueDepth": facts.requests_waiting,
        "runningRequests": facts.requests_running,
        "blocks": facts.blocks,
        "cachedPrefixes": report.prefixes,
        "cachedPrefixCount": report.prefix_count,
        "conditions": [_condition(condition) for condition in report.conditions],
        "groups": [_group(report, free_bytes)] if facts.group else None,
        **_node_part(report.node_facts),
    }
    return {name: value for name, value in status.items() if value is not None and value != ""}


def _condition(condition: Condition) -> Json:
    verdict = condition.verdict
    return {
        "type": verdict.type,
        "status": verdict.status,
        "reason": verdict.reason,
        # Kubernetes' own schema of conditions has it always.
        "message": verdict.message,
        "lastTransitionTime": condition.since,
    }


def _group(report: Report, free_bytes: int | None) -> Json:
    """Return this engine's part in its group, as the extender adds them up."""
    facts = report.facts
    is_there = facts.state is not None and facts.state != "unreachable"
    part = {
        "group": facts.group[:_LONGEST_NAME],
        "engines": facts.ranks if is_there else 0,
        "roles": [facts.role],
        "heldBytes": round_bytes(report.held_ratio, facts.kv_total_bytes),
        "freeBytes": free_bytes,
        "kvBytesPerToken": facts.kv_bytes_per_token,
        "prefillTokensPerSecond": two_digits(facts.prefill_tokens_per_second),
    }
    return {name: value for name, value in part.items() if value is not None}


def _node_part(node: NodeFacts | None) -> Json:
    if node is None:
        return {}
    part: Json = {"rdma": node.rdma}
    if node.devices is not None:
        part["devices"] = [_camel(msgspec.to_builtins(device)) for device in node.devices]
    if node.paths:
        part["paths"] = [_path(path) for path in node.paths[:_MAX_PATHS]]
    return part


def _path(path: PathSummary) -> Json:
    return {
        "source": path.source,
        "transport": path.transport,
        "setupSeconds": two_digits(path.setup_seconds),
        "bytesPerSecond": two_digits(path.bytes_per_second),
        "count": path.count,
        "ageSeconds": round(path.age_seconds),
    }


def _camel(fields: Mapping[str, Any]) -> Json:
    return {_camel_name(name): value for name, value in fields.items()}


def _camel_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.title() for part in others)


# -- What is news --------------------------------------------------------------------------


def news_of(status: Mapping[str, Any]) -> bytes:
    """Return what of a status is worth a write, to compare; the rest only goes along.

    Taken from a status, not from facts, so that one read back from the API server compares, too.
    """
    news = [status.get(name) for name in _NEWS]
    return msgspec.json.encode([*news, _states_of(status, every=True)], order="sorted")


def urgent_of(status: Mapping[str, Any]) -> bytes:
    """Return what of a status goes with changes of the pod itself, and so may be written soon."""
    return msgspec.json.encode(
        [status.get("node"), _states_of(status, every=False)], order="sorted"
    )


def _states_of(status: Mapping[str, Any], *, every: bool) -> list[list[str]]:
    conditions = status.get("conditions")
    return sorted(
        [str(each.get("type")), str(each.get("status")), str(each.get("reason"))]
        for each in (conditions if isinstance(conditions, list) else ())
        if isinstance(each, dict) and (every or each.get("type") == READY)
    )


# -- Size ----------------------------------------------------------------------------------


def fit(status: Json, *, name: str) -> Json:
    """Return a status that leaves its object, of this name, within ``MAX_OBJECT_BYTES``.

    What matters least goes first: paths one by one, then whole fields. A list of devices goes as
    a whole, since a part of it would read as fewer devices.
    """
    limit_bytes = MAX_OBJECT_BYTES - _SURROUNDING_BYTES - 2 * len(name.encode())
    for field, instead in _cuts(status):
        if len(msgspec.json.encode(status)) <= limit_bytes:
            break
        omitted = sorted({*status.get("omitted", ()), field})
        kept = {key: value for key, value in status.items() if key != field}
        status = {**kept, **instead, "omitted": omitted}
    return status


def _cuts(status: Json) -> Iterator[tuple[str, Json]]:
    """Yield which field to cut next, and what to put in its place."""
    paths = status.get("paths", ())
    for kept in reversed(range(1, len(paths))):
        yield "paths", {"paths": paths[:kept]}
    for name in _OPTIONAL:
        if name in status:
            yield name, {}
