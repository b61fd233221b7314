"""From outcomes to figures (pure)."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from nearkv.replay.simulation import Outcome


class Percentiles(msgspec.Struct, frozen=True):
    """The middle, the slow tenth and the slow hundredth; ``None``: there was nothing."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy did with a trace.

    ``hit_ratio`` is of prompt tokens. ``skew_ratio`` is the largest over the mean of what
    engines had to compute; ``refused`` counts by reason those answered with 429 (or, where the
    prompt is larger than any cache, ``too_long``).
    """

    requests: int
    answered: int
    hit_ratio: float | None
    first_token_ms: Percentiles
    per_token_ms: Percentiles
    skew_ratio: float | None
    refused: dict[str, int]
    split: int
    computed_tokens: dict[str, int]
    seconds: float


def summarise(
    outcomes: Sequence[Outcome], engines: Sequence[str], *, warm_up_ratio: float
) -> Figures:
    """Return the figures of a run, the first ``warm_up_ratio`` of its requests left out."""
    measured = outcomes[int(len(outcomes) * warm_up_ratio) :]
    answered = [o for o in measured if o.first_token_at is not None and o.ended_at is not None]
    prompt_tokens = sum(o.arrival.prompt_tokens for o in answered)
    computed = Counter(dict.fromkeys(engines, 0))
    for outcome in answered:
        computed[outcome.source or outcome.engine] += outcome.computed_tokens
    cached = sum(o.cached_tokens for o in answered)
    ends = [o.ended_at for o in answered if o.ended_at is not None]
    return Figures(
        requests=len(measured),
        answered=len(answered),
        hit_ratio=cached / prompt_tokens if prompt_tokens else None,
        first_token_ms=percentiles([_first_token_ms(o) for o in answered]),
        per_token_ms=percentiles(
            [_per_token_ms(o) for o in answered if o.arrival.output_tokens > 1]
        ),
        skew_ratio=_skew(list(computed.values())),
        refused=dict(sorted(Counter(o.refused for o in measured if o.refused).items())),
        split=sum(1 for o in answered if o.source is not None),
        computed_tokens=dict(computed),
        seconds=max(ends) - measured[0].arrival.at if ends else 0.0,
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the values that 50, 90 and 99 % of all do not exceed."""
    if not values:
        return Percentiles()
    ordered = sorted(values)
    last = len(ordered) - 1
    return Percentiles(
        *(ordered[min(last, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99))
    )


def _skew(loads: Sequence[int]) -> float | None:
    total = sum(loads)
    return max(loads) * len(loads) / total if total else None


def _first_token_ms(outcome: Outcome) -> float:
    return ((outcome.first_token_at or 0.0) - outcome.arrival.at) * 1000


def _per_token_ms(outcome: Outcome) -> float:
    seconds = (outcome.ended_at or 0.0) - (outcome.first_token_at or 0.0)
    return seconds * 1000 / (outcome.arrival.output_tokens - 1)


def curve_ms(outcomes: Sequence[Outcome], *, warm_up_ratio: float) -> list[float]:
    """Return the times to the first token at each hundredth of the requests."""
    measured = outcomes[int(len(outcomes) * warm_up_ratio) :]
    times = sorted(_first_token_ms(o) for o in measured if o.first_token_at is not None)
    if not times:
        return []
    return [times[(len(times) - 1) * share // 100] for share in range(101)]


def mean_of(runs: Sequence[Figures]) -> Figures:
    """Return the means of several runs' figures; counts are added up."""
    if len(runs) == 1:
        return runs[0]
    refused = Counter[str]()
    computed = Counter[str]()
    for run in runs:
        refused.update(run.refused)
        computed.update(run.computed_tokens)
    return Figures(
        requests=sum(run.requests for run in runs),
        answered=sum(run.answered for run in runs),
        hit_ratio=_mean([run.hit_ratio for run in runs]),
        first_token_ms=_mean_percentiles([run.first_token_ms for run in runs]),
        per_token_ms=_mean_percentiles([run.per_token_ms for run in runs]),
        skew_ratio=_mean([run.skew_ratio for run in runs]),
        refused=dict(refused),
        split=sum(run.split for run in runs),
        computed_tokens=dict(computed),
        seconds=sum(run.seconds for run in runs) / len(runs),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean_percentiles(runs: Sequence[Percentiles]) -> Percentiles:
    return Percentiles(
        p50=_mean([run.p50 for run in runs]),
        p90=_mean([run.p90 for run in runs]),
        p99=_mean([run.p99 for run in runs]),
    )
