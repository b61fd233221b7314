"""Prometheus series of the sidecar."""

from prometheus_client import CollectorRegistry, Histogram

from nearkv.ingress.tallies import Tally

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class SidecarMetrics:
    """What became of requests that came with a prefiller's name, and of the others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Tally(
            "nearkv_ingress_sidecar_requests",
            "Requests by the status of the answer.",
            ("status",),
            registry,
        )
        self.prefills = Tally(
            "nearkv_ingress_sidecar_prefills",
            "Prefill legs by how they ended; all but ok leave the prompt to the engine.",
            ("outcome",),
            registry,
        )
        self.decodes = Tally(
            "nearkv_ingress_sidecar_decodes",
            "Requests with a prefiller's parameters: taken by the engine, or sent again without.",
            ("outcome",),
            registry,
        )
        self.broken_streams = Tally(
            "nearkv_ingress_sidecar_broken_streams",
            "Answers that ended early, by cause.",
            ("cause",),
            registry,
        )
        self.pool_failures = Tally(
            "nearkv_ingress_sidecar_pool_watch_failures",
            "Failures of the watches of pool and pods, by name.",
            ("trouble",),
            registry,
        )
        self.prefill_seconds = Histogram(
            "nearkv_ingress_sidecar_prefill_seconds",
            "From the prefill leg's dispatch to its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
