"""Series about engines that fail, read when scraped."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.ingress.breaker import BreakerState
from nearkv.ingress.fleet import Fleet
from nearkv.ingress.suspects import Suspects


class BreakerCollector(Collector):
    """Counts the breakers by state, and how often they changed."""

    def __init__(self, fleet: Fleet, suspects: Suspects, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._suspects = suspects
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge and the counter."""
        now = self._now()
        states = Counter(
            self._suspects.state_of(view.info.id, view.info.incarnation, now)
            for view in self._fleet.engines.values()
        )
        gauge = GaugeMetricFamily(
            "nearkv_ingress_breakers",
            "Engines by the state of their circuit breaker (closed, open, half-open).",
            labels=("state",),
        )
        for state in BreakerState:
            gauge.add_metric((state.value,), states[state])
        yield gauge
        changes = CounterMetricFamily(
            "nearkv_ingress_breaker_changes",
            "Circuit breakers that opened or closed.",
            labels=("to",),
        )
        for change in ("opened", "closed"):
            changes.add_metric((change,), self._suspects.changes[change])
        yield changes
