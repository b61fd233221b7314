"""The Prometheus page of an engine double: names, labels and help of vLLM 0.32.

``vllm_families`` covers the families nearkv reads; process and HTTP families are limited to the
start time. Order follows the capture in ``tests/data/vllm/metrics.txt``.
"""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tests.doubles.engine.config import EngineDoubleConfig
from tests.doubles.engine.ranks import Rank
from tests.doubles.engine.statistics import Distribution

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Samples = dict[tuple[str, ...], float]

_WAITING_BY_REASON = (
    "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling"
    " capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked"
    " status). Sum of all reasons equals vllm:num_requests_waiting."
)
_SLEEP_STATE = (
    "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake;"
    " weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
)
_CACHED_BY_SOURCE = (
    "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host"
    " (offloaded to DRAM), disk, p2p (transferred from another vLLM instance) or"
    " external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits +"
    " vllm:external_prefix_cache_hits."
)
_EXTERNAL = "from KV connector cross-instance cache sharing, in terms of number of"


class EngineMetrics(Collector):
    """Turns the statistics of the ranks into metric families when scraped."""

    def __init__(
        self, config: EngineDoubleConfig, ranks: Sequence[Rank], started_at: float
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._started_at = started_at

    def collect(self) -> Iterator[Family]:
        """Yield every family the configuration does not leave out."""
        for family in self._families():
            exposed = family.name + ("_total" if family.type == "counter" else "")
            if not self._config.missing_metrics & {family.name, exposed}:
                yield family

    def _families(self) -> Iterator[Family]:
        start = GaugeMetricFamily(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
        )
        start.add_metric([], self._started_at)
        yield start
        yield from self._gauges()
        yield from self._cache_counters()
        yield from self._token_counters()
        yield from self._histograms()
        yield self._cache_config()

    def _gauges(self) -> Iterator[Family]:
        yield self._gauge(
            "vllm:num_requests_running",
            "Number of requests in model execution batches.",
            lambda rank: {(): rank.statistics.running},
        )
        yield self._gauge(
            "vllm:num_requests_waiting",
            "Number of requests waiting to be processed.",
            lambda rank: {(): rank.statistics.waiting},
        )
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason",
            _WAITING_BY_REASON,
            lambda rank: {("capacity",): rank.statistics.waiting, ("deferred",): 0},
            label="reason",
        )
        yield self._gauge(
            "vllm:engine_sleep_state", _SLEEP_STATE, _sleep_samples, label="sleep_state"
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            lambda rank: {(): rank.cache.used_ratio},
        )

    def _cache_counters(self) -> Iterator[Family]:
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Prefix cache queries, in terms of number of queried tokens.",
            lambda rank: {(): rank.statistics.queries_tokens},
        )
        yield self._counter(
            "vllm:prefix_cache_hits",
            "Prefix cache hits, in terms of number of cached tokens.",
            lambda rank: {(): rank.statistics.device_hit_tokens},
        )
        yield self._counter(
            "vllm:external_prefix_cache_queries",
            f"External prefix cache queries {_EXTERNAL} queried tokens.",
            lambda rank: {(): rank.statistics.external_queries_tokens},
        )
        yield self._counter(
            "vllm:external_prefix_cache_hits",
            f"External prefix cache hits {_EXTERNAL} cached tokens.",
            lambda rank: {(): _external_hits(rank)},
        )
        yield self._counter(
            "vllm:num_preemptions",
            "Cumulative number of preemption from the engine.",
            lambda rank: {(): rank.statistics.preemptions},
        )

    def _token_counters(self) -> Iterator[Family]:
        yield self._counter(
            "vllm:prompt_tokens",
            "Number of prefill tokens processed.",
            lambda rank: {(): rank.statistics.prefilled_tokens},
        )
        yield self._counter(
            "vllm:prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            _source_samples,
            label="source",
        )
        yield self._counter(
            "vllm:prompt_tokens_cached",
            "Number of cached prompt tokens (local + external).",
            lambda rank: {(): rank.statistics.cached_tokens},
        )
        yield self._counter(
            "vllm:prompt_tokens_cached_by_source", _CACHED_BY_SOURCE, _tier_samples, label="source"
        )
        yield self._counter(
            "vllm:generation_tokens",
            "Number of generation tokens processed.",
            lambda rank: {(): rank.statistics.generated_tokens},
        )
        yield self._counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            lambda rank: {(reason,): n for reason, n in rank.statistics.finished.items()},
            label="finished_reason",
        )

    def _histograms(self) -> Iterator[Family]:
        phase = "Histogram of time spent in {} phase for request."
        yield self._histogram(
            "vllm:request_prompt_tokens",
            "Number of prefill tokens processed.",
            lambda rank: rank.statistics.prompt_tokens,
        )
        yield self._histogram(
            "vllm:request_generation_tokens",
            "Number of generation tokens processed.",
            lambda rank: rank.statistics.generation_tokens,
        )
        yield self._histogram(
            "vllm:time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            lambda rank: rank.statistics.first_token,
        )
        yield self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            lambda rank: rank.statistics.end_to_end,
        )
        yield self._histogram(
            "vllm:request_queue_time_seconds",
            phase.format("WAITING"),
            lambda rank: rank.statistics.queue,
        )
        yield self._histogram(
            "vllm:request_inference_time_seconds",
            phase.format("RUNNING"),
            lambda rank: rank.statistics.inference,
        )
        yield self._histogram(
            "vllm:request_prefill_time_seconds",
            phase.format("PREFILL"),
            lambda rank: rank.statistics.prefill,
        )
        yield self._histogram(
            "vllm:request_decode_time_seconds",
            phase.format("DECODE"),
            lambda rank: rank.statistics.decode,
        )
        yield self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            lambda rank: rank.statistics.computed_per_request,
        )

    def _gauge(
        self, name: str, text: str, read: Callable[[Rank], Samples], *, label: str | None = None
    ) -> Family:
        family = GaugeMetricFamily(name, text, labels=_label_names(label))
        for rank, labels, value in self._samples(read):
            family.add_metric(self._label_values(rank, labels), value)
        return family

    def _counter(
        self, name: str, text: str, read: Callable[[Rank], Samples], *, label: str | None = None
    ) -> Family:
        family = CounterMetricFamily(name, text, labels=_label_names(label))
        for rank, labels, value in self._samples(read):
            values = self._label_values(rank, labels)
            family.add_metric(values, value, created=self._started_at)
        return family

    def _histogram(
        self, name: str, text: str, read: Callable[[Rank], Distribution]
    ) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=_label_names(None))
        for rank in self._ranks:
            distribution = read(rank)
            values = self._label_values(rank, ())
            family.add_metric(values, _cumulate(distribution), distribution.total)
            labels = dict(zip(_label_names(None), values, strict=True))
            family.add_sample(name + "_created", labels, self._started_at)
        return family

    def _samples(
        self, read: Callable[[Rank], Samples]
    ) -> Iterator[tuple[Rank, tuple[str, ...], float]]:
        for rank in self._ranks:
            for labels, value in read(rank).items():
                yield rank, labels, value

    def _label_values(self, rank: Rank, labels: tuple[str, ...]) -> list[str]:
        return [str(rank.index), self._config.model, *labels]

    def _cache_config(self) -> Family:
        described = cache_config_labels(self._config)
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=["engine", *described],
        )
        for rank in self._ranks:
            family.add_metric([str(rank.index), *described.values()], 1)
        return family


def render_metrics(metrics: EngineMetrics) -> bytes:
    """Return the text page of one engine."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return generate_latest(registry)


def cache_config_labels(config: EngineDoubleConfig) -> dict[str, str]:
    """Return the labels of ``vllm:cache_config_info`` except ``engine``."""
    size_tokens = config.num_blocks * config.block_size
    return {
        "_block_size_resolved": "True",
        "block_size": str(config.block_size),
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": "None",
        "effective_attention_block_size": str(config.block_size),
        "enable_mamba_shared_prefix_checkpoint": "False",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.92",
        "hash_block_size": "None",
        "is_attention_free": "False",
        "kv_cache_dtype_skip_layers": "[]",
        "kv_cache_layout": "None",
        "kv_cache_max_concurrency": str(size_tokens / config.context_tokens),
        "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes),
        "kv_cache_size_tokens": str(size_tokens),
        "kv_offloading_backend": "native",
        "kv_offloading_size": "None",
        "kv_sharing_fast_prefill": "False",
        "mamba_block_size": "None",
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": "None",
        "mamba_ssm_cache_dtype": "float32",
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(config.num_blocks),
        "num_gpu_blocks_override": str(config.num_blocks),
        "prefix_cache_retention_interval": "0",
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": "None",
        "replayssm_buffer_len": "16",
        "skip_page_size_padded": "None",
        "sliding_window": "None",
        "swa_bounded_replay": "True",
        "use_kda_recoverssm": "False",
        "use_replayssm": "False",
        "user_specified_block_size": "True",
    }


def _label_names(label: str | None) -> list[str]:
    return ["engine", "model_name", *([label] if label else [])]


def _cumulate(distribution: Distribution) -> list[tuple[str, float]]:
    names = [*(str(bound) for bound in distribution.bounds), "+Inf"]
    buckets, seen = [], 0
    for name, count in zip(names, distribution.counts, strict=True):
        seen += count
        buckets.append((name, float(seen)))
    return buckets


def _sleep_samples(rank: Rank) -> Samples:
    level = rank.sleep_level
    return {
        ("awake",): level is None,
        ("weights_offloaded",): level == 1,
        ("discard_all",): level == 2,
    }


def _external_hits(rank: Rank) -> int:
    return rank.statistics.host_hit_tokens + rank.statistics.transferred_tokens


def _source_samples(rank: Rank) -> Samples:
    return {
        ("local_compute",): rank.statistics.computed_tokens,
        ("local_cache_hit",): rank.statistics.device_hit_tokens,
        ("external_kv_transfer",): _external_hits(rank),
    }


def _tier_samples(rank: Rank) -> Samples:
    return {
        ("device",): rank.statistics.device_hit_tokens,
        ("host",): rank.statistics.host_hit_tokens,
        ("p2p",): rank.statistics.transferred_tokens,
        ("disk",): 0,
        ("external_unspecified",): 0,
    }
