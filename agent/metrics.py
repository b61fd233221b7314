"""The agent's Prometheus series, read from the state when scraped.

Names and units follow the Prometheus naming rules under one prefix. The article's names are
kept as suffixes; its set of prefix ids is JSON (``/v1/state``), never a label.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearkv.agent.engine_tracking import EngineTracker
from nearkv.agent.node_state import SNAPSHOT_REASONS, NodeState
from nearkv.state.model import EngineGauges

_ENGINE_LABELS = ("engine", "model")

_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("kv_cache_used_ratio", "Share of the KV cache held by running requests.", "kv_used_ratio"),
    ("kv_cache_used_bytes", "KV cache held by running requests.", "kv_used_bytes"),
    ("kv_cache_free_bytes", "KV cache that new requests could take.", "kv_free_bytes"),
    ("kv_cache_total_capacity_bytes", "Size of the KV cache.", "kv_total_bytes"),
    ("kv_cache_total_capacity_tokens", "Size of the KV cache in tokens.", "kv_total_tokens"),
    ("gpu_queue_depth", "Requests waiting in the engine.", "requests_waiting"),
    ("gpu_running_requests", "Requests running in the engine.", "requests_running"),
)


def certificate_loads(registry: CollectorRegistry) -> Callable[[str], None]:
    """Register the count of renewed TLS files, and return what counts an outcome."""
    loads = Counter(
        "nearkv_agent_certificate_loads",
        "Renewed TLS files taken over, or not, by outcome.",
        ("outcome",),
        registry=registry,
    )
    for outcome in ("reloaded", "failed"):
        loads.labels(outcome)
    return lambda outcome: loads.labels(outcome).inc()


def failed_handshakes(registry: CollectorRegistry) -> Callable[[str], None]:
    """Register the count of TLS connections that came to nothing, and return what counts one."""
    failed = Counter(
        "nearkv_agent_failed_tls_handshakes",
        "TLS connections of readers that came to nothing, by why; they only see them break.",
        ("reason",),
        registry=registry,
    )
    return lambda reason: failed.labels(reason).inc()


class NodeCollector(Collector):
    """Turns the node's state into series; what is unknown has no sample."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield all series of the node."""
        yield from self._gauge_families()
        yield from self._prefix_families()
        yield from self._table_families()
        yield from self._event_families()
        yield _gauge("state_consumers", "Streams being served.", self._state.consumers)
        yield CounterMetricFamily(
            "nearkv_agent_engine_watch_failures",
            "How often watching an engine failed, which is a defect, and began anew.",
            value=self._state.watch_failures,
        )
        yield _gauge("state_ring_bytes", "Deltas kept for consumers.", self._state.log.ring_bytes)
        snapshots = CounterMetricFamily(
            "nearkv_agent_state_snapshots",
            "Snapshots that consumers got, by why; busy counts those that were put off.",
            labels=("reason",),
        )
        for reason in SNAPSHOT_REASONS:
            snapshots.add_metric([reason], self._state.snapshots_served[reason])
        yield snapshots

    def _trackers(self) -> Iterator[tuple[EngineTracker, list[str], EngineGauges | None]]:
        for engine, tracker in self._state.trackers.items():
            yield tracker, [engine, tracker.identity.model], self._state.log.gauges.get(engine)

    def _gauge_families(self) -> Iterator[Metric]:
        for name, text, attribute in _GAUGES:
            family = GaugeMetricFamily(f"nearkv_agent_{name}", text, labels=_ENGINE_LABELS)
            for _, labels, gauges in self._trackers():
                value = None if gauges is None else getattr(gauges, attribute)
                if value is not None:
                    family.add_metric(labels, value)
            yield family
        age = GaugeMetricFamily(
            "nearkv_agent_metrics_age_seconds", "Age of the last scrape.", labels=_ENGINE_LABELS
        )
        up = GaugeMetricFamily(
            "nearkv_agent_engine_up", "1 where the engine is ready.", labels=_ENGINE_LABELS
        )
        for tracker, labels, _ in self._trackers():
            if tracker.metrics_at is not None:
                age.add_metric(labels, self._state.now() - tracker.metrics_at)
            up.add_metric(labels, float(tracker.info.state == "ready"))
        yield age
        yield up

    def _prefix_families(self) -> Iterator[Metric]:
        hits = CounterMetricFamily(
            "nearkv_agent_kv_cache_prefix_hits_tokens",
            "Prompt tokens found in the engine's prefix cache.",
            labels=_ENGINE_LABELS,
        )
        misses = CounterMetricFamily(
            "nearkv_agent_kv_cache_prefix_miss_tokens",
            "Prompt tokens looked up but not found in the engine's prefix cache.",
            labels=_ENGINE_LABELS,
        )
        for _, labels, gauges in self._trackers():
            if gauges is None or gauges.prefix_hits_tokens is None:
                continue
            hits.add_metric(labels, gauges.prefix_hits_tokens)
            if gauges.prefix_queries_tokens is not None:
                misses.add_metric(labels, gauges.prefix_queries_tokens - gauges.prefix_hits_tokens)
        yield hits
        yield misses

    def _table_families(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "nearkv_agent_blocks", "Blocks known.", labels=(*_ENGINE_LABELS, "tier")
        )
        size = GaugeMetricFamily(
            "nearkv_agent_block_table_bytes", "Memory of the block table.", labels=_ENGINE_LABELS
        )
        orphans = GaugeMetricFamily(
            "nearkv_agent_orphan_blocks", "Blocks whose parent is unknown.", labels=_ENGINE_LABELS
        )
        refused = CounterMetricFamily(
            "nearkv_agent_blocks_refused",
            "Blocks not kept because the table is full.",
            labels=_ENGINE_LABELS,
        )
        evicted = CounterMetricFamily(
            "nearkv_agent_blocks_evicted",
            "Blocks given up, the least used first, to stay within the memory bound.",
            labels=_ENGINE_LABELS,
        )
        for tracker, labels, _ in self._trackers():
            for tier, count in tracker.table.blocks_by_tier().items():
                blocks.add_metric([*labels, tier], count)
            size.add_metric(labels, tracker.table.estimated_bytes)
            orphans.add_metric(labels, tracker.table.orphan_count)
            refused.add_metric(labels, tracker.table.counts.refused)
            evicted.add_metric(labels, tracker.table.counts.evicted)
        yield from (blocks, size, orphans, refused, evicted)

    def _event_families(self) -> Iterator[Metric]:
        messages = CounterMetricFamily(
            "nearkv_agent_event_messages", "KV event messages applied.", labels=_ENGINE_LABELS
        )
        stored = CounterMetricFamily(
            "nearkv_agent_blocks_stored", "Blocks that engines stored.", labels=_ENGINE_LABELS
        )
        removed = CounterMetricFamily(
            "nearkv_agent_blocks_removed", "Blocks that engines evicted.", labels=_ENGINE_LABELS
        )
        troubles = CounterMetricFamily(
            "nearkv_agent_event_troubles",
            "Event messages and events that went wrong, by reason.",
            labels=(*_ENGINE_LABELS, "reason"),
        )
        for tracker, labels, _ in self._trackers():
            counts = tracker.counts
            messages.add_metric(labels, counts.messages)
            stored.add_metric(labels, counts.blocks_stored)
            removed.add_metric(labels, counts.blocks_removed)
            reasons = {
                "gap": counts.gaps,
                "restart": counts.restarts,
                "replay_truncated": counts.truncated_replays,
                "replay_unanswered": counts.unanswered_replays,
                "undecodable": counts.undecodable,
                "bad_tokens": tracker.table.counts.bad_tokens,
                "orphan_dropped": tracker.table.counts.orphans_dropped,
                "unknown_removed": tracker.table.counts.unknown_removed,
                "unresolved_tier": tracker.table.counts.unresolved_tier,
                **counts.skipped,
            }
            for reason, count in reasons.items():
                troubles.add_metric([*labels, reason], count)
        yield from (messages, stored, removed, troubles)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"nearkv_agent_{name}", text, value=value)
