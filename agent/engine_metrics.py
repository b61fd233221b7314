"""Reading an engine's ``/metrics`` (pure): text in, one reading per data-parallel rank out.

Missing is unknown, never zero. Names and meanings: reference/vllm.md section 3.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_PREFIX = "vllm:"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_WANTED = {
    "vllm:kv_cache_usage_perc": "kv_used_ratio",
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:prefix_cache_hits_total": "prefix_hits_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:request_prefill_time_seconds_sum": "prefill_seconds",
    "vllm:request_prefill_time_seconds_count": "prefills",
    "vllm:request_prefill_kv_computed_tokens_sum": "prefill_computed_tokens",
}
_CACHE_INFO = "vllm:cache_config_info"
_SLEEP = "vllm:engine_sleep_state"
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_START_TIME = "process_start_time_seconds"
_MOST_DIGITS = 15


@dataclass(slots=True)
class RankReading:
    """What one rank reported; ``None`` where it said nothing.

    ``prefills``, their ``prefill_seconds`` and ``prefill_computed_tokens`` are running sums
    over finished requests.
    """

    kv_used_ratio: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    prefix_hits_tokens: float | None = None
    prefix_queries_tokens: float | None = None
    prompt_tokens: float | None = None
    computed_tokens: float | None = None
    prefills: float | None = None
    prefill_seconds: float | None = None
    prefill_computed_tokens: float | None = None
    awake: bool | None = None
    block_size: int | None = None
    kv_total_tokens: int | None = None
    kv_total_bytes: int | None = None


@dataclass(slots=True)
class EngineReading:
    """One scrape: when the server process started, and its ranks by label ``engine``."""

    start_time_seconds: float | None = None
    ranks: dict[str, RankReading] = field(default_factory=dict)


def parse_metrics(text: str) -> EngineReading:
    """Parse Prometheus text; lines that make no sense are passed over."""
    reading = EngineReading()
    for name, labels, value in _samples(text.splitlines()):
        if name == _START_TIME:
            reading.start_time_seconds = value
            continue
        rank = reading.ranks.setdefault(labels.get("engine", "0"), RankReading())
        if name in _WANTED:
            setattr(rank, _WANTED[name], value)
        elif name == _CACHE_INFO:
            _read_cache_info(rank, labels)
        elif name == _SLEEP and labels.get("sleep_state") == "awake":
            rank.awake = value != 0
        elif name == _BY_SOURCE and labels.get("source") == "local_compute":
            rank.computed_tokens = value
    return reading


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, dict[str, str], float]]:
    """Yield (name, labels, value) of the wanted series only.

    Most of an engine's text is histogram buckets; they are told off by their name before
    anything of them is parsed, which keeps a scrape at a fraction of a millisecond.
    """
    for line in lines:
        if not line.startswith((_PREFIX, _START_TIME)):
            continue
        name = line[:brace] if (brace := line.find("{")) >= 0 else line.partition(" ")[0]
        if name not in _WANTED and name not in (_CACHE_INFO, _SLEEP, _BY_SOURCE, _START_TIME):
            continue
        head, _, tail = line.rpartition("}") if brace >= 0 else line.partition(" ")
        try:
            value = float(tail.split()[0])
        except (ValueError, IndexError):
            continue
        if not math.isfinite(value):
            continue
        yield name, dict(_LABEL.findall(head)) if brace >= 0 else {}, value


def _read_cache_info(rank: RankReading, labels: Mapping[str, str]) -> None:
    """Read the size of the cache.

    ``kv_cache_size_tokens`` comes first, since blocks x size is wrong for hybrid models;
    bytes are taken only where no override made the two disagree.
    """
    rank.block_size = _whole(labels.get("block_size"))
    total_tokens = _whole(labels.get("kv_cache_size_tokens"))
    if total_tokens is None:
        blocks = _whole(labels.get("num_gpu_blocks"))
        if blocks is not None and rank.block_size is not None:
            total_tokens = blocks * rank.block_size
    rank.kv_total_tokens = total_tokens
    if _whole(labels.get("num_gpu_blocks_override")) is None:
        rank.kv_total_bytes = _whole(labels.get("kv_cache_memory_bytes"))


def _whole(text: str | None) -> int | None:
    """Parse a label that may be missing, say ``None``, or be no size of anything."""
    if text is None or not text.isdecimal() or len(text) > _MOST_DIGITS:
        return None
    return int(text)
