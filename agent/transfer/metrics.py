"""The transfer's Prometheus series: what was counted, and what is so when scraped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.state.model import PathClass

_PREFIX = "nearkv_agent_transfer_"
_SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

FOUND, NOTHING, SKIPPED, PARTLY = "found", "nothing", "skipped", "partly"
"""Outcomes of what is asked of the store, beside those below; ``skipped``: not even tried."""

DONE, FAILED, CANCELLED, RETRIED = "done", "failed", "cancelled", "retried"
"""Outcomes of pulls; ``retried`` counts a first try, beside the outcome of the second."""


REFUSED = "refused"
"""Outcome of probes that the peer had no time or budget for."""


class TransferMetrics:
    """Counters and histograms; labels have few values, none of them a name of a node."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}{name}", text, labels, registry=registry)

        self._pulls = counter(
            "pulls", "Pulls by path, outcome and reason.", "path", "outcome", "reason"
        )
        self._bytes = counter("bytes", "KV bytes brought by pulls that count.", "path")
        self._seconds = Histogram(
            f"{_PREFIX}seconds",
            "Time of pulls that count, with their set-up.",
            ("path",),
            registry=registry,
            buckets=_SECONDS_BUCKETS,
        )
        self._lookups = counter(
            "lookups", "Questions of engines what a lease holds for them.", "outcome", "reason"
        )
        self._registrations = counter(
            "registrations", "Registrations by outcome and reason.", "outcome", "reason"
        )
        self._connection_ends = counter(
            "connection_ends", "Ends of connections of engines.", "cause"
        )
        self._lease_ends = counter("lease_ends", "Ends of leases of this node's engines.", "why")
        self._peer_calls = counter(
            "peer_calls", "Calls of other agents, by call and reason of refusal.", "call", "reason"
        )
        self._certificate_loads = counter(
            "peer_certificate_loads",
            "Renewed TLS files for other agents taken over, or not, by outcome.",
            "outcome",
        )
        self._failed_handshakes = counter(
            "peer_failed_tls_handshakes",
            "TLS connections of other agents that came to nothing, by why.",
            "reason",
        )
        self._store_lookups = counter(
            "store_lookups", "Questions what the shared store has.", "outcome", "reason"
        )
        self._store_puts = counter(
            "store_puts", "Prefixes for the shared store, by what became of them.",
            "outcome", "reason",
        )  # fmt: skip
        self._store_put_bytes = counter("store_put_bytes", "KV bytes put into the shared store.")
        self._probes = counter(
            "probes", "Probes of paths by this node, by outcome and reason.", "outcome", "reason"
        )
        self._detours = counter(
            "same_node_detours", "Pulls within the node that did not go by shared memory."
        )

    def pull_ended(self, path: str, outcome: str, reason: str = "") -> None:
        """Count a pull, or a try of one."""
        self._pulls.labels(path, outcome, reason).inc()

    def pull_done(self, path: str, *, size_bytes: int, seconds: float) -> None:
        """Count what a pull that counts has brought."""
        self._bytes.labels(path).inc(size_bytes)
        self._seconds.labels(path).observe(seconds)

    def detour_taken(self) -> None:
        """Count a pull within the node that did not go by shared memory."""
        self._detours.inc()

    def probe_ended(self, outcome: str, reason: str = "") -> None:
        """Count a probe of a path."""
        self._probes.labels(outcome, reason).inc()

    def lookup_ended(self, reason: str = "") -> None:
        """Count a lookup; without a reason it found something."""
        self._lookups.labels("nothing" if reason else "found", reason).inc()

    def store_asked(self, outcome: str, reason: str = "") -> None:
        """Count a question to the store."""
        self._store_lookups.labels(outcome, reason).inc()

    def store_put(self, outcome: str, reason: str = "", *, size_bytes: int = 0) -> None:
        """Count a prefix that was to be stored, and what of it was."""
        self._store_puts.labels(outcome, reason).inc()
        self._store_put_bytes.inc(size_bytes)

    def registration_ended(self, reason: str = "") -> None:
        """Count a registration; without a reason it was accepted."""
        self._registrations.labels("refused" if reason else "accepted", reason).inc()

    def connection_ended(self, cause: str) -> None:
        """Count the end of an engine's connection."""
        self._connection_ends.labels(cause).inc()

    def lease_ended(self, why: str, count: int = 1) -> None:
        """Count leases that ended."""
        self._lease_ends.labels(why).inc(count)

    def peer_called(self, call: str, reason: str = "") -> None:
        """Count a call of another agent."""
        self._peer_calls.labels(call, reason).inc()

    def certificate_loaded(self, outcome: str) -> None:
        """Count renewed files of TLS between agents."""
        self._certificate_loads.labels(outcome).inc()

    def handshake_failed(self, reason: str) -> None:
        """Count a TLS connection of another agent that came to nothing."""
        self._failed_handshakes.labels(reason).inc()


@dataclass(frozen=True, slots=True)
class TransferGauges:
    """What is so at the moment."""

    inflight_bytes: int = 0
    engines: Mapping[str, int] = field(default_factory=dict)
    leases: Mapping[str, int] = field(default_factory=dict)
    movers: Mapping[str, int] = field(default_factory=dict)
    mover_ends: Mapping[tuple[str, str], int] = field(default_factory=dict)
    path_classes: Sequence[PathClass] = ()


class TransferCollector(Collector):
    """Turns what ``read`` says into series when scraped."""

    def __init__(self, read: Callable[[], TransferGauges]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of the transfer."""
        now = self._read()
        yield GaugeMetricFamily(
            f"{_PREFIX}inflight_bytes", "KV bytes of pulls under way.", value=now.inflight_bytes
        )
        yield _gauges("engines", "Engines registered, by state.", "state", now.engines)
        yield _gauges("leases", "Leases of this node's engines, by state.", "state", now.leases)
        yield _gauges("movers", "Mover processes, by kind.", "kind", now.movers)
        ends = CounterMetricFamily(
            f"{_PREFIX}mover_ends", "Mover processes that ended.", labels=("kind", "cause")
        )
        for labels, count in now.mover_ends.items():
            ends.add_metric(labels, count)
        yield ends
        yield from _path_families(now.path_classes)


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family


def _path_families(classes: Sequence[PathClass]) -> Iterator[Metric]:
    """Yield what paths to this node cost, by class: levels are few, and no node is named."""
    labels = ("class", "path")
    setup = GaugeMetricFamily(
        f"{_PREFIX}path_setup_seconds", "Median measured set-up time of a class.", labels=labels
    )
    speed = GaugeMetricFamily(
        f"{_PREFIX}path_bytes_per_second", "Median measured bandwidth of a class.", labels=labels
    )
    pairs = GaugeMetricFamily(
        f"{_PREFIX}path_pairs", "Measured source nodes of a class.", labels=labels
    )
    age = GaugeMetricFamily(
        f"{_PREFIX}path_age_seconds", "Age of the newest measurement of a class.", labels=labels
    )
    for cost in classes:
        values = (cost.name, cost.path)
        setup.add_metric(values, cost.setup_seconds)
        speed.add_metric(values, cost.bytes_per_second)
        pairs.add_metric(values, cost.pairs)
        age.add_metric(values, cost.age_seconds)
    yield from (setup, speed, pairs, age)
