"""Links as Prometheus series, read when scraped.

Labels are device names, at most ``links.max_devices`` of each sort, and fixed words.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.agent.links.judging import LinkHealth, judge_link
from nearkv.agent.links.service import LinkService

_PREFIX = "nearkv_agent_"
_BYTES_PER_GBIT = 1e9 / 8


class LinkCollector(Collector):
    """Turns the latest reading into series; what is unknown has no sample."""

    def __init__(self, links: LinkService) -> None:
        self._links = links
        self._watch = links.watch

    def collect(self) -> Iterator[Metric]:
        """Yield all series of links."""
        yield from self._link_families()
        yield from self._node_families()

    def _each(self) -> Iterator[tuple[str, str, bool | None, float | None]]:
        """Yield (link, kind, up, speed in Gbit/s)."""
        links = self._watch.latest
        if links is None:
            return
        for name, _, port in links.rdma_links():
            yield name, port.kind, port.up, port.speed_gbps
        for net in links.nets:
            yield net.name, net.kind, net.up, net.speed_gbps

    def _link_families(self) -> Iterator[Metric]:
        labels = ("link", "kind")
        up = GaugeMetricFamily(f"{_PREFIX}link_up", "1 where a link carries data.", labels=labels)
        speed = GaugeMetricFamily(
            f"{_PREFIX}link_speed_bytes_per_second", "Speed of a link that is up.", labels=labels
        )
        sound = GaugeMetricFamily(
            f"{_PREFIX}link_sound",
            "1 where a link that is up had no faults lately, 0 where it had.",
            labels=labels,
        )
        errors = CounterMetricFamily(
            f"{_PREFIX}link_errors",
            "Errors of a link since the agent first saw it, by kind.",
            labels=("link", "error"),
        )
        for name, kind, is_up, speed_gbps in self._each():
            health, _ = judge_link(up=is_up, recent=self._watch.errors.recent(name))
            if is_up is not None:
                up.add_metric([name, kind], float(is_up))
            if is_up:
                sound.add_metric([name, kind], float(health is LinkHealth.OK))
                if speed_gbps is not None:
                    speed.add_metric([name, kind], speed_gbps * _BYTES_PER_GBIT)
            for error, count in self._watch.errors.totals(name).items():
                errors.add_metric([name, error], count)
        yield from (up, speed, sound, errors)

    def _node_families(self) -> Iterator[Metric]:
        watch = self._watch
        usable = GaugeMetricFamily(f"{_PREFIX}rdma_usable", "1 where KV can move by RDMA.")
        if self._links.rdma.usable is not None:
            usable.add_metric([], float(self._links.rdma.usable))
        omitted = GaugeMetricFamily(
            f"{_PREFIX}links_omitted", "Devices beyond links.max_devices, which are not read."
        )
        if watch.latest is not None:
            omitted.add_metric([], watch.latest.omitted)
        nearest = GaugeMetricFamily(
            f"{_PREFIX}gpu_adapter",
            "The adapter of a GPU and what they have in common; always 1.",
            labels=("gpu", "adapter", "nearness"),
        )
        for pair in watch.affinities:
            nearest.add_metric([pair.gpu, pair.adapter, pair.nearness.value], 1.0)
        age = GaugeMetricFamily(f"{_PREFIX}links_age_seconds", "Age of the last reading of links.")
        if watch.age_seconds is not None:
            age.add_metric([], watch.age_seconds)
        failures = CounterMetricFamily(
            f"{_PREFIX}link_reading_failures", "Readings of links that failed.", labels=("reason",)
        )
        for reason, count in watch.counts.failures.items():
            failures.add_metric([reason], count)
        yield from (usable, omitted, nearest, age, failures)
