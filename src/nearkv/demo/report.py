"""The arithmetic of the report: what was computed, what reuse saved, and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from nearkv.demo.engine_counters import PromptTokens

REDUCTION_BAR_RATIO = 0.85
REDUCTION_BAR_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """One request. Token counts are None when they were not reported."""

    turn: int
    engine: str
    reason: str
    prompt_tokens: int
    cached_tokens: int | None
    predicted_cached_tokens: int | None
    ttft_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicReport:
    """The rounds about one document; ``counted`` is what the engines' own counters say."""

    document: str
    turns: tuple[TurnReport, ...]
    counted: PromptTokens

    @property
    def without_reuse_tokens(self) -> int:
        """Prompt tokens that the engines would have computed without any reuse."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def reduction_ratio(self) -> float:
        """Share of the prompt tokens that did not have to be computed."""
        return reduction_ratio(self.counted.computed, self.without_reuse_tokens)

    @property
    def ttft_first_seconds(self) -> float:
        """Time to the first token of the first turn."""
        return self.turns[0].ttft_seconds

    @property
    def ttft_follow_up_seconds(self) -> float | None:
        """Median time to the first token of the later turns; None if there are none."""
        follow_ups = [turn.ttft_seconds for turn in self.turns[1:]]
        return median(follow_ups) if follow_ups else None

    @property
    def strays(self) -> tuple[TurnReport, ...]:
        """Follow-ups that another engine answered than the one that computed the document."""
        holder = self.turns[0].engine
        return tuple(turn for turn in self.turns if turn.engine != holder)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """All rounds under one routing policy. The first topic is the one that is judged."""

    policy: str
    topics: tuple[TopicReport, ...]

    @property
    def main(self) -> TopicReport:
        """The document with the full number of rounds."""
        return self.topics[0]

    @property
    def turns(self) -> tuple[TurnReport, ...]:
        """The turns about all documents."""
        return tuple(turn for topic in self.topics for turn in topic.turns)

    @property
    def counted(self) -> PromptTokens:
        """The engines' own counts over all documents."""
        return sum((topic.counted for topic in self.topics), PromptTokens())


def reduction_ratio(computed_tokens: int, without_reuse_tokens: int) -> float:
    """Return 1 - computed / without reuse; 0 when nothing was asked."""
    return 1 - computed_tokens / without_reuse_tokens if without_reuse_tokens else 0.0


def required_reduction_ratio(rounds: int) -> float:
    """Return the reduction that ``rounds`` rounds must reach.

    The first round must always be computed, so n rounds save at most 1 - 1/n. The bar of
    85 % for ten rounds is 94 % of that limit; fewer rounds must reach the same share of
    theirs.
    """
    limit = 1 - 1 / rounds
    return min(REDUCTION_BAR_RATIO, REDUCTION_BAR_RATIO * limit / (1 - 1 / REDUCTION_BAR_ROUNDS))


def shortcomings(report: PolicyReport) -> list[str]:
    """Tell why a run missed its bars; an empty list means that it passed."""
    main = report.main
    required = required_reduction_ratio(len(main.turns))
    found = []
    if main.reduction_ratio < required:
        found.append(
            f"the engines computed {main.reduction_ratio:.1%} fewer prompt tokens than without "
            f"reuse; at least {required:.1%} was expected"
        )
    found += [
        f"{topic.document}, turn {turn.turn}: went to {turn.engine} ({turn.reason}), but "
        f"{topic.turns[0].engine} holds the document"
        for topic in report.topics
        for turn in topic.strays
    ]
    return found


def correct_predictions(turns: Sequence[TurnReport]) -> tuple[int, int]:
    """Count the turns whose prediction was right, and those that can be compared."""
    comparable = [
        turn
        for turn in turns
        if turn.cached_tokens is not None and turn.predicted_cached_tokens is not None
    ]
    right = sum(turn.cached_tokens == turn.predicted_cached_tokens for turn in comparable)
    return right, len(comparable)


def report_json(*, engine: str, model: str, reports: Sequence[PolicyReport]) -> dict[str, object]:
    """Return the whole report as JSON-like data; the first policy is the one judged."""
    reasons = shortcomings(reports[0])
    return {
        "engine": engine,
        "model": model,
        "passed": not reasons,
        "shortcomings": reasons,
        "policies": [
            {"policy": report.policy, "documents": [_topic_json(topic) for topic in report.topics]}
            for report in reports
        ],
    }


def _topic_json(topic: TopicReport) -> dict[str, object]:
    return {
        "document": topic.document,
        "prompt_tokens_without_reuse": topic.without_reuse_tokens,
        "prompt_tokens_computed": topic.counted.computed,
        "prompt_tokens_cached": topic.counted.cached,
        "prompt_tokens_transferred": topic.counted.transferred,
        "reduction_ratio": round(topic.reduction_ratio, 4),
        "ttft_first_seconds": topic.ttft_first_seconds,
        "ttft_follow_up_median_seconds": topic.ttft_follow_up_seconds,
        "turns": list(topic.turns),
    }
