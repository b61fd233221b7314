"""Policy ``cost``: the engine that takes the fewest milliseconds (pure; DESIGN section 4).

In steps: who may serve (health, role, room), who is about as good as the cheapest, who of
these holds most of the prompt, and of these one: the session's own engine, an engine that
gets hardly anything, or the less loaded of two drawn by the request's seed. No clock and no
randomness: equal questions get equal answers, in whatever order engines are listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from nearkv.freshness import Freshness
from nearkv.ingress.quoting import Quote
from nearkv.ingress.routing import (
    Candidate,
    Decision,
    Gate,
    Rung,
    decide_by_ledger,
    decision_for,
    has_room_for,
)


@dataclass(frozen=True, slots=True)
class CostRules:
    """What counts as equally good, and what is worth a few milliseconds more.

    ``floor_share`` of the requests is what an idle engine should get at least, where that
    costs at most ``floor_ms`` more; 0 turns it off.
    """

    near_tie_ms: float = 2.0
    near_tie_ratio: float = 0.02
    session_ms: float = 10.0
    session_ratio: float = 0.1
    floor_share: float = 0.01
    floor_ms: float = 500.0


class Entrant(msgspec.Struct, frozen=True, gc=False):
    """An engine with its quote, and what this replica gave it lately."""

    candidate: Candidate
    quote: Quote
    requests: float = 0.0
    new_tokens: float = 0.0


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What about a request matters here: a number that is its own, its length, its priority.

    ``group`` is a number that prompts with the same beginning share, whichever replica they
    come to. With ``roles`` false every engine does all the work.
    """

    seed: int = 0
    group: int = 0
    tokens: int = 0
    priority: int = 0
    turn: int = 0
    roles: bool = True


def _name(entrant: Entrant) -> str:
    return entrant.candidate.engine


def decide_by_cost(entrants: Sequence[Entrant], ask: Ask, rules: CostRules, gate: Gate) -> Decision:
    """Choose an engine for one request; ``entrants`` may come in any order."""
    if not entrants:
        return Decision(None, "no_engine", Rung.ROUND_ROBIN)
    usable = [e for e in entrants if not e.candidate.avoid] or entrants
    pool, unknown = _sort_out(usable, ask, gate)
    if pool:
        return _choose(pool, ask, rules)
    if unknown:
        able = sorted(_able_to_decode(unknown, ask), key=_name)
        return decide_by_ledger([e.candidate for e in able], ask.turn)
    return Decision(None, "no_kv_room", Rung.FRESH)


def gate_for(priority: int, gate: Gate) -> Gate:
    """Return the free-KV threshold for a priority: below 0, twice the usual must be free."""
    if priority >= 0:
        return gate
    return Gate(gate.min_free_bytes * 2, min(1.0, gate.min_free_ratio * 2))


def _able_to_decode(entrants: list[Entrant], ask: Ask) -> list[Entrant]:
    """Return those that may answer: prefill engines only where there are no others."""
    if not ask.roles:
        return entrants
    return [e for e in entrants if e.candidate.role != "prefill"] or entrants


def _sort_out(
    entrants: Sequence[Entrant], ask: Ask, gate: Gate
) -> tuple[list[Entrant], list[Entrant]]:
    """Return the engines to choose from, and those of which nothing is known.

    The best are those that may answer and have KV free for what is new to them. Where none has,
    an engine's own queue is the place to wait; engines for prefill come last.
    """
    best: list[Entrant] = []
    tight: list[Entrant] = []
    prefill: list[Entrant] = []
    unknown: list[Entrant] = []
    tokens = ask.tokens
    for entrant in entrants:
        candidate = entrant.candidate
        held_tokens = entrant.quote.held_tokens
        if candidate.freshness is Freshness.UNKNOWN:
            unknown.append(entrant)
        elif has_room_for(candidate, gate, tokens, held_tokens):
            free_tokens = candidate.free_tokens
            if candidate.role == "prefill" and ask.roles:
                prefill.append(entrant)
            elif free_tokens is not None and free_tokens < tokens - held_tokens:
                tight.append(entrant)
            else:
                best.append(entrant)
    return best or tight or prefill, unknown


def _choose(pool: list[Entrant], ask: Ask, rules: CostRules) -> Decision:
    if len(pool) == 1:
        return _decision(pool[0])
    best = min(pool, key=_cost_ms)
    best_ms = best.quote.cost_ms
    own = _of_the_session(pool, best_ms, rules)
    if own is not None:
        return _decision(own)
    starved = _starved(pool, ask, rules)
    if starved is not None:
        return decision_for(starved.candidate, "floor_share")
    limit_ms = best_ms + _near_tie_ms(best.quote, rules)
    near = [e for e in pool if e.quote.cost_ms <= limit_ms]
    if len(near) > 1:
        held_tokens = max([e.quote.held_tokens for e in near])
        near = [e for e in near if e.quote.held_tokens == held_tokens]
    return _decision(near[0] if len(near) == 1 else _spread(sorted(near, key=_name), ask))


def _cost_ms(entrant: Entrant) -> float:
    return entrant.quote.cost_ms


def _near_tie_ms(best: Quote, rules: CostRules) -> float:
    """Return what another engine may cost more and be as good.

    The rule is about a request's own time, of which the cost is a multiple: what is noise in the
    one is noise in the other.
    """
    own_ms = best.first_token_ms
    multiple = best.cost_ms / own_ms if own_ms > 0.0 else 1.0
    return max(rules.near_tie_ms * multiple, best.cost_ms * rules.near_tie_ratio)


def _of_the_session(pool: Sequence[Entrant], best_ms: float, rules: CostRules) -> Entrant | None:
    """Return the engine that served the session last, unless another is clearly cheaper."""
    hinted = [e for e in pool if e.candidate.hinted]
    if not hinted:
        return None
    own = min(hinted, key=_name)
    limit_ms = best_ms * (1.0 + rules.session_ratio) + rules.session_ms
    return own if own.quote.cost_ms <= limit_ms else None


def _starved(pool: Sequence[Entrant], ask: Ask, rules: CostRules) -> Entrant | None:
    """Return an idle engine whose share is below the floor: it learns hot prefixes so.

    It counts once enough requests were given for shares to mean something. What the request's
    own time becomes is limited; that others are crowded is the price of learning. Urgent
    requests teach nobody.
    """
    least = rules.floor_share * sum([e.requests for e in pool])
    if least < 1.0 or ask.priority > 0:
        return None
    limit_ms = min([e.quote.first_token_ms for e in pool]) + rules.floor_ms
    starved = [
        e
        for e in pool
        if e.requests < least
        and not e.candidate.in_flight
        and not e.candidate.queue
        and e.quote.first_token_ms <= limit_ms
    ]
    return min(starved, key=lambda e: (e.requests, e.candidate.engine), default=None)


def _spread(near: Sequence[Entrant], ask: Ask) -> Entrant:
    """Return one of several that are as good.

    A prefix that nobody holds starts a new group: it goes where the fewest new tokens went,
    so that groups settle evenly. Otherwise two are drawn by the seed, which keeps replicas
    that see the same state from all running to the same engine.
    """
    count = len(near)
    if not near[0].quote.held_tokens and not any(e.quote.held_tokens for e in near):
        start = ask.group % count
        return min([*near[start:], *near[:start]], key=_settled)
    first = ask.seed % count
    second = (first + 1 + ask.seed // count % (count - 1)) % count
    return min(near[first], near[second], key=_busy)


def _settled(entrant: Entrant) -> tuple[float, int]:
    return entrant.new_tokens, entrant.candidate.in_flight


def _busy(entrant: Entrant) -> tuple[int, float]:
    candidate = entrant.candidate
    return max(candidate.in_flight, candidate.queue or 0), entrant.new_tokens


def _decision(entrant: Entrant) -> Decision:
    candidate = entrant.candidate
    if entrant.quote.held_tokens:
        return decision_for(candidate, "prefix_hit")
    return decision_for(candidate, "hint" if candidate.hinted else "prefix_miss")
