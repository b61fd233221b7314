"""The ingress's Prometheus series."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.ingress.fleet import Fleet
from nearkv.ingress.ledger import Ledger
from nearkv.ingress.tallies import Spread, Spreads, Tally

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROUTING_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)
_RATIOS = (0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4, 10)


class PdMetrics:
    """Series about requests that two engines serve."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Tally(
            "nearkv_ingress_pd_decisions",
            "Plans for models whose KV can move, by outcome (pd, pull, local) and why.",
            ("outcome", "why"),
            registry,
        )
        self.legs = Tally(
            "nearkv_ingress_pd_legs",
            "Requests sent for split requests: prefill and decode legs, by how they ended.",
            ("leg", "outcome"),
            registry,
        )
        self.releases = Tally(
            "nearkv_ingress_pd_releases",
            "Leases given back because the decode engine did not get to answer.",
            ("outcome",),
            registry,
        )
        self.prefill_seconds = Histogram(
            "nearkv_ingress_pd_prefill_seconds",
            "From the prefill leg's dispatch to its answer.",
            buckets=_SECONDS,
            registry=registry,
        )


class AdmissionMetrics:
    """Series about requests that wait, and about tenants."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waits = Tally(
            "nearkv_ingress_admission_waits",
            "Requests that waited for room, by how that ended (admitted, timeout, full, gone).",
            ("outcome",),
            registry,
        )
        self.wait_seconds = Histogram(
            "nearkv_ingress_admission_wait_seconds",
            "How long requests waited for room.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.tenants = Tally(
            "nearkv_ingress_tenant_requests",
            "Requests by tenant and outcome (admitted, tenant_requests, tenant_tokens).",
            ("tenant", "outcome"),
            registry,
        )
        self.key_files = Tally(
            "nearkv_ingress_tenant_file_loads",
            "Readings of the file of tenants, by outcome (loaded, failed).",
            ("outcome",),
            registry,
        )


def first_token_ratio(registry: CollectorRegistry) -> Histogram:
    """Return the histogram that tells how well first tokens are predicted."""
    return Histogram(
        "nearkv_ingress_first_token_predicted_ratio",
        "Predicted over measured time to the first token, of streamed answers (policy cost).",
        buckets=_RATIOS,
        registry=registry,
    )


class IngressMetrics:
    """Counters and histograms, on a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def tally(name: str, text: str, *labels: str) -> Tally:
            return Tally(f"nearkv_ingress_{name}", text, labels, registry)

        self.requests = tally(
            "requests",
            "Requests answered, by how they were routed and the status.",
            *("reason", "status"),
        )
        self.decisions = tally(
            "decisions",
            "Routing decisions, by policy, reason and the freshness rung they stood on.",
            *("policy", "reason", "rung"),
        )
        self._first_byte_seconds = Spreads(
            "nearkv_ingress_first_byte_seconds",
            "From the request's arrival to the first byte of the answer.",
            _SECONDS,
            registry,
            label="reason",
        )
        self.routing_seconds = Spreads(
            "nearkv_ingress_routing_seconds",
            "From the request's arrival to its dispatch, tokenization included.",
            _ROUTING_SECONDS,
            registry,
        ).of()
        self.prompt_tokens = tally("prompt_tokens", "Prompt tokens routed.")
        self.predicted_tokens = tally(
            "predicted_cached_tokens",
            "Prompt tokens predicted to be in the chosen engine's cache.",
        )
        self.tokenizations = tally(
            "tokenizations",
            "Where token ids came from; failed means that there were none, distrusted that they"
            " were a guess and not used.",
            "source",
        )
        self.retries = tally(
            "retries",
            "Requests sent once more before the first byte, by how the engine before had failed.",
            "reason",
        )
        self.retries_refused = tally(
            "retries_refused", "Requests not sent once more, by why (limit, budget).", "why"
        )
        self.hedges = tally(
            "hedges",
            "Late first bytes: a second engine was first (won) or not (lost), or could not be "
            "asked (no_budget, no_engine).",
            "outcome",
        )
        self.broken_streams = tally(
            "broken_streams", "Answers that ended early, by cause.", "cause"
        )
        self.stream_errors = tally(
            "agent_stream_errors", "Agent streams that broke, by cause.", "cause"
        )
        self.agent_list_failures = tally(
            "agent_list_failures",
            "Failed requests for the list of agents to the API server, by reason.",
            "reason",
        )
        self.certificate_loads = tally(
            "certificate_loads",
            "Renewed TLS files for agents taken over, or not, by outcome.",
            "outcome",
        )
        self.parity = tally(
            "parity_checks",
            "Responses whose reported cached tokens were compared with the prediction.",
            "outcome",
        )

        self.guesses = tally(
            "guess_checks",
            "Responses whose reported cached tokens were compared with what guessed tokens"
            " predicted.",
            "outcome",
        )
        self.stateful = tally(
            "stateful_requests",
            "Requests about an earlier response, by what was known of the engine that made it"
            " (known, found, unknown, gone).",
            "outcome",
        )
        self.first_token_ratio = first_token_ratio(registry)
        self.pd = PdMetrics(registry)
        self.admission = AdmissionMetrics(registry)

    def first_byte(self, reason: str) -> Spread:
        """Return the histogram of first bytes for a routing reason."""
        return self._first_byte_seconds.of(reason)


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
        yield CounterMetricFamily(
            "nearkv_ingress_index_refused_blocks", "Blocks refused by the bound.", size.refused
        )
        yield _gauge("in_flight_requests", "Requests in flight.", self._ledger.total_requests)
        yield _gauge("engines", "Engines known.", len(self._fleet.engines))
        agents = self._fleet.agents.values()
        connected = sum(agent.connected for agent in agents)
        listed = sum(agent.listed for agent in agents)
        yield _gauge("agents_connected", "Agents whose stream is open.", connected)
        yield _gauge("agents", "Agents that are configured, or found in Kubernetes.", listed)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"nearkv_ingress_{name}", text, value=value)
