"""What ``GET /v1/status`` says: the node for people, with an age on every reading (pure)."""

from typing import Any

from nearkv._version import __version__
from nearkv.agent.engine_tracking import EngineTracker
from nearkv.agent.node_state import NodeState
from nearkv.freshness import FreshnessLimits
from nearkv.state.model import EngineState, EventsState


def describe_node(
    state: NodeState, *, node: str, started_at: float, limits: FreshnessLimits
) -> dict[str, Any]:
    """Return the status of a node's agent as plain JSON types; unknown values are null."""
    engines = [
        _describe_engine(tracker, state, limits) for _, tracker in sorted(state.trackers.items())
    ]
    return {
        "component": "agent",
        "version": __version__,
        "node": node,
        "boot": state.boot,
        "seq": state.log.cursor.seq,
        "uptime_seconds": round(state.now() - started_at, 3),
        "consumers": state.consumers,
        "engines": engines,
        "transfer": None if state.transfer is None else state.transfer.describe(),
        **{name: part.describe() for name, part in state.parts.items()},
        "problems": _list_problems(state),
    }


def _describe_engine(
    tracker: EngineTracker, state: NodeState, limits: FreshnessLimits
) -> dict[str, Any]:
    info = tracker.info
    gauges = state.log.gauges.get(info.id)
    now = state.now()
    metrics_age = _age(tracker.metrics_at, now)
    return {
        "id": info.id,
        "url": info.url,
        "model": info.model,
        "role": info.role,
        "group": info.group,
        "incarnation": info.incarnation,
        "state": info.state.value,
        "events": info.events.value,
        "block_size": info.block_size,
        "blocks": tracker.table.blocks_by_tier(),
        "block_table_bytes": tracker.table.estimated_bytes,
        "orphans": tracker.table.orphan_count,
        "kv_used_ratio": gauges and gauges.kv_used_ratio,
        "kv_used_bytes": gauges and gauges.kv_used_bytes,
        "kv_total_bytes": gauges and gauges.kv_total_bytes,
        "kv_free_bytes": gauges and gauges.kv_free_bytes,
        "requests_running": gauges and gauges.requests_running,
        "requests_waiting": gauges and gauges.requests_waiting,
        "prefix_hits_tokens": gauges and gauges.prefix_hits_tokens,
        "prefix_queries_tokens": gauges and gauges.prefix_queries_tokens,
        "metrics_age_seconds": metrics_age,
        "events_age_seconds": _age(tracker.events_at, now),
        "freshness": limits.classify(metrics_age).value,
        "engine_version": info.engine_version,
    }


def _age(at: float | None, now: float) -> float | None:
    return None if at is None else round(now - at, 3)


def _list_problems(state: NodeState) -> list[str]:
    problems = [f"{engine}: {text}" for engine, text in sorted(state.problems.items())]
    for engine, tracker in sorted(state.trackers.items()):
        info = tracker.info
        if info.state is EngineState.UNREACHABLE and engine not in state.problems:
            problems.append(f"{engine}: does not answer at {info.url}")
        if info.events is EventsState.OFF:
            problems.append(
                f"{engine}: publishes no KV events (start it with --kv-events-config), "
                "so its cache is invisible to routing"
            )
        elif info.events is EventsState.LOST and info.state is not EngineState.UNREACHABLE:
            problems.append(f"{engine}: nothing connects to where it should publish KV events")
        elif info.events is EventsState.PARTIAL:
            why = "does not fit into memory" if tracker.is_reduced else "some KV events were missed"
            problems.append(f"{engine}: its cache is seen in part: {why}")
    for part in state.parts.values():
        problems += part.problems()
    return problems + ([] if state.transfer is None else state.transfer.problems())
