"""What was found, from scrapes or from Prometheus alike (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from nearkv.report.errors import UnknownFigureError
from nearkv.report.samples import Change, Histogram, SeriesKey, histogram_of
from nearkv.report.series import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    PREFILL_SECONDS,
    PROCESS_LABELS,
    Series,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sums of counters, means of gauges and sums of histograms over all endpoints.

    ``where`` says in words where was looked, ``engine_seconds`` how long the engines with
    histograms ran in the window, all together, and ``engines`` how many they are.
    """

    where: str
    counters: Mapping[Series, float] = field(default_factory=dict)
    gauges: Mapping[Series, Sequence[float]] = field(default_factory=dict)
    histograms: Mapping[Series, Histogram] = field(default_factory=dict)
    engines: int = 0
    engine_seconds: float | None = None

    def counter(self, series: Sequence[Series]) -> float:
        """Return the first counter of these that is there; raises :class:`UnknownFigureError`."""
        return self._first(self.counters, series)

    def gauge_values(self, series: Sequence[Series]) -> Sequence[float]:
        """Return the means of the first gauge of these that is there, one for each engine."""
        return self._first(self.gauges, series)

    def histogram(self, series: Sequence[Series]) -> Histogram:
        """Return the first histogram of these that is there."""
        return self._first(self.histograms, series)

    def _first(self, found: Mapping[Series, T], series: Sequence[Series]) -> T:
        for each in series:
            if each in found:
                return found[each]
        raise UnknownFigureError(f"metric {series[0]} not found at {self.where}")


def gather(changes: Sequence[Change], *, where: str) -> Evidence:
    """Return the evidence of scrapes."""
    counters: dict[Series, float] = {}
    gauges: dict[Series, list[float]] = {}
    histograms: dict[Series, Histogram] = {}
    for series in COUNTERS:
        values = [v for change in changes for _, v in _matching(change.grown, series, "")]
        if values:
            counters[series] = sum(values)
    for series in GAUGES:
        values = [v for change in changes for _, v in _matching(change.mean, series, "")]
        if values:
            gauges[series] = values
    for series in HISTOGRAMS:
        grown = [change.grown for change in changes]
        buckets = [b for each in grown for b in _buckets(each, series)]
        if buckets:
            total = sum(v for each in grown for _, v in _matching(each, series, "_sum"))
            histograms[series] = histogram_of(buckets, total)
    serving = [change for change in changes if _engines_of(change)]
    seconds = [change.seconds for change in serving]
    known = [s * _engines_of(c) for s, c in zip(seconds, serving, strict=True) if s is not None]
    return Evidence(
        where=where,
        counters=counters,
        gauges=gauges,
        histograms=histograms,
        engines=sum(map(_engines_of, serving)),
        engine_seconds=sum(known) if known and len(known) == len(serving) else None,
    )


def _engines_of(change: Change) -> int:
    """Return how many engines (or ranks) of an endpoint have histograms of prefills."""
    return max(
        (len(_matching(change.grown, series, "_sum")) for series in PREFILL_SECONDS),
        default=0,
    )


def _buckets(series_by_key: Mapping[SeriesKey, float], series: Series) -> list[tuple[float, float]]:
    return [
        (float(labels["le"]), value)
        for labels, value in _matching(series_by_key, series, "_bucket")
        if "le" in labels
    ]


def _matching(
    series_by_key: Mapping[SeriesKey, float], series: Series, suffix: str
) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of each series, processes of one engine taken together."""
    name = series.name + suffix
    together: dict[tuple[tuple[str, str], ...], float] = {}
    for (found, pairs), value in series_by_key.items():
        if found == name and all(pair in pairs for pair in series.labels):
            kept = tuple(pair for pair in pairs if pair[0] not in PROCESS_LABELS)
            together[kept] = max(together.get(kept, value), value)
    return [(dict(pairs), value) for pairs, value in together.items()]
