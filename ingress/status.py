"""What ``GET /v1/status`` says: agents, engines and index as this replica sees them (pure)."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from nearkv._version import __version__
from nearkv.freshness import FreshnessLimits
from nearkv.ingress.fleet import AgentView, EngineView, Fleet, compat_of
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.settings import IngressSettings, PdSettings

_MOST_PATHS = 1000


def describe_ingress(
    settings: IngressSettings, knowledge: Knowledge, *, ready: bool, now: float
) -> dict[str, Any]:
    """Return the status as plain JSON types; unknown values are null."""
    fleet = knowledge.fleet
    limits = settings.freshness.limits
    size = fleet.index.size
    totals = knowledge.totals
    return {
        "component": "ingress",
        "version": __version__,
        "policy": settings.policy.value,
        "ready": ready,
        "agents": [_describe_agent(agent, knowledge, now) for agent in fleet.agents.values()],
        "engines": [
            _describe_engine(view, knowledge, limits, now)
            for _, view in sorted(fleet.engines.items())
        ],
        "problems": [
            f"{engine}: its block keys are made with another cluster secret, so no prompt is found"
            for engine in knowledge.key_mismatches()
        ],
        "index": {
            "blocks": size.blocks,
            "bytes": size.estimated_bytes,
            "bytes_limit": size.limit_bytes,
            "refused": size.refused,
        },
        "pd": _describe_pd(settings.pd, fleet),
        "requests_total": totals.requests,
        "hit_ratio": _ratio(totals.predicted_tokens, totals.prompt_tokens),
    }


def _describe_agent(agent: AgentView, knowledge: Knowledge, now: float) -> dict[str, Any]:
    engines = knowledge.fleet.engines.values()
    return {
        "url": agent.url,
        "node": agent.node,
        "connected": agent.connected,
        "synced": agent.synced,
        "age_seconds": None if agent.heard_at is None else round(now - agent.heard_at, 3),
        "cursor": None if agent.cursor is None else str(agent.cursor),
        "engines": sum(view.agent == agent.url for view in engines),
        "error": agent.error,
    }


def _describe_engine(
    view: EngineView, knowledge: Knowledge, limits: FreshnessLimits, now: float
) -> dict[str, Any]:
    info = view.info
    gauges = view.gauges
    age_seconds = view.age_seconds(now)
    breaker = knowledge.suspects.state_of(info.id, info.incarnation, now)
    return {
        "id": info.id,
        "node": info.node,
        "url": info.url,
        "model": info.model,
        "role": info.role,
        "transfer": info.transfer and info.transfer.mode,
        "state": info.state.value,
        "events": info.events.value,
        "freshness": limits.classify(age_seconds).value,
        "age_seconds": None if age_seconds is None else round(age_seconds, 3),
        "inflight": knowledge.ledger.at(info.id, info.incarnation).requests,
        "kv_used_ratio": gauges and gauges.kv_used_ratio,
        "requests_running": gauges and gauges.requests_running,
        "requests_waiting": gauges and gauges.requests_waiting,
        "prefill_seconds_per_token": gauges and gauges.prefill_seconds_per_token,
        "prefix_hits_tokens": gauges and gauges.prefix_hits_tokens,
        "prefix_queries_tokens": gauges and gauges.prefix_queries_tokens,
        "mode": knowledge.parity.mode(info.id, info.incarnation).value,
        "breaker": breaker.value,
    }


def _describe_pd(settings: PdSettings, fleet: Fleet) -> dict[str, Any]:
    """Say what may be split: settings, pairs by model, and the paths that agents measured."""
    readings = {
        (reading.source, reading.target): reading
        for agent in fleet.agents.values()
        for reading in agent.paths.readings.values()
    }
    return {
        "mode": settings.mode.value,
        "min_tokens": settings.min_tokens,
        "hysteresis_ratio": settings.hysteresis_ratio,
        "pairs": {
            model: pairs
            for model in sorted(fleet.models)
            if (pairs := count_pairs(fleet.traits(model).movers))
        },
        "paths": [
            {
                "source": reading.source,
                "target": reading.target,
                "path": reading.path,
                "setup_seconds": reading.setup_seconds,
                "bytes_per_second": reading.bytes_per_second,
                "points": reading.points,
            }
            for _, reading in sorted(readings.items())[:_MOST_PATHS]
        ],
    }


def count_pairs(movers: Sequence[EngineView]) -> int:
    """Return how many pairs of prefill and decode engine can be made, by role and compat."""
    roles = Counter((compat_of(view), view.info.role) for view in movers)
    pairs = 0
    for compat in {compat for compat, _ in roles}:
        both = roles[compat, "both"]
        pairs += (roles[compat, "prefill"] + both) * (roles[compat, "decode"] + both) - both
    return pairs


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
