"""Series of writing WorkerStatuses, read when scraped."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.agent.worker_status.service import WorkerStatusService

_PREFIX = "nearkv_agent_worker_status"


class WorkerStatusCollector(Collector):
    """Turns what the service knows into series."""

    def __init__(self, service: WorkerStatusService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield all series."""
        objects = GaugeMetricFamily(
            f"{_PREFIX}_objects", "WorkerStatus objects that this agent keeps.", labels=()
        )
        if self._service.is_on:
            objects.add_metric([], self._service.count)
        yield objects
        writes = CounterMetricFamily(
            f"{_PREFIX}_writes",
            "Writes of WorkerStatus objects: introduced, reported, vanished, or why not.",
            labels=("outcome",),
        )
        for outcome, count in sorted(self._service.writes.items()):
            writes.add_metric([outcome], count)
        yield writes
