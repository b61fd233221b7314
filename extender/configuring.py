"""From settings to what the parts take (pure).

Apart from the settings themselves, which ``--help`` and the documentation load without numpy.
"""

from nearkv.certificates import ClientCertificates
from nearkv.extender.bodies import BodyLimits
from nearkv.extender.distance import DistanceConfig, Fading
from nearkv.extender.headroom import HeadroomConfig
from nearkv.extender.presets import PRESETS, Level, LinkCost
from nearkv.extender.scoring import ScoreConfig
from nearkv.extender.settings import (
    DistanceSettings,
    ExtenderSettings,
    HeadroomSettings,
    LevelSettings,
    ScoreSettings,
)
from nearkv.extender.view.cluster import ViewConfig, levels_reader
from nearkv.extender.view.collecting import AgentTrust
from nearkv.extender.view.directory import AgentDiscovery
from nearkv.extender.view.nodes import NodeRules
from nearkv.extender.view.pods import PodRules
from nearkv.extender.view.polling import CollectLimits
from nearkv.extender.view.state import StateLimits
from nearkv.kube.listing import ListLimits
from nearkv.kube.watching import WatchLimits
from nearkv.serving import Transport

_READ_BUFFER_BYTES = 1 << 20
"""Bodies of 92 MB come faster in large pieces; small ones never fill it."""


def distance_config(settings: DistanceSettings) -> DistanceConfig:
    """Return the configuration of distances."""
    own = tuple(_level(level) for level in settings.levels)
    return DistanceConfig(
        levels=own or PRESETS[settings.preset],
        same_node=LinkCost(settings.same_node_setup_seconds, settings.same_node_bytes_per_second),
        beyond=LinkCost(settings.beyond_setup_seconds, settings.beyond_bytes_per_second),
        unknown=LinkCost(settings.unknown_setup_seconds, settings.unknown_bytes_per_second),
        without_rdma=LinkCost(
            settings.without_rdma_setup_seconds, settings.without_rdma_bytes_per_second
        ),
        recompute_cap=settings.recompute_cap,
        default_prefix_tokens=settings.prefix_tokens,
        default_kv_bytes_per_token=settings.kv_bytes_per_token,
        default_prefill_tokens_per_second=settings.prefill_tokens_per_second,
        links=Fading(settings.link_fresh_seconds, settings.link_aged_seconds),
        pairs=Fading(settings.pair_fresh_seconds, settings.pair_aged_seconds),
        held=Fading(settings.held_fresh_seconds, settings.held_aged_seconds),
        enough_count=settings.enough_count,
        holders_weight=settings.holders_weight,
        max_sources=settings.max_sources,
    )


def _level(settings: LevelSettings) -> Level:
    return Level(
        name=settings.name,
        labels=settings.labels,
        cost=LinkCost(settings.setup_seconds, settings.bytes_per_second),
        transform=settings.transform,
        needs_rdma=settings.needs_rdma,
    )


def headroom_config(settings: HeadroomSettings) -> HeadroomConfig:
    """Return the configuration of headroom."""
    return HeadroomConfig(
        fresh_intervals=settings.fresh_intervals,
        aged_intervals=settings.aged_intervals,
        grace_seconds=settings.grace_seconds,
        default_report_seconds=settings.report_seconds,
    )


def score_config(settings: ScoreSettings) -> ScoreConfig:
    """Return the configuration of scores."""
    return ScoreConfig(
        network_weight=settings.network_weight,
        headroom_weight=settings.headroom_weight,
        highest=settings.highest,
        span_ratio=settings.span_ratio,
        indifferent_ms=1e3 * settings.indifferent_seconds,
    )


def pod_rules(settings: ExtenderSettings) -> PodRules:
    """Return how pods are read, those in requests and those that run."""
    kubernetes = settings.kubernetes
    return PodRules(
        resources=kubernetes.managed_resources,
        group_labels=kubernetes.group_labels,
        role_labels=kubernetes.role_labels,
    )


def view_config(
    settings: ExtenderSettings,
    distance: DistanceConfig,
    certificates: ClientCertificates | None = None,
) -> ViewConfig:
    """Return what is watched; ``certificates`` are for asking agents."""
    kubernetes, agents = settings.kubernetes, settings.agents
    return ViewConfig(
        levels=distance.levels,
        nodes=NodeRules(
            levels_of=levels_reader(distance.levels),
            resources=kubernetes.managed_resources,
            rdma_labels=kubernetes.rdma_labels,
            rdma_resources=kubernetes.rdma_resources,
        ),
        pods=pod_rules(settings),
        node_selector=kubernetes.node_selector,
        agents=AgentDiscovery(
            urls=agents.urls,
            selector=agents.selector,
            namespace=agents.namespace,
            port=agents.port,
            scheme=agents.scheme,
            template=agents.template,
        ),
        agents_trust=AgentTrust(
            token=None if agents.token is None else agents.token.get_secret_value(),
            certificates=certificates,
        ),
        worker_statuses=kubernetes.worker_statuses,
        publish_seconds=kubernetes.publish_seconds,
        watch=WatchLimits(
            watch_seconds=kubernetes.watch_seconds,
            silence_seconds=kubernetes.silence_seconds,
            listing=ListLimits(page_objects=kubernetes.page_objects),
        ),
        collect=CollectLimits(
            wait_seconds=agents.wait_seconds,
            polls_per_second=agents.polls_per_second,
            max_connections=agents.max_connections,
        ),
        state=StateLimits(forget_report_seconds=agents.forget_seconds),
    )


def body_limits(settings: ExtenderSettings) -> BodyLimits:
    """Return the bounds of requests and answers."""
    limits = settings.limits
    return BodyLimits(
        max_bytes=limits.max_body_bytes,
        max_bodies_bytes=limits.max_bodies_bytes,
        arrive_seconds=limits.body_seconds,
        take_seconds=limits.answer_seconds,
    )


def transport(settings: ExtenderSettings) -> Transport:
    """Return how connections are served, but for TLS."""
    return Transport(
        keepalive_seconds=settings.limits.keepalive_seconds,
        read_buffer_bytes=_READ_BUFFER_BYTES,
        answer_half_closed=True,
    )
