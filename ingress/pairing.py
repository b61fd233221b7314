"""Choosing who computes a prompt and who goes on from there (pure).

A pair is a source, whose KV is used, and a target, which pulls it and answers. Both speak
the same (mode, compat), and the target has room for the whole prompt before anything is
sent: engines reserve it all before they pull (reference/vllm.md 5.4).

A source prefills by role (``prefill`` or ``both``), or it is a holder: an engine of any role
that has so much of the prompt that hardly anything is left to compute.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nearkv.ingress.pd_costs import (
    CostTerms,
    EngineCost,
    local_seconds,
    pair_seconds,
    trouble_seconds,
)
from nearkv.path_cost import PathCost

_MOST_PER_SIDE = 8
"""Sources and targets looked at together, per compat: those cheapest on their own."""
_NEAR_SHARE = 0.02
"""Pairs dearer than the best one by this share of its own time are as good; load decides."""

PathBetween = Callable[["PairCandidate", "PairCandidate"], PathCost]


@dataclass(frozen=True, slots=True)
class PairCandidate:
    """An engine that could be in a pair for one request.

    ``compat`` is (mode, compat) of its transfer. ``free_tokens`` are those of KV that nobody
    holds or was promised; ``None`` is unknown, which is not zero. ``load`` counts requests.
    """

    engine: str
    role: str
    node: str
    compat: tuple[str, str]
    cached_tokens: int
    cost: EngineCost
    kv_bytes_per_token: int
    free_tokens: float | None = None
    load: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a pair.

    ``room_tokens`` is the KV that either side must have free; a decode engine may be a source
    where it lacks at most ``holder_tokens``.
    """

    room_tokens: int
    holder_tokens: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A source and a target, with the predicted cost."""

    source: PairCandidate
    target: PairCandidate
    seconds: float

    @property
    def outcome(self) -> str:
        """``pull`` where the source holds more of the prompt already, else ``pd``."""
        return "pull" if self.source.cached_tokens > self.target.cached_tokens else "pd"


@dataclass(frozen=True, slots=True)
class Choice:
    """The best pair, or why there is none: ``no_pair`` or ``no_room``."""

    pair: Pair | None
    why: str = ""


def choose_pair(
    candidates: Iterable[PairCandidate],
    need: Need,
    path_between: PathBetween,
    terms: CostTerms,
    *,
    turn: int,
) -> Choice:
    """Return the cheapest pair; among near-equals the least loaded one, else in turn."""
    pairs: list[Pair] = []
    possible = False
    for group in _by_compat(candidates):
        sources = [c for c in group if _may_be_source(c, need)]
        targets = [c for c in group if c.role != "prefill"]
        possible = possible or _makes_a_pair(sources, targets)
        sources = sorted(_roomy(sources, need), key=lambda c: local_seconds(c.cost, terms))
        targets = sorted(_roomy(targets, need), key=_target_order)
        pairs += [
            Pair(source, target, _seconds(source, target, path_between, terms))
            for source in sources[:_MOST_PER_SIDE]
            for target in targets[:_MOST_PER_SIDE]
            if source.engine != target.engine
        ]
    if not pairs:
        return Choice(None, "no_room" if possible else "no_pair")
    return Choice(_least_loaded(pairs, turn, terms))


def _by_compat(candidates: Iterable[PairCandidate]) -> Iterable[Sequence[PairCandidate]]:
    groups: dict[tuple[str, str], list[PairCandidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.compat, []).append(candidate)
    return groups.values()


def _may_be_source(candidate: PairCandidate, need: Need) -> bool:
    return candidate.role != "decode" or candidate.cost.missing_tokens <= need.holder_tokens


def _makes_a_pair(sources: Sequence[PairCandidate], targets: Sequence[PairCandidate]) -> bool:
    return any(s.engine != t.engine for s in sources for t in targets[:2])


def _roomy(candidates: Iterable[PairCandidate], need: Need) -> Iterable[PairCandidate]:
    return (c for c in candidates if c.free_tokens is None or c.free_tokens >= need.room_tokens)


def _target_order(candidate: PairCandidate) -> tuple[int, float, int, str]:
    cost = candidate.cost
    return cost.missing_tokens, cost.wait_seconds, candidate.load, candidate.engine


def _seconds(
    source: PairCandidate, target: PairCandidate, path_between: PathBetween, terms: CostTerms
) -> float:
    return pair_seconds(
        source.cost,
        target.cost,
        path_between(source, target),
        kv_bytes_per_token=target.kv_bytes_per_token,
        terms=terms,
    )


def _least_loaded(pairs: Sequence[Pair], turn: int, terms: CostTerms) -> Pair:
    best = min(pairs, key=lambda pair: pair.seconds)
    own_seconds = best.seconds - trouble_seconds(best.source.cost, terms)
    limit = best.seconds + own_seconds * _NEAR_SHARE
    near = [pair for pair in pairs if pair.seconds <= limit]
    least = min(map(_load_order, near))
    tied = [pair for pair in near if _load_order(pair) == least]
    tied.sort(key=lambda pair: (pair.source.engine, pair.target.engine))
    return tied[turn % len(tied)]


def _load_order(pair: Pair) -> tuple[int, int]:
    return pair.target.load, pair.source.load
