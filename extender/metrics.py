"""The extender's Prometheus series.

kube-scheduler drops a failed prioritize without a word, so these are the only place where a
broken scorer shows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.extender.view.cluster import ViewStats

_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_NODES = (1, 2, 5, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000)


class ExtenderMetrics:
    """Counters and histograms, on a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"nearkv_extender_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(
                f"nearkv_extender_{name}", text, labels, buckets=buckets, registry=registry
            )

        self.request_seconds = histogram(
            "request_seconds",
            "From the whole body to the whole answer, by verb and by how nodes are named.",
            _SECONDS,
            *("verb", "mode"),
        )
        self.candidates = histogram("candidates", "Nodes of a request.", _NODES, "verb")
        self.rejected_nodes = counter(
            "rejected_nodes", "Nodes that filter rejected, by reason.", "reason"
        )
        self.all_rejected = counter(
            "all_rejected", "Filter answers that left a pod no node of those offered."
        )
        self.neutral_answers = counter(
            "neutral_answers",
            "Answers to prioritize with equal scores for all nodes, by reason.",
            "reason",
        )
        self.internal_failures = counter(
            "internal_failures",
            "Defects met while answering; the answer was neutral nevertheless.",
            "verb",
        )
        self.bad_requests = counter(
            "bad_requests", "Requests that could not be answered, by reason.", *("verb", "reason")
        )
        self.ignored_annotations = counter(
            "ignored_annotations", "Pod annotations that could not be read.", "annotation"
        )
        self.certificate_loads = counter(
            "certificate_loads", "Renewed TLS files, by whether they could be used.", "outcome"
        )
        self.failed_handshakes = counter(
            "failed_tls_handshakes", "TLS connections of others that came to nothing.", "reason"
        )


@dataclass(frozen=True, slots=True)
class Gauges:
    """What is read when scraped; ``None`` is not known, and has no sample."""

    snapshot_age_seconds: float | None
    stats: ViewStats | None
    ledger_pods: int
    decisions: int
    decisions_bytes: int


class GaugeCollector(Collector):
    """Series read from the running parts when scraped."""

    def __init__(self, read: Callable[[], Gauges]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, and the counters that the view keeps itself."""
        now = self._read()
        yield _gauge(
            "snapshot_age_seconds",
            "Time since the API server was last heard, by the watch that is silent for longer.",
            now.snapshot_age_seconds,
        )
        yield _gauge("ledger_pods", "Pods expected somewhere but not seen yet.", now.ledger_pods)
        yield _gauge("decisions", "Decisions kept for /v1/explain.", now.decisions)
        yield _gauge("decisions_bytes", "What those take, estimated.", now.decisions_bytes)
        yield from _view_sizes(now.stats)
        yield from _view_failures(now.stats)


def _view_sizes(stats: ViewStats | None) -> Iterator[Metric]:
    sizes = (
        ("nodes", "Nodes known."),
        ("pods", "Pods on nodes that count: with devices, or of a group."),
        ("groups", "Groups of engines known."),
        ("reports", "Nodes whose agent, or WorkerStatus, has reported."),
        ("agents", "Agents that are asked for reports."),
        ("agents_failing", "Agents whose last answer failed."),
        ("measured_pairs", "Pairs of nodes between which moving KV was measured."),
    )
    for name, text in sizes:
        yield _gauge(name, text, None if stats is None else getattr(stats, name))


def _view_failures(stats: ViewStats | None) -> Iterator[Metric]:
    watches = _counter(
        "watch_failures", "Watches of the API server that failed, by reason.", "watch", "reason"
    )
    polls = _counter("agent_failures", "Questions to agents that failed, by reason.", "reason")
    refused = _counter("reports_refused", "Reports that must not count, by reason.", "reason")
    left_out = _counter("groups_left_out", "Times that a group found no room in the snapshot.")
    if stats is not None:
        for (watch, reason), count in stats.watch_failures.items():
            watches.add_metric([watch, reason], count)
        for reason, count in stats.poll_failures.items():
            polls.add_metric([reason], count)
        for reason, count in stats.reports_refused.items():
            refused.add_metric([reason], count)
        left_out.add_metric([], stats.groups_left_out)
    yield from (watches, polls, refused, left_out)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"nearkv_extender_{name}", text, labels=labels)


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"nearkv_extender_{name}", text, value=value)
