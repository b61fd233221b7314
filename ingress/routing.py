"""Routing policies (pure): candidates in, decision out.

No clock, no randomness: ages are classified before, and ties go round by ``turn``, a number
the caller counts up. The freshness ladder is the same for all policies: engines whose state
is unknown are used only when no other can be, by our own ledger, and round robin when even
that says nothing. There is an answer while any engine may answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

import msgspec

from nearkv.freshness import Freshness

_by_name = attrgetter("engine")
_FREE_STEPS = 1000
"""Free shares are compared in thousandths: below that, load decides."""
_ROLES_BY_RANK = ("both", "decode", "prefill")


class Policy(StrEnum):
    """How an engine is chosen."""

    PREFIX_FIRST = "prefix-first"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    COST = "cost"


class Rung(StrEnum):
    """How good the data behind a decision was (DESIGN section 4, fallback ladder)."""

    FRESH = "fresh"
    AGED = "aged"
    LEDGER = "ledger"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True)
class Gate:
    """The free-KV threshold: the smaller of an absolute size and a share of the cache."""

    min_free_bytes: int = 2_000_000_000
    min_free_ratio: float = 0.10


class Candidate(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One engine as the router sees it for one request; ``None`` is unknown.

    ``cached_tokens`` is what it should hold of the prompt; ``decay`` and ``trust`` (both
    0..1) say how far to count on that, for the data's age and for broken promises.
    Of the cached tokens, ``host_tokens`` lie in host memory and ``disk_tokens`` on disk, behind
    those on the device.
    ``free_ratio`` is the share of its KV cache free for new requests, less what we have in
    flight there; ``free_tokens`` is the same in tokens.
    """

    engine: str
    role: str = "both"
    freshness: Freshness = Freshness.FRESH
    decay: float = 1.0
    trust: float = 1.0
    cached_tokens: int = 0
    free_ratio: float | None = None
    total_bytes: int | None = None
    queue: int | None = None
    in_flight: int = 0
    hinted: bool = False
    avoid: str = ""
    host_tokens: int = 0
    disk_tokens: int = 0
    free_tokens: int | None = None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The engine chosen (``None``: none may take it), why, and on what data."""

    engine: str | None
    reason: str
    rung: Rung


def decide(
    policy: Policy, candidates: Sequence[Candidate], *, turn: int, gate: Gate = Gate()
) -> Decision:
    """Choose an engine for one request.

    ``candidates`` may come in any order. Engines to ``avoid`` (unreachable, draining,
    failing) are considered only when there are no others.
    """
    ordered = sorted(candidates, key=_by_name)
    usable = [c for c in ordered if not c.avoid] or ordered
    if not usable:
        return Decision(None, "no_engine", Rung.ROUND_ROBIN)
    known = [c for c in usable if c.freshness is not Freshness.UNKNOWN]
    if policy is Policy.ROUND_ROBIN:
        return decision_for(usable[turn % len(usable)], "round_robin")
    if not known:
        return decide_by_ledger(usable, turn)
    if policy is Policy.LEAST_LOADED:
        return decision_for(_best(known, _load_order, turn), "least_loaded")
    decision = _prefix_first(known, turn, gate)
    unknown = [c for c in usable if c.freshness is Freshness.UNKNOWN]
    if decision.engine is None and unknown:
        return decide_by_ledger(unknown, turn)
    return decision


def decide_by_role(
    policy: Policy, candidates: Sequence[Candidate], *, turn: int, gate: Gate = Gate()
) -> list[Decision]:
    """Choose an engine for a request that is not split, roles in mind; best role first.

    Engines that do all the work come first, then those for decoding, then those for
    prefill: a list, so that the caller may prefer the second for its cost. Engines that
    should be avoided or have no room are no choice while another role offers one.
    """
    avoided = {c.engine for c in candidates if c.avoid}
    found = []
    for role in _ROLES_BY_RANK:
        able = [c for c in candidates if c.role == role]
        decision = decide(policy, able, turn=turn, gate=gate) if able else None
        if decision and decision.engine is not None and decision.engine not in avoided:
            found.append(decision)
    return found or [decide(policy, candidates, turn=turn, gate=gate)]


def _prefix_first(known: Sequence[Candidate], turn: int, gate: Gate) -> Decision:
    """Follow the article (3.2, 7.3): the best holder with room, else the emptiest prefill."""
    roomy = [c for c in known if has_room(c, gate)]
    if not roomy:
        return Decision(None, "no_kv_room", Rung.FRESH)
    trusted = list(map(trusted_tokens, roomy))
    most = max(trusted)
    if most > 0:
        holders = [c for c, tokens in zip(roomy, trusted, strict=True) if tokens == most]
        return decision_for(_best(holders, _space_order(holders), turn), "prefix_hit")
    hinted = [c for c in roomy if c.hinted]
    if hinted:
        return decision_for(_best(hinted, _space_order(hinted), turn), "hint")
    prefill = [c for c in roomy if c.role != "decode"] or roomy
    return decision_for(_best(prefill, _space_order(prefill), turn), "prefix_miss")


def has_room(candidate: Candidate, gate: Gate) -> bool:
    """Tell whether an engine is above its free-KV threshold; unknown is not zero."""
    if candidate.free_ratio is None:
        return True
    if candidate.total_bytes is None:
        return candidate.free_ratio >= gate.min_free_ratio
    threshold = min(gate.min_free_bytes, gate.min_free_ratio * candidate.total_bytes)
    return candidate.free_ratio * candidate.total_bytes >= threshold


def has_room_for(candidate: Candidate, gate: Gate, tokens: int, held_tokens: int) -> bool:
    """Tell whether an engine may take a prompt of which it has ``held_tokens``.

    Below the threshold it may where it has most of the prompt and free KV for the rest. Sent
    elsewhere, all of it would be computed and kept once more, in memory that is short already
    (decision 20).
    """
    if has_room(candidate, gate):
        return True
    free_tokens = candidate.free_tokens
    return free_tokens is not None and tokens - held_tokens <= min(free_tokens, held_tokens)


def decide_by_ledger(usable: Sequence[Candidate], turn: int) -> Decision:
    """Choose without state: fewest requests of our own in flight, else in turn."""
    loads = {c.in_flight for c in usable}
    if len(loads) == 1:
        return Decision(usable[turn % len(usable)].engine, "round_robin", Rung.ROUND_ROBIN)
    chosen = _best(usable, lambda c: (c.in_flight,), turn)
    return Decision(chosen.engine, "ledger", Rung.LEDGER)


def trusted_tokens(candidate: Candidate) -> int:
    """Return what a prediction counts for, in whole tokens."""
    doubt = candidate.decay * candidate.trust
    return candidate.cached_tokens if doubt == 1.0 else int(candidate.cached_tokens * doubt)


def _load_order(candidate: Candidate) -> tuple[int, ...]:
    """Order by load: the engine's own queue, or ours where that is longer or all we know."""
    return (max(candidate.queue or 0, candidate.in_flight),)


def _space_order(candidates: Sequence[Candidate]) -> Callable[[Candidate], tuple[int, ...]]:
    """Order by free KV, most first, then by load.

    Free bytes are compared where all sizes are known, free shares otherwise. An engine that
    does not tell its free share is taken for an average one, not for a full one.
    """
    sizes = [c.total_bytes for c in candidates if c.total_bytes]
    largest = max(sizes) if len(sizes) == len(candidates) else 0
    told = [c.free_ratio for c in candidates if c.free_ratio is not None]
    average = sum(told) / len(told) if told else 0.0

    def order(candidate: Candidate) -> tuple[int, ...]:
        free = average if candidate.free_ratio is None else candidate.free_ratio
        if largest and candidate.total_bytes:
            free *= candidate.total_bytes / largest
        return (-round(free * _FREE_STEPS), *_load_order(candidate))

    return order


def _best(
    candidates: Sequence[Candidate], order: Callable[[Candidate], tuple[int, ...]], turn: int
) -> Candidate:
    """Return the first in order; equals take turns."""
    if len(candidates) == 1:
        return candidates[0]
    places = list(map(order, candidates))
    least = min(places)
    tied = [c for c, place in zip(candidates, places, strict=True) if place == least]
    return tied[turn % len(tied)]


def decision_for(candidate: Candidate, reason: str) -> Decision:
    """Return the decision for an engine, on the rung that its data allow."""
    if candidate.freshness is Freshness.FRESH:
        return Decision(candidate.engine, reason, Rung.FRESH)
    rung = Rung.AGED if candidate.freshness is Freshness.AGED else Rung.ROUND_ROBIN
    return Decision(candidate.engine, reason, rung)
