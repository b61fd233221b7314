"""Settings of the ingress; see docs/configuration.md for the generated table."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from nearkv.ingress.cost_policy import CostRules
from nearkv.ingress.extproc.settings import ExtProcSettings
from nearkv.ingress.failure_settings import BreakerSettings, HedgeSettings, RetrySettings
from nearkv.ingress.model_settings import ModelSettings
from nearkv.ingress.patience_rules import PatienceRules
from nearkv.ingress.pd_costs import CostTerms
from nearkv.ingress.quoting import Weights
from nearkv.ingress.recording.settings import DecisionSettings
from nearkv.ingress.routing import Policy
from nearkv.ingress.sidecar.settings import SidecarSettings
from nearkv.ingress.tracing.settings import TracingSettings
from nearkv.settings import (
    Address,
    ClientTlsSettings,
    ClusterSecret,
    FreshnessSettings,
    HttpUrl,
    Secret,
    ServiceSettings,
    SettingsGroup,
    unique_ids,
)


class Mode(StrEnum):
    """What the program is."""

    PROXY = "proxy"
    EXT_PROC = "ext-proc"
    SIDECAR = "sidecar"


class StaticEngine(SettingsGroup):
    """An engine known without an agent: a fallback, routed to by load alone."""

    id: str = Field(description="Name of the engine.")
    url: HttpUrl = Field(description="Base URL of its HTTP API.")


class AgentServiceSettings(SettingsGroup):
    """The Service of the agents: its EndpointSlices say where they are."""

    name: str = Field("", description="Name of the agents' headless Service; empty for none.")
    namespace: str = Field("default", description="Its namespace.")
    port_name: str = Field("state", description="Name of the port that serves the agents' state.")
    scheme: Literal["http", "https"] = Field("http", description="Scheme on that port.")
    kubeconfig: str = Field(
        "", description="Path of a kubeconfig; empty for the pod's service account."
    )
    api_server: str = Field(
        "", description="URL of the API server, without credentials; for tests above all."
    )
    keep_seconds: float = Field(
        300.0,
        ge=0,
        description="How long the engines of an agent stay known that is listed no more, unless "
        "another agent speaks for its node.",
    )


class LimitSettings(SettingsGroup):
    """Bounds on what a client may ask and on what is kept."""

    max_body_bytes: int = Field(8 << 20, gt=0, description="Largest request body; 413 beyond.")
    max_bodies_bytes: int = Field(
        1 << 30, gt=0, description="All bodies of requests in flight together; 429 beyond."
    )
    max_in_flight: int = Field(10_000, gt=0, description="Requests served at once; 429 beyond.")
    index_bytes: int = Field(1 << 30, gt=0, description="Memory bound of the prefix index.")
    token_memo_bytes: int = Field(
        256 << 20, gt=0, description="Memory bound of remembered tokenizations."
    )
    hint_bytes: int = Field(64 << 20, gt=0, description="Memory bound of prefix ids.")


class DeadlineSettings(SettingsGroup):
    """How long to wait for engines and agents."""

    body_seconds: float = Field(
        60.0, gt=0, description="Longest time for a request's body to arrive."
    )
    connect_seconds: float = Field(2.0, gt=0, description="Connecting to an engine.")
    first_byte_seconds: float = Field(
        300.0, gt=0, description="From dispatch to the first byte of the body."
    )
    late_seconds: float = Field(
        30.0,
        gt=0,
        description="A streamed answer later than this and late_factor times the prediction "
        "(policy cost) is asked of another engine.",
    )
    late_factor: float = Field(10.0, ge=0, description="See late_seconds.")
    unreachable_seconds: float = Field(
        10.0,
        gt=0,
        description="A request that waits for an engine which its agent could not reach for so "
        "long is sent to another one.",
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

    @property
    def patience(self) -> PatienceRules:
        """When another engine is tried while the first keeps silent."""
        return PatienceRules(self.unreachable_seconds, self.late_seconds, self.late_factor)


class GateSettings(SettingsGroup):
    """The free-KV threshold: the smaller of the two applies."""

    min_free_bytes: int = Field(2_000_000_000, ge=0, description="Free KV bytes an engine needs.")
    min_free_ratio: float = Field(0.10, ge=0, le=1, description="Free share an engine needs.")
    retry_after_seconds: int = Field(1, ge=1, description="Retry-After of a 429.")


class AdmissionSettings(SettingsGroup):
    """What happens to requests for which no engine has room."""

    max_waiting: int = Field(256, ge=0, description="Requests that wait for room; 429 beyond.")
    wait_seconds: float = Field(
        2.0, ge=0, description="Longest wait for room, then 429; 0: no request waits."
    )
    target_wait_seconds: float = Field(
        1.0, gt=0, description="Backlog of an engine that counts as saturated."
    )


class TenantSettings(SettingsGroup):
    """Limits by API key; see docs/routing.md for the file."""

    file: Path | None = Field(
        None, description="File with tenants, their keys and limits; without, anybody may ask."
    )
    reload_seconds: float = Field(5.0, gt=0, description="How often the file is looked at.")


class TokenizationSettings(SettingsGroup):
    """Where token ids come from."""

    order: tuple[Literal["render", "tokenize", "local"], ...] = Field(
        ("render", "tokenize", "local"), description="Sources in the order they are tried."
    )
    local: dict[str, str] = Field(
        {}, description="Folder with tokenizer.json (and chat template) by model name."
    )


class PdMode(StrEnum):
    """Whether requests may be split between a prefill and a decode engine."""

    AUTO = "auto"
    ALWAYS = "always"
    OFF = "off"


class PdPriorSettings(SettingsGroup):
    """What things cost as long as nobody has measured them."""

    seconds_per_token: float = Field(
        5e-5, gt=0, description="Prefill of one prompt token, where no engine of the model tells."
    )
    kv_bytes_per_token: int = Field(
        131_072, gt=0, description="KV cache of one token, where no engine tells; 128 KiB is an 8B."
    )
    same_node_setup_seconds: float = Field(
        0.001, ge=0, description="Setting up a transfer within a node."
    )
    same_node_bytes_per_second: float = Field(8e9, gt=0, description="Transfer rate within a node.")
    other_node_setup_seconds: float = Field(
        0.003, ge=0, description="Setting up a transfer between nodes."
    )
    other_node_bytes_per_second: float = Field(
        1e9, gt=0, description="Transfer rate between nodes."
    )


class PdSettings(SettingsGroup):
    """Prefill on one engine, decode on another; pulls from an engine that holds the prefix."""

    mode: PdMode = Field(
        PdMode.AUTO,
        description="auto: split where it is clearly cheaper; always: wherever a pair exists; "
        "off: never, and roles mean nothing.",
    )
    min_tokens: int = Field(256, ge=0, description="Shorter prompts are never split.")
    hysteresis_ratio: float = Field(
        0.1, ge=0, description="How much cheaper a pair must be than one engine alone."
    )
    room_margin_tokens: int = Field(
        256, ge=0, description="Free KV tokens, beyond the prompt's, that both engines need."
    )
    decode_stall_weight: float = Field(
        0.02,
        ge=0,
        description="Price of a prefill beside running requests: its share of the prefill's time "
        "for each of them.",
    )
    hop_seconds: float = Field(0.002, ge=0, description="What the second request costs.")
    prefill_seconds: float = Field(60.0, gt=0, description="Deadline of the prefill request.")
    release_seconds: float = Field(
        2.0, gt=0, description="Deadline for giving a lease back to its agent."
    )
    path_aged_seconds: float = Field(
        900.0,
        gt=0,
        description="Age at which what was measured between two nodes counts less than what others "
        "of the same class of distance cost.",
    )
    prior: PdPriorSettings = Field(
        PdPriorSettings(), description="Costs as long as nobody has measured them."
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """Take YAML's bare ``off``, which it reads as false, for the word."""
        return PdMode.OFF if value is False else value

    @property
    def terms(self) -> CostTerms:
        """The terms of the cost model."""
        return CostTerms(
            self.hop_seconds, self.hysteresis_ratio, Weights(self.decode_stall_weight, crowding=0.0)
        )


class CostSettings(SettingsGroup):
    """Policy cost: what is worth how many milliseconds; see docs/routing.md."""

    near_tie_ms: float = Field(
        2.0, ge=0, description="Engines whose own time is this much more than the best are as good."
    )
    near_tie_ratio: float = Field(
        0.02, ge=0, description="The same as a share of the cheapest; the larger one counts."
    )
    session_ms: float = Field(
        10.0, ge=0, description="A session stays on its engine up to this much more ..."
    )
    session_ratio: float = Field(0.1, ge=0, description="... and this share of the cheapest.")
    floor_share: float = Field(
        0.01, ge=0, le=0.2, description="Share of requests that an idle engine gets; 0: none."
    )
    floor_ms: float = Field(
        500.0, ge=0, description="What it may take longer than elsewhere at most."
    )
    crowding_weight: float = Field(
        3.0,
        ge=0,
        description="Price of computing a token anew beyond its own time, as a share of that: it "
        "pushes out a cached one and delays the requests behind ...",
    )
    crowding_most_ms: float = Field(
        4000.0,
        gt=0,
        description="... and what it grows to at most, for prompts that take long themselves.",
    )
    host_bytes_per_second: float = Field(
        20e9, gt=0, description="Rate at which engines bring cached KV back from host memory."
    )
    disk_bytes_per_second: float = Field(2e9, gt=0, description="The same from disk or a store.")
    unknown_prompt_tokens: int = Field(
        512, ge=1, description="Length a prompt is taken for that could not be tokenized."
    )

    @property
    def rules(self) -> CostRules:
        """What counts as equally good."""
        return CostRules(
            near_tie_ms=self.near_tie_ms,
            near_tie_ratio=self.near_tie_ratio,
            session_ms=self.session_ms,
            session_ratio=self.session_ratio,
            floor_share=self.floor_share,
            floor_ms=self.floor_ms,
        )

    def weights(self, decode_stall_weight: float) -> Weights:
        """Return what the trouble for others counts."""
        return Weights(decode_stall_weight, self.crowding_weight, self.crowding_most_ms)


class IngressSettings(ServiceSettings):
    """Serve the OpenAI API, each request by the engine that holds its KV cache."""

    mode: Mode = Field(
        Mode.PROXY,
        description="proxy: clients' entry; ext-proc: also the endpoint picker of Envoy "
        "(docs/envoy.md); sidecar: beside a decode engine, nothing else.",
    )
    listen: Address = Field(Address("127.0.0.1", 8080), description="Address to serve on.")
    policy: Policy = Field(Policy.COST, description="How engines are chosen; see docs/routing.md.")
    cost: CostSettings = Field(CostSettings(), description="Policy cost.")
    agents: tuple[HttpUrl, ...] = Field((), description="Base URLs of the node agents to follow.")
    agent_service: AgentServiceSettings = Field(
        AgentServiceSettings(), description="Agents found in Kubernetes, beside those in agents."
    )
    agent_token: Secret | None = Field(None, description="Bearer token the agents want.")
    agent_tls: ClientTlsSettings = Field(
        ClientTlsSettings(), description="TLS to agents whose URL begins with https."
    )
    engines: Annotated[tuple[StaticEngine, ...], AfterValidator(unique_ids)] = Field(
        (), description="Engines known without an agent."
    )
    engine_api_key: Secret | None = Field(
        None, description="Bearer token for our own calls to engines (tokenization)."
    )
    cluster_secret: ClusterSecret | None = Field(
        None, description="Keys the block keys; the same as the agents'."
    )
    models: ModelSettings = Field(ModelSettings(), description="Names and ranks of models.")
    limits: LimitSettings = Field(LimitSettings(), description="Bounds.")
    deadlines: DeadlineSettings = Field(DeadlineSettings(), description="Deadlines.")
    gate: GateSettings = Field(GateSettings(), description="Free-KV threshold.")
    admission: AdmissionSettings = Field(
        AdmissionSettings(), description="Waiting for room, and the figure to scale by."
    )
    tenants: TenantSettings = Field(TenantSettings(), description="Limits by API key.")
    freshness: FreshnessSettings = Field(FreshnessSettings(), description="Freshness limits.")
    tokenization: TokenizationSettings = Field(
        TokenizationSettings(), description="Sources of token ids."
    )
    pd: PdSettings = Field(PdSettings(), description="Prefill and decode on two engines.")
    decisions: DecisionSettings = Field(DecisionSettings(), description="Decision records.")
    tracing: TracingSettings = Field(TracingSettings(), description="OpenTelemetry spans.")
    admin_token: Secret | None = Field(
        None, description="Bearer token for /v1/status and other admin paths."
    )
    ext_proc: ExtProcSettings = Field(
        ExtProcSettings(), description="The endpoint picker; with mode ext-proc."
    )
    sidecar: SidecarSettings = Field(SidecarSettings(), description="With mode sidecar.")
    retries: int = Field(
        1,
        ge=0,
        le=5,
        description="Other engines tried before the first byte; those that could not be connected "
        "to do not count.",
    )
    retry: RetrySettings = Field(RetrySettings(), description="Bounds on retries.")
    breaker: BreakerSettings = Field(BreakerSettings(), description="Engines that fail.")
    hedge: HedgeSettings = Field(HedgeSettings(), description="A second engine for late answers.")
    drain_seconds: float = Field(30.0, ge=0, description="Longest wait for requests at shutdown.")
