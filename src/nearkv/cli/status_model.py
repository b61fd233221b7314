"""What ``GET /v1/status`` of agents and ingresses says, as far as the table needs it.

Every field has a default, so that a newer or older component can still be read; ``None``
means "unknown" and is never shown as zero.
"""

import msgspec


class AgentEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the agent of its node knows it. Ages in seconds."""

    id: str
    url: str | None = None
    model: str | None = None
    role: str | None = None
    group: str | None = None
    incarnation: str | None = None
    state: str | None = None
    events: str | None = None
    blocks: dict[str, int] | None = None
    orphans: int | None = None
    kv_used_ratio: float | None = None
    kv_used_bytes: int | None = None
    kv_total_bytes: int | None = None
    kv_free_bytes: int | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    prefix_hits_tokens: float | None = None
    prefix_queries_tokens: float | None = None
    metrics_age_seconds: float | None = None
    events_age_seconds: float | None = None
    freshness: str | None = None
    engine_version: str | None = None


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True, tag_field="component", tag="agent"):
    """Status of one agent."""

    node: str | None = None
    version: str | None = None
    engines: tuple[AgentEngine, ...] = ()
    problems: tuple[str, ...] = ()


class IngressAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent as an ingress sees it."""

    url: str
    node: str | None = None
    connected: bool | None = None
    age_seconds: float | None = None
    error: str | None = None


class IngressEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as an ingress sees it."""

    id: str
    node: str | None = None
    url: str | None = None
    model: str | None = None
    role: str | None = None
    transfer: str | None = None
    state: str | None = None
    events: str | None = None
    freshness: str | None = None
    age_seconds: float | None = None
    kv_used_ratio: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    prefix_hits_tokens: float | None = None
    prefix_queries_tokens: float | None = None
    inflight: int | None = None
    mode: str | None = None
    breaker: str | None = None


class IngressStatus(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="component", tag="ingress"
):
    """Status of one ingress."""

    version: str | None = None
    policy: str | None = None
    ready: bool | None = None
    agents: tuple[IngressAgent, ...] = ()
    engines: tuple[IngressEngine, ...] = ()
    requests_total: int | None = None
    hit_ratio: float | None = None
    problems: tuple[str, ...] = ()


Status = AgentStatus | IngressStatus
