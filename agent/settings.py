"""Settings of the agent; see docs/configuration.md for the generated table."""

from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator

from nearkv.agent.engine_kinds import EngineKind
from nearkv.agent.gpu.settings import GpuSettings
from nearkv.agent.kubernetes.settings import KubernetesSettings
from nearkv.agent.links.settings import LinkSettings
from nearkv.agent.probes.settings import ProbeSettings
from nearkv.agent.warming.settings import WarmingSettings
from nearkv.agent.worker_status.settings import WorkerStatusSettings
from nearkv.certificates import CertificateFiles, ClientFiles
from nearkv.settings import (
    Address,
    ClusterSecret,
    FreshnessSettings,
    HttpUrl,
    Secret,
    ServiceSettings,
    SettingsGroup,
    StateTlsSettings,
    unique_ids,
)


def _check_network(text: str) -> str:
    ip_network(text)  # raises ValueError with the reason
    return text


Network = Annotated[str, AfterValidator(_check_network)]
"""A range of addresses, such as 10.0.0.0/16."""

_ANY_HOST = ("0.0.0.0", "::", "")  # noqa: S104 (compared with, not bound to)


class ConfiguredEngine(SettingsGroup):
    """One vLLM server on this node. What is left out is asked of the engine itself."""

    id: str = Field(
        description="Name of the engine, unique in the cluster (pod UID on Kubernetes)."
    )
    url: HttpUrl = Field(description="Base URL of its HTTP API, such as http://127.0.0.1:8000.")
    kind: EngineKind = Field(
        EngineKind.AUTO, description="Which server it is: vllm, sglang, or auto to ask it."
    )
    role: Literal["prefill", "decode", "both"] = Field("both", description="Work it may get.")
    group: str | None = Field(
        None, description="Engines that can serve each other's KV; default: the served model."
    )
    key_model: str | None = Field(
        None, description="Model name in the block-key namespace; default: the served model."
    )
    kv_events: str | None = Field(
        None, description="ZMQ endpoint of KV events; default: what the engine itself says."
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
    transfer: Literal["agent", "nixl", "off"] = Field(
        "agent",
        description="How its KV moves: by this agent once the engine has registered, by vLLM's "
        "NixlConnector, or not at all.",
    )

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
    adapters_seconds: float = Field(
        10.0, gt=0, description="Pause between looks at which LoRA adapters an engine has."
    )


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
    consumer_queue_bytes: int = Field(
        1 << 20, gt=0, description="Deltas that wait for one consumer to take them."
    )
    snapshot_seconds: float = Field(
        60.0, gt=0, description="Within which a consumer must have taken a snapshot."
    )
    tables_limit_bytes: int = Field(
        1 << 30,
        gt=0,
        description="Memory bound of the block tables of all engines together; the blocks least "
        "used go first, and the engine's events become partial.",
    )


class PeerTlsSettings(SettingsGroup):
    """TLS between agents; the same certificate serves and asks."""

    cert: Path = Field(
        description="Certificate chain (PEM), valid for the host of peer_url, or for name."
    )
    key: Path = Field(description="Its private key (PEM).")
    ca: Path | None = Field(
        None,
        description="CA of all agents (PEM): peers must show a certificate of it; default: the "
        "system's CAs, and peers show none.",
    )
    name: str = Field(
        "",
        description="Name to find in peers' certificates; empty: the host of their peer_url.",
    )
    reload_seconds: float = Field(
        10.0,
        gt=0,
        description="Pause between looks at the files; movers read them when they start.",
    )

    @property
    def served(self) -> CertificateFiles:
        """The files to serve peers with."""
        return CertificateFiles(self.cert, self.key, self.ca)

    @property
    def shown(self) -> ClientFiles:
        """The files to ask peers with."""
        return ClientFiles(self.ca, self.cert, self.key, self.name)


class PathPriorSettings(SettingsGroup):
    """What moving KV is taken to cost before it was measured."""

    same_node_setup_seconds: float = Field(0.001, ge=0, description="Set-up within a node.")
    same_node_bytes_per_second: int = Field(
        8_000_000_000, gt=0, description="Bandwidth within a node."
    )
    rdma_setup_seconds: float = Field(0.005, ge=0, description="Set-up between nodes by RDMA.")
    rdma_bytes_per_second: int = Field(10_000_000_000, gt=0, description="Bandwidth of RDMA.")
    tcp_setup_seconds: float = Field(0.005, ge=0, description="Set-up between nodes otherwise.")
    tcp_bytes_per_second: int = Field(
        1_000_000_000, gt=0, description="Bandwidth between nodes otherwise."
    )


def _check_store_url(secret: SecretStr) -> SecretStr:
    # Only whoever writes about stores pays for loading them.
    from nearkv.transfer.store.opening import tier_of  # noqa: PLC0415 (see above)

    tier_of(secret.get_secret_value())  # raises ValueError with the reason
    return secret


StoreUrl = Annotated[SecretStr, AfterValidator(_check_store_url)]
"""Where a shared store is; kept secret, since it may hold a password."""


class StoreSettings(SettingsGroup):
    """A store of KV that all agents reach; docs/store.md says when it pays."""

    url: StoreUrl = Field(
        description="A folder, file:///path, or Redis: redis://user:password@host:6379/0, "
        "rediss:// with TLS, unix:///path of its socket."
    )
    max_bytes: int = Field(
        64 << 30, gt=0, description="Files: most bytes in the folder; the least used go first."
    )
    ttl_seconds: float = Field(
        3600.0, gt=0, description="Redis: how long an entry stays after it was last written."
    )
    segment_blocks: int = Field(
        16,
        gt=0,
        le=4096,
        description="Blocks in an entry; the same for all who share the store.",
    )
    min_tokens: int = Field(
        512, gt=0, description="Shorter prefixes are neither stored nor looked for."
    )
    write: Literal["leased", "all", "none"] = Field(
        "leased",
        description="What is stored: prefills for other engines, every finished request, or "
        "nothing, so that it is only read.",
    )
    lookup_seconds: float = Field(
        0.5, gt=0, le=60, description="Longest wait of a request for the store's word."
    )
    put_seconds: float = Field(
        5.0, gt=0, le=600, description="Longest time that one prefix is being stored."
    )
    max_puts: int = Field(
        16, gt=0, le=1024, description="Prefixes being stored or waiting for it; more are skipped."
    )


class TransferSettings(SettingsGroup):
    """Moving KV between engines, of this node and of others."""

    socket_dir: Path | None = Field(
        None,
        description="Folder of the Unix socket agent.sock that engines register at, such as "
        "/run/nearkv; default: transfer is off.",
    )
    allowed_uids: tuple[int, ...] = Field(
        (), description="Users whose engines may register; empty means the agent's own and 0."
    )
    max_connections: int = Field(256, gt=0, description="Connections of engines at once.")
    handshake_seconds: float = Field(
        5.0, gt=0, description="Within which a new connection must have registered."
    )
    peer_listen: Address = Field(
        Address("127.0.0.1", 9471), description="Address to serve other agents on."
    )
    peer_url: HttpUrl | None = Field(
        None,
        description="Base URL that other agents reach peer_listen at; default: that address.",
    )
    data_host: str | None = Field(
        None,
        description="Address that KV is served to other nodes on, by ports of its own; default: "
        "the host of peer_listen. Others are told the host of peer_url.",
    )
    peer_token: Secret | None = Field(None, description="Bearer token that agents show each other.")
    peer_tls: PeerTlsSettings | None = Field(
        None, description="TLS between agents; without it they talk in the clear."
    )
    peer_networks: tuple[Network, ...] = Field(
        (),
        description="Networks of other agents, such as 10.0.0.0/16; others are not asked. Empty "
        "allows any.",
    )
    paths: tuple[Literal["nixl", "ucx", "tcp"], ...] = Field(
        ("nixl", "ucx", "tcp"),
        description="Transports between nodes, best first; those that work on both are used.",
    )
    require_rdma: bool = Field(
        False,  # noqa: FBT003 (a default)
        description="Refuse to move KV between nodes without RDMA.",
    )
    report_non_rdma: bool = Field(
        False,  # noqa: FBT003 (a default)
        description="Call it a problem when KV comes from another node without RDMA.",
    )
    allow_cross_tenant: bool = Field(
        False,  # noqa: FBT003 (a default)
        description="Let engines of different tenants use each other's KV.",
    )
    lease_seconds: float = Field(
        30.0, gt=0, description="Longest time of a lease without a word of its reader."
    )
    lease_wait_seconds: float = Field(
        1.0, ge=0, description="How long a lookup waits for a lease that is on its way."
    )
    inflight_limit_bytes: int = Field(
        1 << 30, gt=0, description="KV that may be on its way here from one node at once."
    )
    max_pulls: int = Field(32, gt=0, description="Pulls into one engine at once.")
    store: StoreSettings | None = Field(
        None, description="A shared store of KV beside the engines; default: none."
    )
    priors: PathPriorSettings = Field(
        PathPriorSettings(), description="Costs of paths before they are measured."
    )
    probes: ProbeSettings = Field(
        ProbeSettings(), description="Measuring paths that no transfer has measured lately."
    )

    @field_validator("paths")
    @classmethod
    def _each_once(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(paths)) != len(paths):
            raise ValueError("names a transport twice")
        return paths

    @field_validator("peer_url")
    @classmethod
    def _reachable(cls, value: str | None, info: ValidationInfo) -> str | None:
        listen = info.data.get("peer_listen")
        if value is None and listen is not None and listen.host in _ANY_HOST:
            raise ValueError(f"is needed: other agents cannot reach {listen}")
        return value


class SummarySettings(SettingsGroup):
    """The node's summary, which the extender places pods by."""

    interval_seconds: float = Field(
        5.0, ge=0.1, le=3600, description="Pause between looks at the node."
    )
    drift_seconds: float = Field(
        30.0,
        gt=0,
        description="Shortest time between two summaries that only tell of other costs, a third of "
        "it where a path changed much; those that tell of devices and engines come at once.",
    )
    heartbeat_seconds: float = Field(300.0, gt=0, description="Longest time between two summaries.")
    max_waiting: int = Field(64, gt=0, description="Requests held back at once; 503 beyond.")


class WakingSettings(SettingsGroup):
    """Waking pods that wait for a GPU of this node, by an annotation on the Node."""

    enabled: bool = Field(
        False,  # noqa: FBT003 (a default)
        description="Change nearkv.io/room-changed-at on the own Node when a device is free again "
        "that was taken by foreign memory or had failed; needs the right to patch it.",
    )
    kubeconfig: Path | None = Field(
        None, description="Kubeconfig; default: the pod's service account, then KUBECONFIG."
    )
    context: str | None = Field(None, description="Context of the kubeconfig; default: its own.")
    min_seconds: float = Field(60.0, ge=1, description="Shortest time between two changes.")
    settle_seconds: float = Field(
        2.0,
        ge=0,
        description="How long a device must have been free, so that the extender knows; once "
        "more as much at random.",
    )


class AgentSettings(ServiceSettings):
    """Watch the engines of one node, and serve what they hold and how they do."""

    node: str = Field(
        "local",
        min_length=1,
        description="Name of this node; default: the variable NODE_NAME, where it is set.",
    )
    listen: Address = Field(
        Address("127.0.0.1", 9470), description="Address to serve state, status and metrics on."
    )
    engines: Annotated[tuple[ConfiguredEngine, ...], AfterValidator(unique_ids)] = Field(
        (), description="Engines of this node."
    )
    token: Secret | None = Field(
        None, description="Bearer token that readers of the state must show."
    )
    tls: StateTlsSettings | None = Field(None, description="TLS; without it plain HTTP is served.")
    cluster_secret: ClusterSecret | None = Field(
        None,
        description="Keys the block keys, so that state does not betray prompts to a guesser; "
        "at most 64 bytes.",
    )
    transfer: TransferSettings = Field(TransferSettings(), description="Moving KV between engines.")
    links: LinkSettings = Field(LinkSettings(), description="RDMA devices and network adapters.")
    gpu: GpuSettings = Field(GpuSettings(), description="Reading the node's GPUs.")
    kubernetes: KubernetesSettings = Field(
        KubernetesSettings(), description="Finding engines as pods."
    )
    worker_status: WorkerStatusSettings = Field(
        WorkerStatusSettings(), description="Writing WorkerStatus objects."
    )
    scrape: ScrapeSettings = Field(ScrapeSettings(), description="Scraping of engines.")
    state: StateSettings = Field(StateSettings(), description="The state kept and served.")
    freshness: FreshnessSettings = Field(
        FreshnessSettings(), description="What the status calls fresh and aged."
    )
    summary: SummarySettings = Field(SummarySettings(), description="Summary for the extender.")
    waking: WakingSettings = Field(WakingSettings(), description="Waking pods that wait for room.")
    warming: WarmingSettings = Field(
        WarmingSettings(), description="Loading prefixes of hot documents into engines."
    )
    drain_seconds: float = Field(5.0, ge=0, description="Longest wait for streams at shutdown.")
