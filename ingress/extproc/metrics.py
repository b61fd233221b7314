"""Prometheus series of the endpoint picker."""

from prometheus_client import CollectorRegistry

from nearkv.ingress.tallies import Tally


class ExtProcMetrics:
    """Counters of streams, picks and what became of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def tally(name: str, text: str, *labels: str) -> Tally:
            return Tally(f"nearkv_ingress_ext_proc_{name}", text, labels, registry)

        self.streams = tally(
            "streams",
            "Streams of Envoy by how they ended: complete, not_shown (Envoy shows no bodies), "
            "refused, broken_off or unreadable.",
            "outcome",
        )
        self.picks = tally(
            "picks", "Endpoints picked: for one engine (whole) or with a prefiller (split).", "kind"
        )
        self.refusals = tally("refusals", "Requests refused by the picker, by reason.", "reason")
        self.served = tally(
            "served",
            "Answers by who served: the endpoint picked, a fallback, another one, or unknown.",
            "by",
        )
        self.skipped = tally(
            "skipped_engines",
            "Engines left out of picks, by why: no_address (its URL has a name) or not_in_pool.",
            "why",
        )
        self.pool_failures = tally(
            "pool_watch_failures", "Failures of the watches of pool and pods, by name.", "trouble"
        )
