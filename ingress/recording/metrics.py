"""Series about decision records and spans."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.ingress.recording.ring import RecordRing
from nearkv.ingress.recording.thinning import Thinning
from nearkv.ingress.tallies import Tally


class RecordMetrics:
    """Counters of what was written and exported; counted on two threads, one for each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._files = Tally(
            "nearkv_ingress_decision_records",
            "Decision records for the file, by outcome (delivered, dropped, failed).",
            ("outcome",),
            registry,
        )
        self._spans = Tally(
            "nearkv_ingress_traced_requests",
            "Requests whose spans were exported, by outcome (delivered, dropped, failed).",
            ("outcome",),
            registry,
        )

    def count_file(self, outcome: str, count: int) -> None:
        """Count records for the file."""
        self._files.add(outcome, by=count)

    def count_spans(self, outcome: str, count: int) -> None:
        """Count requests whose spans were to be exported."""
        self._spans.add(outcome, by=count)


class RingCollector(Collector):
    """Gauges of the ring, and what does not get into it."""

    def __init__(self, ring: RecordRing, thinning: Thinning) -> None:
        self._ring = ring
        self._thinning = thinning

    def collect(self) -> Iterator[Metric]:
        """Yield its length and size, and how many records were skipped."""
        yield CounterMetricFamily(
            "nearkv_ingress_decisions_skipped",
            "Ordinary requests without a record in memory: more than decisions.per_second.",
            value=self._thinning.skipped,
        )
        for name, text, value in (
            ("decisions_kept", "Decision records in memory.", len(self._ring)),
            ("decisions_kept_bytes", "What those take, estimated.", self._ring.size_bytes),
        ):
            yield GaugeMetricFamily(f"nearkv_ingress_{name}", text, value=value)
