"""Settings of the agent; see docs/configuration.md for the generated table."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from nearkv.settings import (
    Address,
    ClusterSecret,
    FreshnessSettings,
    HttpUrl,
    Secret,
    ServiceSettings,
    SettingsGroup,
    unique_ids,
)


class ConfiguredEngine(SettingsGroup):
    """One vLLM server on this node. What is left out is asked of the engine itself."""

    id: str = Field(
        description="Name of the engine, unique in the cluster (pod UID on Kubernetes)."
    )
    url: HttpUrl = Field(description="Base URL of its HTTP API, such as http://127.0.0.1:8000.")
    role: Literal["prefill", "decode", "both"] = Field("both", description="Work it may get.")
    group: str | None = Field(
        None, description="Engines that can serve each other's KV; default: the served model."
    )
    key_model: str | None = Field(
        None, description="Model name in the block-key namespace; default: the served model."
    )
    kv_events: str | None = Field(
        None, description="ZMQ endpoint of KV events; default: /kv_event_sources of the engine."
    )
    kv_replay: str | None = Field(
        None, description="ZMQ endpoint for replays of KV events; goes with kv_events."
    )
    topic: str = Field(
        "",
        description="Topic prefix to subscribe to; empty takes every topic; goes with kv_events.",
    )
    dp_size: int = Field(1, ge=1, description="Data-parallel ranks behind the URL.")
    kv_bytes_per_token: int | None = Field(
        None, gt=0, description="KV cache bytes per token, where the engine does not report bytes."
    )
    api_key: Secret | None = Field(None, description="Bearer token that the engine wants.")

    @field_validator("kv_replay", "topic")
    @classmethod
    def _goes_with_kv_events(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("kv_events") is None:
            raise ValueError("needs kv_events beside it")
        return value


class ScrapeSettings(SettingsGroup):
    """How engines are asked for their load."""

    interval_seconds: float = Field(1.0, gt=0, description="Pause between scrapes of an engine.")
    timeout_seconds: float = Field(2.0, gt=0, description="Deadline of one scrape.")


class StateSettings(SettingsGroup):
    """What is kept, and how it is served."""

    table_limit_bytes: int = Field(
        256 << 20, gt=0, description="Memory bound of one engine's block table."
    )
    ring_limit_bytes: int = Field(
        32 << 20, gt=0, description="Memory bound of the deltas kept for slow consumers."
    )
    flush_seconds: float = Field(
        0.002, ge=0, description="How long changes are collected before they are sent."
    )
    heartbeat_seconds: float = Field(1.0, gt=0, description="Pause between heartbeats on a stream.")
    max_consumers: int = Field(256, gt=0, description="Streams served at once.")


class AgentSettings(ServiceSettings):
    """Watch the engines of one node, and serve what they hold and how they do."""

    node: str = Field("local", min_length=1, description="Name of this node.")
    listen: Address = Field(
        Address("127.0.0.1", 9470), description="Address to serve state, status and metrics on."
    )
    engines: Annotated[tuple[ConfiguredEngine, ...], AfterValidator(unique_ids)] = Field(
        (), description="Engines of this node."
    )
    token: Secret | None = Field(
        None, description="Bearer token that readers of the state must show."
    )
    cluster_secret: ClusterSecret | None = Field(
        None,
        description="Keys the block keys, so that state does not betray prompts to a guesser; "
        "at most 64 bytes.",
    )
    scrape: ScrapeSettings = Field(ScrapeSettings(), description="Scraping of engines.")
    state: StateSettings = Field(StateSettings(), description="The state kept and served.")
    freshness: FreshnessSettings = Field(
        FreshnessSettings(), description="What the status calls fresh and aged."
    )
    drain_seconds: float = Field(5.0, ge=0, description="Longest wait for streams at shutdown.")
