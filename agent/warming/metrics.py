"""The series of warm-up."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.agent.warming.service import LOAD_OUTCOMES, WarmService


class WarmCollector(Collector):
    """Turns what the service knows into series; prefix ids are never labels."""

    def __init__(self, service: WarmService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield all series."""
        yield GaugeMetricFamily(
            "nearkv_agent_warm_prefixes", "Named prefixes kept.", value=len(self._service.book)
        )
        yield GaugeMetricFamily(
            "nearkv_agent_warm_loads_under_way",
            "Loads of prefixes that wait or run.",
            value=self._service.under_way,
        )
        loads = CounterMetricFamily(
            "nearkv_agent_warm_loads",
            "Loads of a prefix into an engine, by outcome.",
            labels=("outcome",),
        )
        for outcome in LOAD_OUTCOMES:
            loads.add_metric([outcome], self._service.loads[outcome])
        yield loads
