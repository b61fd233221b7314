"""The series that a report looks at, by what they tell (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """A metric by name, and of its series those with these label values."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Return it as it is written in PromQL."""
        matchers = ",".join(f'{name}="{value}"' for name, value in self.labels)
        return f"{self.name}{{{matchers}}}" if matchers else self.name


def _stage(name: str) -> Series:
    return Series("sglang:per_stage_req_latency_seconds", (("stage", name),))


PREFILL_SECONDS = (Series("vllm:request_prefill_time_seconds"), _stage("prefill_forward"))
DECODE_SECONDS = (Series("vllm:request_decode_time_seconds"), _stage("decode_forward"))
QUEUE_SECONDS = (Series("vllm:request_queue_time_seconds"), _stage("prefill_waiting"))
PROMPT_TOKENS = (Series("vllm:prompt_tokens_total"), Series("sglang:prompt_tokens_total"))
COMPUTED_TOKENS = (
    Series("vllm:prompt_tokens_by_source_total", (("source", "local_compute"),)),
    Series("sglang:realtime_tokens_total", (("mode", "prefill_compute"),)),
)
AGENT_HIT_TOKENS = Series("nearkv_agent_kv_cache_prefix_hits_tokens_total")
AGENT_MISSED_TOKENS = Series("nearkv_agent_kv_cache_prefix_miss_tokens_total")
ENGINE_HITS_AND_ASKED = (
    (Series("vllm:prefix_cache_hits_total"), Series("vllm:prefix_cache_queries_total")),
    (Series("sglang:cached_tokens_total"), Series("sglang:prompt_tokens_total")),
)
ROUTED_TOKENS = (Series("nearkv_ingress_prompt_tokens_total"),)
PREDICTED_TOKENS = (Series("nearkv_ingress_predicted_cached_tokens_total"),)
FIRST_BYTE_SECONDS = (Series("nearkv_ingress_first_byte_seconds"),)
USED_RATIO = (
    Series("nearkv_agent_kv_cache_used_ratio"),
    Series("vllm:kv_cache_usage_perc"),
    Series("sglang:token_usage"),
)
KV_BYTES = (Series("nearkv_agent_kv_cache_total_capacity_bytes"),)
KV_TOKENS = (Series("nearkv_agent_kv_cache_total_capacity_tokens"),)

HISTOGRAMS: Sequence[Series] = (
    *PREFILL_SECONDS,
    *DECODE_SECONDS,
    *QUEUE_SECONDS,
    *FIRST_BYTE_SECONDS,
)
COUNTERS: Sequence[Series] = tuple(
    dict.fromkeys(
        (
            *PROMPT_TOKENS,
            *COMPUTED_TOKENS,
            AGENT_HIT_TOKENS,
            AGENT_MISSED_TOKENS,
            *(series for pair in ENGINE_HITS_AND_ASKED for series in pair),
            *ROUTED_TOKENS,
            *PREDICTED_TOKENS,
        )
    )
)
GAUGES: Sequence[Series] = (*USED_RATIO, *KV_BYTES, *KV_TOKENS)
PROCESS_LABELS = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels by which processes of one engine differ; all of them say the same."""
