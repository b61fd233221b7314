"""Prometheus series of the summary for the extender, and of waking pods."""

from prometheus_client import CollectorRegistry, Counter


class SummaryMetrics:
    """Counters on the agent's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "nearkv_agent_summary_requests",
            "Requests for the node's summary, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.room_announcements = Counter(
            "nearkv_agent_room_announcements",
            "Changes of the Node's annotation that wakes waiting pods: written, or why not.",
            ["outcome"],
            registry=registry,
        )
