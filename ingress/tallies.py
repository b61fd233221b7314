"""Counters and histograms for the hot path, read out when scraped.

The library's own take a lock and check their labels at every event; with one event loop
neither is needed.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter by label values: a dict entry."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str, ...], int] = {}
        registry.register(self)

    def add(self, *labels: str, by: int = 1) -> None:
        """Count ``by`` more under these label values."""
        self._counts[labels] = self._counts.get(labels, 0) + by

    def collect(self) -> Iterator[Metric]:
        """Yield the one family."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Spread:
    """Values over buckets, under one set of label values."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add what was counted to a family."""
        bounds = (*map(floatToGoString, self._bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets, self._sum)


class Spreads(Collector):
    """A histogram by at most one label, made of one :class:`Spread` for each of its values."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: tuple[float, ...],
        registry: CollectorRegistry,
        *,
        label: str | None = None,
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._labels = () if label is None else (label,)
        self._of: dict[str, Spread] = {}
        registry.register(self)

    def of(self, value: str = "") -> Spread:
        """Return the spread under a label value."""
        spread = self._of.get(value)
        if spread is None:
            spread = self._of[value] = Spread(self._bounds)
        return spread

    def collect(self) -> Iterator[Metric]:
        """Yield the one family."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for value, spread in self._of.items():
            spread.add_to(family, (value,) if self._labels else ())
        yield family
