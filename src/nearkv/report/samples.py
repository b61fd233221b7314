"""Prometheus text as series, and what changed between two scrapes (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
_MOST_SAMPLES = 200_000


@dataclass(frozen=True, slots=True)
class Scrape:
    """The series of one endpoint at one time (Unix seconds)."""

    url: str
    at: float
    series: Mapping[SeriesKey, float]


def parse_scrape(url: str, text: str, at: float) -> Scrape:
    """Parse Prometheus text; raises ``ValueError`` when it is none, or too long."""
    series: dict[SeriesKey, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
            if len(series) > _MOST_SAMPLES:
                raise ValueError(f"more than {_MOST_SAMPLES} series")
    return Scrape(url, at, series)


@dataclass(frozen=True, slots=True)
class Change:
    """One endpoint over a while: how much counters grew, and what gauges were on average.

    With one scrape only, ``grown`` is since the endpoint's start and ``seconds`` its age, as far
    as it says when it started.
    """

    url: str
    seconds: float | None
    grown: Mapping[SeriesKey, float]
    mean: Mapping[SeriesKey, float]


def since_start(scrape: Scrape) -> Change:
    """Return what one scrape says: counters since the start."""
    started_at = next(
        (v for (name, _), v in scrape.series.items() if name == "process_start_time_seconds"), None
    )
    seconds = None if started_at is None else max(0.0, scrape.at - started_at)
    return Change(scrape.url, seconds, scrape.series, scrape.series)


def between(first: Scrape, second: Scrape) -> Change:
    """Return what changed; a counter that fell began anew, so all it has is new.

    A series that only the second scrape has began in between.
    """
    grown = {}
    mean = {}
    for key, value in second.series.items():
        before = first.series.get(key)
        grown[key] = value if before is None or value < before else value - before
        mean[key] = value if before is None else (before + value) / 2
    return Change(second.url, second.at - first.at, grown, mean)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many observations were at most each bound; the last bound is infinity."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def count(self) -> float:
        """All observations."""
        return self.counts[-1] if self.counts else 0.0

    def bound_of(self, share: float) -> float:
        """Return the upper bound of the bucket that the quantile lies in."""
        wanted = share * self.count
        return next((b for b, c in zip(self.bounds, self.counts, strict=True) if c >= wanted), 0.0)

    @property
    def mean(self) -> float:
        """The mean; 0 without observations."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float | None:
        """Return the value that a share does not exceed, within its bucket by proportion.

        Beyond the last finite bound, that bound. ``None`` without observations.
        """
        if not self.count:
            return None
        wanted = share * self.count
        below_bound = below_count = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= wanted:
                if bound == float("inf"):
                    return below_bound
                inside = count - below_count
                part = (wanted - below_count) / inside if inside else 1.0
                return below_bound + (bound - below_bound) * part
            below_bound, below_count = bound, count
        return below_bound


def histogram_of(buckets: Iterable[tuple[float, float]], total: float) -> Histogram:
    """Return a histogram from (bound, cumulative count), equal bounds added up."""
    sums: dict[float, float] = {}
    for bound, count in buckets:
        sums[bound] = sums.get(bound, 0.0) + count
    ordered = sorted(sums.items())
    return Histogram(tuple(b for b, _ in ordered), tuple(c for _, c in ordered), total)
