"""Rows and problems of ``nearkv status`` (pure): statuses in, text out.

Agents and ingresses name engines alike, so their views of one engine share a row, in which
the agent, being nearer, has the first word. What nobody knows is "-", never zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nearkv.cli.status_model import (
    AgentEngine,
    AgentStatus,
    IngressEngine,
    IngressStatus,
    Status,
)

UNKNOWN = "-"
COLUMNS = (
    *("ENGINE", "NODE", "MODEL", "ROLE", "STATE", "EVENTS", "KV USED", "BLOCKS"),
    *("RUN", "WAIT", "HIT RATIO", "AGE", "FRESHNESS"),
)
WIDE_COLUMNS = (
    *("GROUP", "URL", "KV FREE", "KV TOTAL", "ORPHANS", "EVENTS AGE", "INFLIGHT", "MODE"),
    *("BREAKER", "TRANSFER", "INCARNATION", "VERSION"),
)
_KIB = 1024
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MINUTE_SECONDS = 60
_HOUR_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine, as its node's agent and as an ingress know it."""

    id: str
    node: str | None = None
    agent: AgentEngine | None = None
    ingress: IngressEngine | None = None


def merge_views(statuses: Sequence[Status]) -> list[EngineView]:
    """Join what agents and ingresses say by engine id, sorted by node and id.

    When several ingresses know an engine, the first one's view counts.
    """
    nodes: dict[str, str | None] = {}
    by_agent: dict[str, AgentEngine] = {}
    by_ingress: dict[str, IngressEngine] = {}
    for status in statuses:
        if isinstance(status, AgentStatus):
            by_agent |= {engine.id: engine for engine in status.engines}
            nodes |= {engine.id: status.node for engine in status.engines}
        else:
            by_ingress = {engine.id: engine for engine in status.engines} | by_ingress
    views = [
        EngineView(name, nodes.get(name), by_agent.get(name), by_ingress.get(name))
        for name in {**by_agent, **by_ingress}
    ]
    return sorted(views, key=lambda view: (view.node or "", view.id))


def cells_of(view: EngineView, *, wide: bool) -> dict[str, str]:
    """Return the cells of one row by column."""
    agent = view.agent or AgentEngine(id=view.id)
    ingress = view.ingress or IngressEngine(id=view.id)
    cells = {
        "ENGINE": view.id,
        "NODE": _text(view.node or ingress.node),
        "MODEL": _text(agent.model or ingress.model),
        "ROLE": _text(agent.role or ingress.role),
        "STATE": _text(agent.state or ingress.state),
        "EVENTS": _text(agent.events or ingress.events),
        "KV USED": _kv_used(agent, ingress),
        "BLOCKS": _blocks(agent),
        "RUN": _count(_first(agent.requests_running, ingress.requests_running)),
        "WAIT": _count(_first(agent.requests_waiting, ingress.requests_waiting)),
        "HIT RATIO": _hit_ratio(agent, ingress),
        "AGE": format_age(_first(agent.metrics_age_seconds, ingress.age_seconds)),
        "FRESHNESS": _text(agent.freshness or ingress.freshness),
    }
    return cells | (_wide_cells(agent, ingress) if wide else {})


def list_problems(status: Status) -> Iterator[str]:
    """Say what is unhealthy, one line for each thing."""
    if isinstance(status, AgentStatus):
        yield from status.problems
        for engine in status.engines:
            yield from _engine_problems(engine, known=status.problems)
        return
    yield from status.problems
    if status.ready is False:
        yield "the ingress is not ready"
    for agent in status.agents:
        if agent.connected is False:
            yield f"agent {agent.url} is not connected{f': {agent.error}' if agent.error else ''}"
    for ingress_engine in status.engines:
        if ingress_engine.breaker == "open":
            yield f"{ingress_engine.id}: gets no requests, because recent ones failed"
        if ingress_engine.freshness == "unknown":
            yield f"{ingress_engine.id}: its load is unknown to the ingress"


def summarise(status: IngressStatus) -> str:
    """Return one line about an ingress: policy, readiness, agents, requests, hits."""
    connected = sum(agent.connected is True for agent in status.agents)
    ready = {True: "ready", False: "not ready", None: "readiness unknown"}[status.ready]
    return (
        f"policy {_text(status.policy)}, {ready}, agents {connected}/{len(status.agents)}, "
        f"requests {_count(status.requests_total)}, hit ratio {format_ratio(status.hit_ratio)}"
    )


def format_ratio(ratio: float | None) -> str:
    """Return a ratio from 0 to 1 as percent with one digit."""
    return UNKNOWN if ratio is None else f"{ratio:.1%}"


def format_bytes(count_bytes: float | None) -> str:
    """Return bytes in the largest binary unit that keeps the figure at 1 or above."""
    if count_bytes is None:
        return UNKNOWN
    size = float(count_bytes)
    for unit in _BYTE_UNITS[:-1]:
        if size < _KIB:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _KIB
    return f"{size:.1f} {_BYTE_UNITS[-1]}"


def format_age(age_seconds: float | None) -> str:
    """Return an age as people say it: 0.4s, 12s, 3m, 2h."""
    if age_seconds is None:
        return UNKNOWN
    if age_seconds < _MINUTE_SECONDS:
        return f"{age_seconds:.1f}s"
    if age_seconds < _HOUR_SECONDS:
        return f"{age_seconds / _MINUTE_SECONDS:.0f}m"
    return f"{age_seconds / _HOUR_SECONDS:.0f}h"


def _engine_problems(engine: AgentEngine, *, known: Sequence[str]) -> Iterator[str]:
    if any(problem.startswith(f"{engine.id}: ") for problem in known):
        return
    if engine.state == "unreachable":
        yield f"{engine.id}: does not answer"
    elif engine.freshness == "unknown" and engine.state == "ready":
        yield f"{engine.id}: its metrics are missing or too old"
    if engine.events == "lost":
        yield f"{engine.id}: its KV events are lost; its cache is invisible to routing"


def _kv_used(agent: AgentEngine, ingress: IngressEngine) -> str:
    ratio = format_ratio(_first(agent.kv_used_ratio, ingress.kv_used_ratio))
    if agent.kv_used_bytes is None:
        return ratio
    used = format_bytes(agent.kv_used_bytes)
    return used if ratio == UNKNOWN else f"{ratio} ({used})"


def _blocks(agent: AgentEngine) -> str:
    if agent.blocks is None:
        return UNKNOWN
    if len(agent.blocks) == 1:
        return str(next(iter(agent.blocks.values())))
    tiers: Mapping[str, int] = agent.blocks
    return " ".join(f"{tier}:{count}" for tier, count in sorted(tiers.items())) or "0"


def _hit_ratio(agent: AgentEngine, ingress: IngressEngine) -> str:
    return format_ratio(
        _first(
            _quotient(agent.prefix_hits_tokens, agent.prefix_queries_tokens),
            _quotient(ingress.prefix_hits_tokens, ingress.prefix_queries_tokens),
        )
    )


def _first(*values: float | None) -> float | None:
    """Return the first value that is known; zero is known."""
    return next((value for value in values if value is not None), None)


def _quotient(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _wide_cells(agent: AgentEngine, ingress: IngressEngine) -> dict[str, str]:
    return {
        "GROUP": _text(agent.group),
        "URL": _text(agent.url or ingress.url),
        "KV FREE": format_bytes(agent.kv_free_bytes),
        "KV TOTAL": format_bytes(agent.kv_total_bytes),
        "ORPHANS": _count(agent.orphans),
        "EVENTS AGE": format_age(agent.events_age_seconds),
        "INFLIGHT": _count(ingress.inflight),
        "MODE": _text(ingress.mode),
        "BREAKER": _text(ingress.breaker),
        "TRANSFER": _text(ingress.transfer),
        "INCARNATION": _text(agent.incarnation),
        "VERSION": _text(agent.engine_version),
    }


def _text(value: str | None) -> str:
    return value or UNKNOWN


def _count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"
