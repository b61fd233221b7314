"""Settings of the agent; see docs/configuration.md for the generated table."""

from typing import Literal

from pydantic import Field, SecretStr

from nearkv.settings import Address, ServiceSettings, SettingsGroup


class ConfiguredEngine(SettingsGroup):
    """One vLLM server on this node. What is left out is asked of the engine itself."""

    id: str = Field(
        description="Name of the engine, unique in the cluster (pod UID on Kubernetes)."
    )
    url: str = Field(description="Base URL of its HTTP API, such as http://127.0.0.1:8000.")
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
    kv_replay: str | None = Field(None, description="ZMQ endpoint for replays of KV events.")
    topic: str = Field("", description="Topic prefix to subscribe to; empty takes every topic.")
    dp_size: int = Field(1, ge=1, description="Data-parallel ranks behind the URL.")
    kv_bytes_per_token: int | None = Field(
        None, gt=0, description="KV cache bytes per token, where the engine does not report bytes."
    )
    api_key: SecretStr | None = Field(None, description="Bearer token that the engine wants.")


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
    fresh_seconds: float = Field(3.0, gt=0, description="Readings up to this age are fresh.")
    aged_seconds: float = Field(30.0, gt=0, description="Readings up to this age are aged.")


class AgentSettings(ServiceSettings):
    """Settings of ``nearkv-agent``."""

    node: str = Field("local", min_length=1, description="Name of this node.")
    listen: Address = Field(
        Address("127.0.0.1", 9470), description="Address to serve state, status and metrics on."
    )
    engines: tuple[ConfiguredEngine, ...] = Field((), description="Engines of this node.")
    token: SecretStr | None = Field(
        None, description="Bearer token that readers of the state must show."
    )
    cluster_secret: SecretStr | None = Field(
        None,
        max_length=64,
        description="Keys the block keys, so that state does not betray prompts to a guesser.",
    )
    scrape: ScrapeSettings = Field(ScrapeSettings(), description="Scraping of engines.")
    state: StateSettings = Field(StateSettings(), description="The state kept and served.")
    drain_seconds: float = Field(5.0, ge=0, description="Longest wait for streams at shutdown.")
