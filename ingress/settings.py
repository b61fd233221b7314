"""Settings of the ingress; see docs/configuration.md for the generated table."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from nearkv.ingress.routing import Policy
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


class StaticEngine(SettingsGroup):
    """An engine known without an agent: a fallback, routed to by load alone."""

    id: str = Field(description="Name of the engine.")
    url: HttpUrl = Field(description="Base URL of its HTTP API.")


class LimitSettings(SettingsGroup):
    """Bounds on what a client may ask and on what is kept."""

    max_body_bytes: int = Field(8 << 20, gt=0, description="Largest request body; 413 beyond.")
    max_in_flight: int = Field(10_000, gt=0, description="Requests served at once; 429 beyond.")
    index_bytes: int = Field(1 << 30, gt=0, description="Memory bound of the prefix index.")
    token_memo_bytes: int = Field(
        256 << 20, gt=0, description="Memory bound of remembered tokenizations."
    )
    hint_bytes: int = Field(64 << 20, gt=0, description="Memory bound of prefix ids.")


class DeadlineSettings(SettingsGroup):
    """How long to wait for engines and agents."""

    connect_seconds: float = Field(2.0, gt=0, description="Connecting to an engine.")
    first_byte_seconds: float = Field(
        300.0, gt=0, description="From dispatch to the first byte of the body."
    )
    idle_seconds: float = Field(
        60.0, gt=0, description="Between two chunks of a stream, either way."
    )
    tokenize_seconds: float = Field(2.0, gt=0, description="One tokenization by an engine.")
    agent_silence_seconds: float = Field(
        5.0, gt=0, description="Silence after which an agent's stream is opened anew."
    )
    sync_seconds: float = Field(
        10.0, gt=0, description="Longest wait for agents before serving with what is known."
    )
    engine_keepalive_seconds: float = Field(
        3.0, gt=0, description="Idle time of engine connections; below the engine's own 5 s."
    )


class GateSettings(SettingsGroup):
    """The free-KV threshold: the smaller of the two applies."""

    min_free_bytes: int = Field(2_000_000_000, ge=0, description="Free KV bytes an engine needs.")
    min_free_ratio: float = Field(0.10, ge=0, le=1, description="Free share an engine needs.")
    retry_after_seconds: int = Field(1, ge=1, description="Retry-After of a 429.")


class TokenizationSettings(SettingsGroup):
    """Where token ids come from."""

    order: tuple[Literal["render", "tokenize", "local"], ...] = Field(
        ("render", "tokenize", "local"), description="Sources in the order they are tried."
    )
    local: dict[str, str] = Field(
        {}, description="Folder with tokenizer.json (and chat template) by model name."
    )


class IngressSettings(ServiceSettings):
    """Serve the OpenAI API, each request by the engine that holds its KV cache."""

    listen: Address = Field(Address("127.0.0.1", 8080), description="Address to serve on.")
    policy: Policy = Field(Policy.PREFIX_FIRST, description="How engines are chosen.")
    agents: tuple[HttpUrl, ...] = Field((), description="Base URLs of the node agents to follow.")
    agent_token: Secret | None = Field(None, description="Bearer token the agents want.")
    engines: Annotated[tuple[StaticEngine, ...], AfterValidator(unique_ids)] = Field(
        (), description="Engines known without an agent."
    )
    engine_api_key: Secret | None = Field(
        None, description="Bearer token for our own calls to engines (tokenization)."
    )
    cluster_secret: ClusterSecret | None = Field(
        None, description="Keys the block keys; the same as the agents'."
    )
    limits: LimitSettings = Field(LimitSettings(), description="Bounds.")
    deadlines: DeadlineSettings = Field(DeadlineSettings(), description="Deadlines.")
    gate: GateSettings = Field(GateSettings(), description="Free-KV threshold.")
    freshness: FreshnessSettings = Field(FreshnessSettings(), description="Freshness limits.")
    tokenization: TokenizationSettings = Field(
        TokenizationSettings(), description="Sources of token ids."
    )
    admin_token: Secret | None = Field(
        None, description="Bearer token for /v1/status and other admin paths."
    )
    retries: int = Field(1, ge=0, le=5, description="Other engines tried before the first byte.")
    drain_seconds: float = Field(30.0, ge=0, description="Longest wait for requests at shutdown.")
