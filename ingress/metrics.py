"""The ingress's Prometheus series."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.ingress.fleet import Fleet
from nearkv.ingress.ledger import Ledger

M = TypeVar("M", Counter, Histogram)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROUTING_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)


class ByLabels(Generic[M]):
    """A metric's children by label values, found without the library's lock and checks."""

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._children: dict[tuple[str, ...], M] = {}

    def __call__(self, *labels: str) -> M:
        """Return the child for these label values."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._metric.labels(*labels)
        return child


class IngressMetrics:
    """Counters and histograms, on a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = ByLabels(
            Counter(
                "nearkv_ingress_requests",
                "Requests answered, by how they were routed and the status.",
                ("reason", "status"),
                registry=registry,
            )
        )
        self.decisions = ByLabels(
            Counter(
                "nearkv_ingress_decisions",
                "Routing decisions, by policy, reason and the freshness rung they stood on.",
                ("policy", "reason", "rung"),
                registry=registry,
            )
        )
        self.first_byte_seconds = ByLabels(
            Histogram(
                "nearkv_ingress_first_byte_seconds",
                "From the request's arrival to the first byte of the answer.",
                ("reason",),
                buckets=_SECONDS,
                registry=registry,
            )
        )
        self.routing_seconds = Histogram(
            "nearkv_ingress_routing_seconds",
            "From the request's arrival to its dispatch, tokenization included.",
            buckets=_ROUTING_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "nearkv_ingress_prompt_tokens", "Prompt tokens routed.", registry=registry
        )
        self.predicted_tokens = Counter(
            "nearkv_ingress_predicted_cached_tokens",
            "Prompt tokens predicted to be in the chosen engine's cache.",
            registry=registry,
        )
        self.tokenizations = ByLabels(
            Counter(
                "nearkv_ingress_tokenizations",
                "Where token ids came from; failed means that there were none.",
                ("source",),
                registry=registry,
            )
        )
        self.retries = Counter(
            "nearkv_ingress_retries",
            "Requests sent to another engine before the first byte.",
            registry=registry,
        )
        self.broken_streams = ByLabels(
            Counter(
                "nearkv_ingress_broken_streams",
                "Answers that ended early, by cause.",
                ("cause",),
                registry=registry,
            )
        )
        self.stream_errors = ByLabels(
            Counter(
                "nearkv_ingress_agent_stream_errors",
                "Agent streams that broke, by cause.",
                ("cause",),
                registry=registry,
            )
        )
        self.parity = ByLabels(
            Counter(
                "nearkv_ingress_parity_checks",
                "Responses whose reported cached tokens were compared with the prediction.",
                ("outcome",),
                registry=registry,
            )
        )


class FleetCollector(Collector):
    """Series read from the fleet when scraped."""

    def __init__(self, fleet: Fleet, ledger: Ledger) -> None:
        self._fleet = fleet
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of index, agents and ledger."""
        size = self._fleet.index.size
        yield _gauge("index_blocks", "Blocks in the prefix index.", size.blocks)
        yield _gauge("index_bytes", "Estimated memory of the index.", size.estimated_bytes)
        yield _gauge("index_limit_bytes", "Memory bound of the index.", size.limit_bytes)
        yield _gauge("index_refused_blocks", "Blocks refused by the bound.", size.refused)
        yield _gauge("in_flight_requests", "Requests in flight.", self._ledger.total_requests)
        yield _gauge("engines", "Engines known.", len(self._fleet.engines))
        agents = self._fleet.agents.values()
        connected = sum(agent.connected for agent in agents)
        yield _gauge("agents_connected", "Agents whose stream is open.", connected)
        yield _gauge("agents", "Agents configured.", len(agents))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"nearkv_ingress_{name}", text, value=value)
