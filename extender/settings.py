"""Settings of the extender; see docs/configuration.md for the generated table."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from nearkv.extender.presets import Transform
from nearkv.settings import (
    Address,
    ClientTlsSettings,
    HttpUrl,
    Secret,
    ServiceSettings,
    SettingsGroup,
    TlsSettings,
)

_GO_IDLE_SECONDS = 90.0
"""After which Go's HTTP client, kube-scheduler's, closes an idle connection by itself."""


_MOST_LEVELS = 100

Preset = Literal["generic", "nvlink", "topograph", "aws", "gcp", "oci", "coreweave"]


class LimitSettings(SettingsGroup):
    """Bounds on what is taken in and how long it may take."""

    max_body_bytes: int = Field(
        512 << 20, gt=0, description="Largest request body; 5,000 whole nodes are 92 MB."
    )
    max_bodies_bytes: int = Field(
        1 << 30,
        gt=0,
        description="All bodies that are being read or answered; 503 beyond.",
    )
    body_seconds: float = Field(30.0, gt=0, description="Longest time for a body to arrive.")
    answer_seconds: float = Field(30.0, gt=0, description="Longest time for an answer to be taken.")
    keepalive_seconds: float = Field(
        120.0,
        description="How long an idle connection is kept; above the 90 s of kube-scheduler's "
        "client, which would else send into a connection that is being closed.",
    )

    @model_validator(mode="after")
    def _has_room_for_one(self) -> Self:
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError("max_bodies_bytes: must be at least max_body_bytes")
        return self

    @field_validator("keepalive_seconds")
    @classmethod
    def _outlasts_the_scheduler(cls, value: float) -> float:
        if value <= _GO_IDLE_SECONDS:
            raise ValueError(f"must be above {_GO_IDLE_SECONDS:g}, kube-scheduler's own idle time")
        return value


class KubernetesSettings(SettingsGroup):
    """How nodes and pods are watched, and what is read of them."""

    enabled: bool = Field(
        True,  # noqa: FBT003 (a default)
        description="Watch nodes and pods; without it every answer is neutral.",
    )
    kubeconfig: Path | None = Field(
        None, description="Kubeconfig; default: the pod's service account, else the usual one."
    )
    context: str | None = Field(None, description="Context of the kubeconfig; default: its own.")
    node_selector: str = Field(
        "", description="Label selector of the nodes to know; empty takes all of them."
    )
    managed_resources: tuple[str, ...] = Field(
        ("nvidia.com/gpu",), min_length=1, description="Resources that stand for whole devices."
    )
    group_labels: tuple[str, ...] = Field(
        ("nearkv.io/group",),
        min_length=1,
        description="Pod labels that name the group; the first that a pod has counts.",
    )
    role_labels: tuple[str, ...] = Field(
        ("nearkv.io/role", "llm-d.ai/role"),
        min_length=1,
        description="Pod labels that name the role: prefill, decode; anything else is both.",
    )
    rdma_labels: tuple[str, ...] = Field(
        ("feature.node.kubernetes.io/rdma.available", "feature.node.kubernetes.io/rdma.capable"),
        description="Node labels that say whether there is RDMA.",
    )
    rdma_resources: tuple[str, ...] = Field(
        ("rdma/*",), description="Node resources that mean RDMA; may end in a star."
    )
    worker_statuses: bool = Field(
        True,  # noqa: FBT003 (a default)
        description="Watch WorkerStatus objects, the fallback for agents that cannot be reached.",
    )
    page_objects: int = Field(500, gt=0, description="Objects per page of a LIST.")
    watch_seconds: float = Field(
        45.0, gt=0, description="After once to twice that, a WATCH is begun anew."
    )
    silence_seconds: float = Field(
        100.0,
        gt=60,
        description="Silence after which a WATCH is broken; above twice watch_seconds, since where "
        "nothing changes nothing may come.",
    )
    publish_seconds: float = Field(
        0.1, gt=0, description="How long changes are collected before they count."
    )

    @field_validator("silence_seconds")
    @classmethod
    def _outlasts_a_quiet_watch(cls, value: float, info: ValidationInfo) -> float:
        longest = 2 * info.data.get("watch_seconds", 0.0)
        if value <= longest:
            raise ValueError(f"must be above twice watch_seconds ({longest:g})")
        return value


class AgentsSettings(SettingsGroup):
    """Where the agents are, and how their summaries are fetched."""

    urls: tuple[HttpUrl, ...] = Field(
        (), description="Base URLs; each agent speaks for the node that it names."
    )
    selector: str = Field(
        "", description="Label selector of their pods; goes before template, after urls."
    )
    namespace: str = Field("", description="Namespace of these pods; empty looks in all.")
    port: int = Field(9470, gt=0, lt=1 << 16, description="Port on these pods.")
    scheme: Literal["http", "https"] = Field("http", description="Scheme on these pods.")
    template: str = Field(
        "",
        description="URL for each node, {host_ip} being its address: http://{host_ip}:9470.",
    )
    token: Secret | None = Field(None, description="Bearer token that the agents want.")
    tls: ClientTlsSettings = Field(
        ClientTlsSettings(), description="TLS to agents that are asked by https."
    )
    wait_seconds: float = Field(
        30.0, gt=0, description="How long an agent holds a question back while it has no news."
    )
    polls_per_second: float = Field(100.0, gt=0, description="Questions to all agents together.")
    max_connections: int = Field(4096, gt=0, description="Questions that may be open at once.")
    forget_seconds: float = Field(
        900.0, gt=0, description="Age at which the last report of a silent agent is dropped."
    )

    @field_validator("template")
    @classmethod
    def _names_the_host(cls, value: str) -> str:
        if value and ("{host_ip}" not in value or "://" not in value):
            raise ValueError("must be a URL that holds {host_ip}")
        return value.rstrip("/")


class LevelSettings(SettingsGroup):
    """One level of distance: nodes with equal values of a label are within it."""

    name: str = Field(min_length=1, description="Name of the level, such as rack.")
    labels: tuple[str, ...] = Field(
        min_length=1, description="Node labels; the first that a node has counts."
    )
    setup_seconds: float = Field(ge=0, description="Set-up of a transfer within the level.")
    bytes_per_second: float = Field(gt=0, description="Bandwidth within the level.")
    transform: Transform = Field(
        Transform.WHOLE,
        description="What of the value counts: all, or all before its last dot.",
    )
    needs_rdma: bool = Field(
        True,  # noqa: FBT003 (a default)
        description="Whether that cost holds only for nodes with RDMA; not so for NVLink.",
    )


class DistanceSettings(SettingsGroup):
    """What fetching KV from one node to another is taken to cost."""

    preset: Preset = Field("generic", description="Levels by cloud or labelling tool.")
    levels: tuple[LevelSettings, ...] = Field(
        (), description="Own levels, nearest first, in place of the preset's."
    )
    same_node_setup_seconds: float = Field(0.0003, ge=0, description="Set-up within a node.")
    same_node_bytes_per_second: float = Field(150e9, gt=0, description="Bandwidth within a node.")
    beyond_setup_seconds: float = Field(
        0.03, ge=0, description="Set-up between nodes that differ at every level."
    )
    beyond_bytes_per_second: float = Field(0.6e9, gt=0, description="Bandwidth between these.")
    unknown_setup_seconds: float = Field(
        0.005, ge=0, description="Set-up where a label is missing; neither near nor out of reach."
    )
    unknown_bytes_per_second: float = Field(2.5e9, gt=0, description="Bandwidth there.")
    without_rdma_setup_seconds: float = Field(
        0.004, ge=0, description="Least set-up where either node has no RDMA."
    )
    without_rdma_bytes_per_second: float = Field(2.5e9, gt=0, description="Most bandwidth there.")
    recompute_cap: bool = Field(
        True,  # noqa: FBT003 (a default)
        description="Take nothing to cost more than computing the prefix again.",
    )
    prefix_tokens: int = Field(
        8192, gt=0, description="Length of a typical prefix, where the pod does not say."
    )
    kv_bytes_per_token: float = Field(
        131_072.0, gt=0, description="KV cache of one token, where no agent tells."
    )
    prefill_tokens_per_second: float = Field(
        10_000.0, gt=0, description="Speed of computing a prefix, where no agent tells."
    )
    link_fresh_seconds: float = Field(
        900.0, ge=0, description="Age up to which the median of a class counts fully."
    )
    link_aged_seconds: float = Field(
        3600.0, gt=0, description="Age from which it does not count at all."
    )
    pair_fresh_seconds: float = Field(
        300.0, ge=0, description="The same for what was measured between two nodes."
    )
    pair_aged_seconds: float = Field(1800.0, gt=0, description="The same.")
    held_fresh_seconds: float = Field(
        90.0, ge=0, description="The same for the KV that a node is said to hold."
    )
    held_aged_seconds: float = Field(600.0, gt=0, description="The same.")
    enough_count: int = Field(
        5, gt=0, description="Measurements that stand for themselves; fewer mix with the defaults."
    )
    holders_weight: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the nodes that hold KV, where there are engines to fetch from, too.",
    )
    max_sources: int = Field(
        128, gt=0, description="Sources of one kind that are looked at, the largest."
    )

    @field_validator("levels")
    @classmethod
    def _sound(cls, levels: tuple[LevelSettings, ...]) -> tuple[LevelSettings, ...]:
        names = [level.name for level in levels]
        if len(set(names)) < len(names):
            raise ValueError("two levels have the same name")
        if len(levels) > _MOST_LEVELS:
            raise ValueError(f"at most {_MOST_LEVELS} levels")
        return levels

    @field_validator("link_aged_seconds", "pair_aged_seconds", "held_aged_seconds")
    @classmethod
    def _above_fresh(cls, value: float, info: ValidationInfo) -> float:
        fresh = str(info.field_name).replace("aged", "fresh")
        if value <= info.data.get(fresh, 0.0):
            raise ValueError(f"must be above {fresh} ({info.data[fresh]:g})")
        return value


class HeadroomSettings(SettingsGroup):
    """How far reports of devices are trusted."""

    memory_ratio: float = Field(
        0.9, gt=0, le=1, description="Share of a device that an engine takes, if it does not say."
    )
    fresh_intervals: float = Field(
        2.0, gt=0, description="Age, in intervals of the report, up to which it counts fully."
    )
    aged_intervals: float = Field(
        6.0, gt=0, description="Age, in intervals, from which it does not count at all."
    )
    grace_seconds: float = Field(
        10.0, ge=0, description="How long the memory of a pod that left may take to come back."
    )
    report_seconds: float = Field(
        15.0, gt=0, description="Interval of reports, where the agent does not say."
    )

    @field_validator("aged_intervals")
    @classmethod
    def _above_fresh(cls, value: float, info: ValidationInfo) -> float:
        fresh = info.data.get("fresh_intervals", 0.0)
        if value <= fresh:
            raise ValueError(f"must be above fresh_intervals ({fresh:g})")
        return value


class ScoreSettings(SettingsGroup):
    """How the terms are put together."""

    network_weight: float = Field(0.7, ge=0, description="Weight of the time to fetch KV.")
    headroom_weight: float = Field(0.3, ge=0, description="Weight of room for the pod's devices.")
    highest: int = Field(
        10,
        ge=2,
        le=100,
        description="Best score. 100 is finer; then give kube-scheduler a tenth of the weight.",
    )
    span_ratio: float = Field(
        4.0,
        gt=1,
        description="How many times longer the longest fetch must take than the shortest for the "
        "network term to span its whole range.",
    )
    indifferent_seconds: float = Field(
        0.002, gt=0, description="Fetch time that nobody notices: below it all are the same."
    )


class LedgerSettings(SettingsGroup):
    """Pods that were scored and are not seen on a node yet."""

    ttl_seconds: float = Field(
        30.0, gt=0, description="How long a pod is expected on the nodes that scored best."
    )
    max_pods: int = Field(10_000, gt=0, description="Pods expected at once; the oldest go first.")


class DecisionSettings(SettingsGroup):
    """Decisions kept for /v1/explain."""

    max_count: int = Field(1000, ge=0, description="Decisions kept.")
    max_bytes: int = Field(64 << 20, ge=0, description="Memory bound of decisions kept.")
    max_nodes: int = Field(1000, gt=0, description="Nodes kept of each decision, the best ones.")


class ExtenderSettings(ServiceSettings):
    """Score nodes for kube-scheduler by distance to the KV cache and by GPU headroom."""

    listen: Address = Field(Address("127.0.0.1", 9473), description="Address to serve on.")
    preempt: bool = Field(
        False,  # noqa: FBT003 (a default)
        description="Answer /v1/preempt, handing every candidate back; off: 404.",
    )
    tls: TlsSettings | None = Field(None, description="TLS; without it plain HTTP is served.")
    admin_token: Secret | None = Field(
        None, description="Bearer token for /v1/explain and /v1/topology."
    )
    kubernetes: KubernetesSettings = Field(
        KubernetesSettings(), description="Watching nodes and pods."
    )
    agents: AgentsSettings = Field(AgentsSettings(), description="Summaries of agents.")
    distance: DistanceSettings = Field(DistanceSettings(), description="Distance between nodes.")
    headroom: HeadroomSettings = Field(HeadroomSettings(), description="Room for devices.")
    score: ScoreSettings = Field(ScoreSettings(), description="Putting scores together.")
    ledger: LedgerSettings = Field(LedgerSettings(), description="Pods expected.")
    decisions: DecisionSettings = Field(DecisionSettings(), description="Decisions kept.")
    limits: LimitSettings = Field(LimitSettings(), description="Bounds.")
    drain_seconds: float = Field(10.0, ge=0, description="Longest wait for requests at shutdown.")
