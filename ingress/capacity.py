"""Series to alarm on and to scale by: free KV, waiting requests, saturation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.freshness import Freshness
from nearkv.ingress.candidates import CandidateBuilder, PromptView
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.pricing import Pricing
from nearkv.ingress.routing import Gate
from nearkv.ingress.saturation import ALARM_LEVELS, Fullness, engines_below, saturation_ratio
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.waiting_room import WaitingRoom


class CapacityCollector(Collector):
    """Reads how full the engines are when scraped."""

    def __init__(
        self,
        settings: IngressSettings,
        knowledge: Knowledge,
        room: WaitingRoom,
        now: Callable[[], float],
    ) -> None:
        self._know = knowledge
        self._room = room
        self._now = now
        self._gate = Gate(settings.gate.min_free_bytes, settings.gate.min_free_ratio)
        self._target_seconds = settings.admission.target_wait_seconds
        self._usual_tokens = settings.cost.unknown_prompt_tokens
        self._pricing = Pricing(knowledge, settings.cost, settings.pd.prior)
        self._builder = CandidateBuilder(
            knowledge.ledger, knowledge.parity, knowledge.suspects, settings.freshness.limits
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        fleet = self._know.fleet
        gauges = capacity_gauges()
        fullness = self._fullness(list(fleet.engines.values()))
        for level, free_ratio in ALARM_LEVELS:
            gauges.alarms.add_metric((level,), engines_below(free_ratio, fullness))
        for model in sorted({name for v in fleet.engines.values() for name in v.info.models}):
            count = self._room.waiting_for(model)
            gauges.waiting.add_metric((model,), count)
            fullness = self._fullness(fleet.serving(model))
            ratio = saturation_ratio(fullness, count, self._gate, self._target_seconds)
            if ratio is not None:
                gauges.saturation.add_metric((model,), ratio)
        return gauges.collect()

    def _fullness(self, views: Sequence[EngineView]) -> list[Fullness]:
        """Return the fullness of the engines that take requests and of which something is known."""
        candidates = self._builder.build(views, PromptView(0, {}), self._now())
        by_id = {view.info.id: view for view in views}
        terms = self._pricing.terms(by_id, candidates, self._usual_tokens)
        return [
            Fullness(c.free_ratio, c.total_bytes, terms[c.engine].wait_ms / 1000)
            for c in candidates
            if not c.avoid and c.freshness is not Freshness.UNKNOWN
        ]


@dataclass(frozen=True, slots=True, eq=False)
class CapacityGauges(Collector):
    """The families, to be filled."""

    alarms: GaugeMetricFamily
    saturation: GaugeMetricFamily
    waiting: GaugeMetricFamily

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield from (self.alarms, self.saturation, self.waiting)


def capacity_gauges() -> CapacityGauges:
    """Return the families without any sample."""
    return CapacityGauges(
        alarms=GaugeMetricFamily(
            "nearkv_ingress_kv_alarm_engines",
            "Engines whose free KV share is below 20 % (warning) or 10 % (critical).",
            labels=("level",),
        ),
        saturation=GaugeMetricFamily(
            "nearkv_ingress_saturation_ratio",
            "Share of a model's capacity in use; above 1, requests wait. Scale by this. Absent"
            " while nothing is known of its engines.",
            labels=("model",),
        ),
        waiting=GaugeMetricFamily(
            "nearkv_ingress_waiting_requests",
            "Requests that wait for an engine to have room.",
            labels=("model",),
        ),
    )
