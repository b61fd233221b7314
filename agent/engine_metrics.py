"""Reading an engine's ``/metrics`` (pure): text in, one reading per data-parallel rank out.

vLLM and SGLang are told apart by the names of their series (docs/engines.md). Missing is
unknown, never zero.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

_LABEL = re.compile(r'\b(\w++)="((?:[^"\\]|\\.)*+)"')
"""Each character is looked at once: a label without an end must not take seconds."""
_MOST_LABEL_CHARACTERS = 1 << 14
_MOST_NUMBER_CHARACTERS = 64
MOST_SAMPLES = 20_000
_VALUE_LIMIT = 1e15
"""No count, size, time or share is below zero or as large as this; what is so is not known."""
_FULL_RATIO = 1.0
_MOST_RATIO = 2.0
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

_SGLANG_GAUGES = {
    "sglang:token_usage": "kv_used_ratio",
    "sglang:num_running_reqs": "requests_running",
    "sglang:num_queue_reqs": "requests_waiting",
    "sglang:max_total_num_tokens": "kv_total_tokens",
    "sglang:page_size": "block_size",
    "sglang:kv_cache_memory_usage_gb": "kv_total_bytes",
}
_SGLANG_SUMS = {
    "sglang:prompt_tokens_total": "prefix_queries_tokens",
    "sglang:cached_tokens_total": "prefix_hits_tokens",
}
_SGLANG_BY_MODE = "sglang:realtime_tokens_total"
_SGLANG_MODES = {"prefill_compute": "computed_tokens", "prefill_cache": "prefix_hits_tokens"}
_SGLANG_STAGES = {
    "sglang:per_stage_req_latency_seconds_sum": "prefill_seconds",
    "sglang:per_stage_req_latency_seconds_count": "prefills",
}
_SGLANG_STARTUP = "sglang:startup_time_seconds"
_SGLANG_NAMES = frozenset(
    {*_SGLANG_GAUGES, *_SGLANG_SUMS, _SGLANG_BY_MODE, *_SGLANG_STAGES, _SGLANG_STARTUP}
)
_NAMES = frozenset({*_WANTED, _CACHE_INFO, _SLEEP, _BY_SOURCE, _START_TIME}) | _SGLANG_NAMES
_SAMPLE = re.compile(
    rf"\n(?=[vps])({'|'.join(map(re.escape, sorted(_NAMES)))})(?:({{.*}})[ \t]*|[ \t]+)(\S+)"
)
_GIB = 1 << 30

Sample = tuple[str, dict[str, str], float]
"""Name, labels and value of one series."""


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
    """One scrape: when the server process started, and its data-parallel ranks by number.

    SGLang tells only how long its start took; that stands for the start, in thousandths of a
    second as if they were seconds, since no two starts take equally long to the microsecond.
    """

    start_time_seconds: float | None = None
    ranks: dict[str, RankReading] = field(default_factory=dict)


def parse_metrics(text: str) -> EngineReading:
    """Parse Prometheus text; lines that make no sense are passed over."""
    return put_together(find_samples(text))


def find_samples(text: str) -> list[Sample]:
    """Return the wanted series of whole lines of Prometheus text."""
    return list(_samples(text))


def put_together(samples: Iterable[Sample]) -> EngineReading:
    """Return what samples say; there is a bound on how many are looked at."""
    reading = EngineReading()
    of_sglang: list[Sample] = []
    for name, labels, value in islice(samples, MOST_SAMPLES):
        if name in _SGLANG_NAMES:
            of_sglang.append((name, labels, value))
            continue
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
    if of_sglang:
        _add_sglang(reading, of_sglang)
    for rank in reading.ranks.values():
        rank.kv_used_ratio = _ratio(rank.kv_used_ratio)
    return reading


def _samples(text: str) -> Iterable[Sample]:
    """Yield (name, labels, value) of the wanted series only.

    Most of an engine's text is histogram buckets; one search over all of it finds the few lines
    that are wanted, which keeps a scrape at a tenth of a millisecond.
    """
    for found in _SAMPLE.finditer("\n" + text):
        name, labels, number = found.groups("")
        if len(labels) > _MOST_LABEL_CHARACTERS or len(number) > _MOST_NUMBER_CHARACTERS:
            continue
        try:
            value = float(number)
        except ValueError:
            continue
        if 0 <= value < _VALUE_LIMIT:
            yield name, dict(_LABEL.findall(labels)), value


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
    return int(text) or None


def _ratio(value: float | None) -> float | None:
    """Return a share; a little over all of it is all of it, and much over it means nothing."""
    return None if value is None or value > _MOST_RATIO else min(value, _FULL_RATIO)


def _add_sglang(reading: EngineReading, samples: Sequence[Sample]) -> None:
    reading.ranks.update(_read_sglang(samples))
    if reading.start_time_seconds is None:
        # The exact sum: it must not depend on the order in which the series come.
        took = math.fsum(value for name, _, value in samples if name == _SGLANG_STARTUP)
        reading.start_time_seconds = took * 1000 or None


def _read_sglang(samples: Iterable[Sample]) -> dict[str, RankReading]:
    """Read SGLang's series.

    Schedulers label theirs by ``dp_rank`` where there are several. The front end does not: its
    sums belong to the rank only where there is one.
    """
    ranks: dict[str, RankReading] = {}
    speakers: dict[tuple[str, str], tuple[int, ...]] = {}
    sums: dict[str, float] = {}
    for name, labels, value in samples:
        if name in _SGLANG_SUMS:
            of_server = _SGLANG_SUMS[name]
            sums[of_server] = sums.get(of_server, 0.0) + value
            continue
        attribute = _sglang_attribute(name, labels)
        if attribute is None:
            continue
        rank = labels.get("dp_rank") or "0"
        # Each process of a rank may report (pipeline, tensor and expert parallelism); the
        # first one speaks for all, and is not always number 0.
        speaker = tuple(_number(labels.get(kind)) for kind in ("pp_rank", "tp_rank", "moe_ep_rank"))
        if speaker <= speakers.get((rank, attribute), speaker):
            speakers[rank, attribute] = speaker
            setattr(ranks.setdefault(rank, RankReading()), attribute, value)
    for reading in ranks.values():
        _finish_sglang(reading)
    if sums and not ranks.keys() - {"0"}:
        only = ranks.setdefault("0", RankReading())
        only.prompt_tokens = sums.get("prefix_queries_tokens", only.prompt_tokens)
        if "prefix_hits_tokens" in sums or only.prefix_hits_tokens is None:
            only.prefix_queries_tokens = sums.get("prefix_queries_tokens")
            only.prefix_hits_tokens = sums.get("prefix_hits_tokens")
    return ranks


def _sglang_attribute(name: str, labels: Mapping[str, str]) -> str | None:
    """Return what a scheduler's series tells; ``None`` where it is a part of another one."""
    if name in _SGLANG_GAUGES:
        # With priorities, a queue has one more series for each; the one without is all of it.
        return None if labels.get("priority") else _SGLANG_GAUGES[name]
    if name in _SGLANG_STAGES:
        return _SGLANG_STAGES[name] if labels.get("stage") == "prefill_forward" else None
    return _SGLANG_MODES.get(labels.get("mode", ""))


def _finish_sglang(reading: RankReading) -> None:
    """Turn sizes into whole numbers, and what was computed and found into what was asked."""
    reading.kv_total_tokens = _size(reading.kv_total_tokens)
    reading.block_size = _size(reading.block_size)
    reading.kv_total_bytes = _size(reading.kv_total_bytes, unit=_GIB)
    if reading.computed_tokens is not None and reading.prefix_hits_tokens is not None:
        reading.prefix_queries_tokens = reading.computed_tokens + reading.prefix_hits_tokens
        reading.prompt_tokens = reading.prefix_queries_tokens


def _size(value: float | None, *, unit: int = 1) -> int | None:
    """Return a size as a whole number; what can be no size of anything is unknown."""
    if value is None or not 0 < value * unit < 10**_MOST_DIGITS:
        return None
    return round(value * unit)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
