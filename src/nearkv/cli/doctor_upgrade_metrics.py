"""What nearkv reads of ``/metrics``, told by the old engine and not by the new one (pure).

Both pages are read by the agent's own parser, so that a renamed series, a lost label and a value
of another form all show as a reading that is gone.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

from nearkv.agent.engine_metrics import EngineReading, RankReading, parse_metrics
from nearkv.cli.doctor_upgrade_model import EngineFacts, Finding, Severity, same_or, unknown
from nearkv.report.series import COUNTERS, GAUGES, HISTOGRAMS

_NAME = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)[{ \t]", re.MULTILINE)
_START = "start_time_seconds"
_SIMILAR_RATIO = 0.6
_HISTOGRAM_SUM = "_sum"
_OURS = "nearkv_"


@dataclass(frozen=True, slots=True)
class Use:
    """A reading: the series of vLLM that it is made of, and what is lost without it."""

    series: str
    severity: Severity
    effect: str


_NO_RATIO = "the hit ratio of the engine is unknown in status, metrics and WorkerStatus"
_NO_FIT = "the speed of prefill is not learnt: predicted times rest on the default"
_NO_GATE = "free KV is unknown: the engine gets requests however full it is"
USES: Mapping[str, Use] = MappingProxyType(
    {
        "kv_used_ratio": Use("vllm:kv_cache_usage_perc", Severity.BREAKS, _NO_GATE),
        "kv_total_tokens": Use("vllm:cache_config_info", Severity.BREAKS, _NO_GATE),
        "kv_total_bytes": Use(
            "vllm:cache_config_info", Severity.DEGRADES, "free KV is judged by its share, not bytes"
        ),
        "block_size": Use(
            "vllm:cache_config_info",
            Severity.DEGRADES,
            "the engine's blocks are unknown until its first KV events",
        ),
        "requests_running": Use(
            "vllm:num_requests_running",
            Severity.DEGRADES,
            "load is what the ingress itself has in flight; other clients' is not seen",
        ),
        "requests_waiting": Use(
            "vllm:num_requests_waiting",
            Severity.DEGRADES,
            "the queue is what the ingress itself has in flight; other clients' is not seen",
        ),
        "prefix_hits_tokens": Use("vllm:prefix_cache_hits_total", Severity.DEGRADES, _NO_RATIO),
        "prefix_queries_tokens": Use(
            "vllm:prefix_cache_queries_total", Severity.DEGRADES, _NO_RATIO
        ),
        "prompt_tokens": Use(
            "vllm:prompt_tokens_total",
            Severity.DEGRADES,
            "without a start time, a restart shows only when event numbers fall",
        ),
        "computed_tokens": Use("vllm:prompt_tokens_by_source_total", Severity.DEGRADES, _NO_FIT),
        "prefills": Use("vllm:request_prefill_time_seconds_count", Severity.DEGRADES, _NO_FIT),
        "prefill_seconds": Use("vllm:request_prefill_time_seconds_sum", Severity.DEGRADES, _NO_FIT),
        "prefill_computed_tokens": Use(
            "vllm:request_prefill_kv_computed_tokens_sum", Severity.DEGRADES, _NO_FIT
        ),
        "awake": Use("vllm:engine_sleep_state", Severity.DEGRADES, "sleeping engines get requests"),
        _START: Use(
            "process_start_time_seconds",
            Severity.DEGRADES,
            "a restart shows only when event numbers or the count of prompt tokens fall",
        ),
    }
)


def compare_metrics(old: EngineFacts, new: EngineFacts) -> Iterator[Finding]:
    """Compare what can be read of both pages; block sizes are compared, too."""
    pages = (old.metrics, new.metrics)
    if not all(pages):
        told = ["read" if page else "no answer" for page in pages]
        yield unknown("metrics", "/metrics did not answer", old=told[0], new=told[1])
        return
    before, after = (_known(parse_metrics(page)) for page in pages)
    names = [set(_NAME.findall(page)) for page in pages]
    lost = [reading for reading in USES if reading in before and reading not in after]
    for reading in lost:
        yield _lost(reading, before[reading], *names)
    kept = len(before.keys() & after.keys())
    yield Finding(
        check="metrics read by both",
        severity=Severity.SAME,
        old=f"{len(before)} of {len(USES)} readings",
        new=f"{kept} of them, {len(after) - kept} more",
        effect=_neither(before.keys() | after.keys()),
    )
    yield from _report(*names)
    yield _block_sizes(before, after)


def block_size_of(page: str) -> int | None:
    """Return the block size that a page tells, in tokens."""
    value = _known(parse_metrics(page)).get("block_size")
    return None if value is None else int(value)


def _known(reading: EngineReading) -> dict[str, float]:
    """Return the readings that an engine told, those of its first rank."""
    known: dict[str, float] = {}
    if reading.start_time_seconds is not None:
        known[_START] = reading.start_time_seconds
    ranks: Sequence[RankReading] = [reading.ranks[name] for name in sorted(reading.ranks)]
    for rank in ranks[:1]:
        values = {each.name: getattr(rank, each.name) for each in fields(RankReading)}
        known |= {name: value for name, value in values.items() if value is not None}
    return known


def _lost(reading: str, value: float, before: set[str], after: set[str]) -> Finding:
    use = USES[reading]
    series = use.series
    if series in before and series not in after:
        alike = difflib.get_close_matches(series, sorted(after - before), 1, _SIMILAR_RATIO)
        told = f"missing; renamed to {alike[0]}?" if alike else "missing"
    else:
        told = "labels or values have another form"
    return Finding(
        check=f"metric {series} ({reading})",
        severity=use.severity,
        old=f"{value:g}",
        new=told,
        effect=use.effect,
        advice="look for a release of nearkv that knows the new name",
    )


def _neither(known: set[str]) -> str:
    rest = [reading for reading in USES if reading not in known]
    return f"told by neither: {', '.join(rest)}" if rest else ""


def _report(before: set[str], after: set[str]) -> Iterator[Finding]:
    """Yield what only ``nearkv report`` misses."""
    read_by_agent = {use.series for use in USES.values()}
    wanted = {
        *(series.name for series in (*COUNTERS, *GAUGES)),
        *(series.name + _HISTOGRAM_SUM for series in HISTOGRAMS),
    }
    lost = sorted(
        name for name in wanted & before - after - read_by_agent if not name.startswith(_OURS)
    )
    if lost:
        yield Finding(
            check="metrics of nearkv report",
            severity=Severity.DEGRADES,
            old=", ".join(lost),
            new="missing",
            effect="nearkv report says less about where time goes",
        )


def _block_sizes(before: Mapping[str, float], after: Mapping[str, float]) -> Finding:
    sizes = [known.get("block_size") for known in (before, after)]
    texts = ["not told" if size is None else f"{size:g} tokens" for size in sizes]
    if None in sizes:
        return unknown("block size", "/metrics does not tell it", old=texts[0], new=texts[1])
    return same_or(
        "block size",
        old=texts[0],
        new=texts[1],
        severity=Severity.BREAKS,
        effect="the ingress makes a prompt's keys for the block size of one engine: hits at "
        "engines of the other size are missed, and KV does not move between them",
        advice="set --block-size to the same value",
    )
