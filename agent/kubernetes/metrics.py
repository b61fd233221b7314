"""Series of following pods, read when scraped."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.agent.kubernetes.peer_listing import PeerListing
from nearkv.agent.kubernetes.service import KubernetesService
from nearkv.agent.node_state import NodeState

_PREFIX = "nearkv_agent_kubernetes_"


class KubernetesCollector(Collector):
    """Turns what the service knows into series; what is unknown has no sample."""

    def __init__(self, service: KubernetesService, peers: PeerListing, state: NodeState) -> None:
        self._service = service
        self._peers = peers
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield all series."""
        service = self._service
        engines = GaugeMetricFamily(
            f"{_PREFIX}engines", "Pods of this node that are followed as engines.", labels=()
        )
        if service.is_on:
            engines.add_metric([], len(service.engines))
        yield engines
        age = GaugeMetricFamily(
            f"{_PREFIX}watch_age_seconds",
            "Time since a watch last heard of the API server; up to ten minutes where nothing "
            "changes.",
            labels=("watch",),
        )
        lists = CounterMetricFamily(
            f"{_PREFIX}lists", "Complete LISTs by watch; each is dear.", labels=("watch",)
        )
        for name, watch in service.watches.items():
            if watch.synced:
                age.add_metric([name], max(self._state.now() - watch.last_heard_at, 0.0))
            lists.add_metric([name], watch.lists)
        yield age
        yield lists
        failures = CounterMetricFamily(
            f"{_PREFIX}watch_failures",
            "Failures of watches, by kind.",
            labels=("watch", "trouble"),
        )
        for (name, trouble), count in sorted(service.failures.items()):
            failures.add_metric([name, trouble], count)
        yield failures
        lists = CounterMetricFamily(
            f"{_PREFIX}peer_lists", "Lists of other agents, by outcome.", labels=("outcome",)
        )
        for outcome, count in sorted(self._peers.outcomes.items()):
            lists.add_metric([outcome], count)
        yield lists
