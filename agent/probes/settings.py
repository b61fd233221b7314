"""Settings of the probes; see docs/configuration.md for the generated table."""

from typing import Annotated

from pydantic import AfterValidator, Field

from nearkv.settings import HttpUrl, SettingsGroup

MAX_LEVELS = 16
_MAX_PEERS = 4096


def _each_once(levels: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(levels)) != len(levels):
        raise ValueError("names a label twice")
    return levels


class ConfiguredPeer(SettingsGroup):
    """Another node's agent."""

    node: str = Field(min_length=1, description="Name of its node.")
    url: HttpUrl = Field(description="Base URL of its peer_listen, such as http://10.0.0.8:9471.")
    labels: dict[str, str] = Field(
        {}, description="Labels of its node, as far as they are levels; default: it is asked."
    )


class ProbeSettings(SettingsGroup):
    """Measuring paths to other nodes that no real transfer has measured lately."""

    enabled: bool = Field(
        True,  # noqa: FBT003 (a default)
        description="Probe, and answer probes; needs transfer.peer_token, or transfer.peer_tls "
        "with a ca.",
    )
    peers: tuple[ConfiguredPeer, ...] = Field(
        (), max_length=_MAX_PEERS, description="Agents to probe, beside those of earlier transfers."
    )
    levels: Annotated[tuple[str, ...], AfterValidator(_each_once)] = Field(
        ("topology.kubernetes.io/zone", "topology.kubernetes.io/region"),
        max_length=MAX_LEVELS,
        description="Node labels that say how near two nodes are, nearest first. The first that "
        "is equal is the class of a pair. `a|b` is label a, else b.",
    )
    labels: dict[str, str] = Field(
        {},
        description="Labels of this node, as far as levels; on Kubernetes those of the Node are "
        "known, and these win.",
    )
    service: str = Field(
        "",
        max_length=253,
        description="Headless Service of all agents, in whose EndpointSlices others are found; "
        "empty: only those configured, and those of earlier transfers. Needs the right to list "
        "endpointslices.",
    )
    namespace: str = Field(
        "default", min_length=1, max_length=63, description="Namespace of that Service."
    )
    port_name: str = Field(
        "peers", max_length=63, description="Name of its port that is peer_listen."
    )
    refresh_seconds: float = Field(
        60.0,
        gt=0,
        le=86_400.0,
        description="Shortest mean time between two lists of agents; with more than 167 of them "
        "0.36 s for each, half an hour at 5,000.",
    )
    peers_per_class: int = Field(
        8, ge=1, le=64, description="Peers of a class that are probed in turn, chosen by name."
    )
    interval_seconds: float = Field(
        10.0, ge=1.0, le=86_400.0, description="Mean time between two probes by this node."
    )
    fresh_seconds: float = Field(
        20.0,
        gt=0,
        le=86_400.0,
        description="How long a measurement, be it of a real transfer, spares a peer the next.",
    )
    deadline_seconds: float = Field(8.0, ge=0.1, le=60.0, description="Longest time of one probe.")
    max_bytes_per_second: int = Field(
        1_000_000, gt=0, description="Bound on what probes move in and out, on average."
    )
    max_cpu_ratio: float = Field(
        0.001, gt=0, le=1.0, description="Bound on the share of a core that probes take."
    )
