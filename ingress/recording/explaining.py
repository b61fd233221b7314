"""Why a request went where it did, in sentences (pure): the record, read by people."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from nearkv.freshness import Freshness
from nearkv.ingress.cost_policy import gate_for
from nearkv.ingress.decisions import DecisionRecord
from nearkv.ingress.quoting import Quote
from nearkv.ingress.recording.records import Choice, Line, RequestRecord, ages_ms, line_of
from nearkv.ingress.routing import Candidate, Gate, has_room, has_room_for, trusted_tokens

_CLEARLY_MS = 0.05
_REASONS = {
    "prefix_hit": "it holds the prompt's beginning",
    "prefix_miss": "nobody there holds the prompt's beginning",
    "hint": "it served the same session or prompt last",
    "floor_share": "it was idle and had got hardly any requests, so it learns this prefix too",
    "least_loaded": "it has the fewest requests",
    "round_robin": "it was its turn",
    "ledger": "no state was known, and it has the fewest of our own requests",
    "pd": "two engines together are sooner than one alone",
    "pull": "another engine's KV is quicker to fetch than to compute",
    "no_kv": "a pair was made, but there was no KV to fetch, so the engine computed by itself",
    "served_elsewhere": "the gateway went to another engine than the one picked",
}
_REFUSALS = {
    "no_kv_room": "every engine was below its free-KV threshold",
    "no_engine": "no engine was known that could serve it",
}


class EngineVerdict(msgspec.Struct, kw_only=True):
    """One engine as it was seen, what it would have cost, and why it was or was not chosen.

    ``gate`` says what kept it out of the choice: ``starting``, ``draining``, ``unreachable``,
    ``failing`` and the like, ``no_kv_room``, ``no_state``, ``prefill_only``, ``tight``; empty
    where nothing did.
    """

    engine: str
    chosen: bool
    gate: str
    why: str
    role: str
    freshness: str
    age_ms: float | None
    decay: float
    trust: float
    cached_tokens: int
    host_tokens: int
    disk_tokens: int
    free_ratio: float | None
    free_tokens: int | None
    queue: int | None
    in_flight: int
    hinted: bool
    wait_ms: float | None = None
    recompute_ms: float | None = None
    load_ms: float | None = None
    disturb_ms: float | None = None
    cost_ms: float | None = None
    first_token_ms: float | None = None


class Explanation(msgspec.Struct, kw_only=True):
    """A record with its sentences: ``summary``, ``engines``, then ``story``, what happened."""

    request: Line
    summary: str
    story: list[str]
    engines_total: int
    engines: list[EngineVerdict]


@dataclass(frozen=True, slots=True)
class ExplainRules:
    """What decisions were made by: their settings' id, the free-KV gate, whether roles count."""

    settings_id: str
    gate: Gate
    roles: bool


def explain(record: RequestRecord, rules: ExplainRules, *, limit: int) -> Explanation:
    """Return why a request went where it did, with at most ``limit`` engines, chosen first."""
    line = line_of(record, rules.settings_id)
    choice = record.choice
    verdicts = [] if choice is None else _verdicts(choice, rules)
    return Explanation(
        request=line,
        summary=_summary(line, choice),
        story=list(_story(record, line)),
        engines_total=len(verdicts),
        engines=verdicts[:limit],
    )


def gate_of(candidate: Candidate, decision: DecisionRecord, rules: ExplainRules) -> str:
    """Return what kept an engine out of the choice, empty where nothing did."""
    if candidate.avoid:
        return candidate.avoid
    if candidate.freshness is Freshness.UNKNOWN:
        return "no_state"
    if decision.policy in ("round-robin", "least-loaded"):
        return ""
    by_cost, gate = decision.policy == "cost", gate_for(decision.priority, rules.gate)
    tokens = decision.prompt_tokens or 0
    held_tokens = min(tokens, trusted_tokens(candidate)) if by_cost else 0
    if not (
        has_room_for(candidate, gate, tokens, held_tokens) if by_cost else has_room(candidate, gate)
    ):
        return "no_kv_room"
    if rules.roles and candidate.role == "prefill":
        return "prefill_only"
    free_tokens = candidate.free_tokens
    is_tight = free_tokens is not None and free_tokens < tokens - held_tokens
    return "tight" if is_tight and by_cost else ""


def _verdicts(choice: Choice, rules: ExplainRules) -> list[EngineVerdict]:
    decision = choice.decision
    quotes = {quote.engine: quote for quote in decision.quotes}
    best = quotes.get(decision.engine or "")
    ages = ages_ms(choice)
    if len(ages) != len(decision.candidates):  # whoever decided did not know them
        ages = [None] * len(decision.candidates)
    verdicts = []
    for candidate, age_ms in zip(decision.candidates, ages, strict=True):
        quote = quotes.get(candidate.engine)
        gate = gate_of(candidate, decision, rules)
        chosen = candidate.engine == decision.engine
        verdict = EngineVerdict(
            engine=candidate.engine,
            chosen=chosen,
            gate=gate,
            why=_why(candidate, decision, gate, quote, best),
            role=candidate.role,
            freshness=candidate.freshness.value,
            age_ms=age_ms,
            decay=round(candidate.decay, 4),
            trust=round(candidate.trust, 4),
            cached_tokens=candidate.cached_tokens,
            host_tokens=candidate.host_tokens,
            disk_tokens=candidate.disk_tokens,
            free_ratio=None if candidate.free_ratio is None else round(candidate.free_ratio, 4),
            free_tokens=candidate.free_tokens,
            queue=candidate.queue,
            in_flight=candidate.in_flight,
            hinted=candidate.hinted,
        )
        if quote is not None:
            _take_quote(verdict, quote)
        verdicts.append(verdict)
    return sorted(verdicts, key=_order)


def _take_quote(verdict: EngineVerdict, quote: Quote) -> None:
    verdict.wait_ms = round(quote.wait_ms, 3)
    verdict.recompute_ms = round(quote.recompute_ms, 3)
    verdict.load_ms = round(quote.load_ms, 3)
    verdict.disturb_ms = round(quote.disturb_ms, 3)
    verdict.cost_ms = round(quote.cost_ms, 3)
    verdict.first_token_ms = round(quote.first_token_ms, 3)


def _order(verdict: EngineVerdict) -> tuple[bool, bool, float, int, str]:
    cost_ms = float("inf") if verdict.cost_ms is None else verdict.cost_ms
    return not verdict.chosen, bool(verdict.gate), cost_ms, -verdict.cached_tokens, verdict.engine


_GATES = {
    "no_state": "nothing fresh enough is known of it",
    "no_kv_room": "its free KV is below the threshold",
    "prefill_only": "it only prefills, and others can answer",
    "tight": "its free KV does not hold what of the prompt is new to it",
    "failing": "it failed a moment ago",
}


def _why(
    candidate: Candidate,
    decision: DecisionRecord,
    gate: str,
    quote: Quote | None,
    best: Quote | None,
) -> str:
    is_chosen = candidate.engine == decision.engine
    parts = [_GATES.get(gate, f"it is {gate}")] if gate else []
    if is_chosen:
        parts.insert(0, "chosen: " + _REASONS.get(decision.reason, decision.reason))
    if quote is None:
        held = trusted_tokens(candidate)
        parts.append(f"holds {held} tokens, {_load(candidate)}")
    elif is_chosen or best is None or gate:
        parts.append(f"{quote.cost_ms:.1f} ms: {_terms(quote, decision)}")
    else:
        parts.append(_compared(quote, best))
    return "; ".join(parts)


def _load(candidate: Candidate) -> str:
    free = "free KV unknown" if candidate.free_ratio is None else f"{candidate.free_ratio:.0%} free"
    return f"{free}, {max(candidate.queue or 0, candidate.in_flight)} requests"


def _terms(quote: Quote, decision: DecisionRecord) -> str:
    tokens = decision.prompt_tokens
    missing = "" if tokens is None else f" for {max(0, tokens - quote.held_tokens)} tokens"
    terms = [
        f"wait {quote.wait_ms:.1f}" if quote.wait_ms else "",
        f"compute {quote.recompute_ms:.1f}{missing}",
        f"bring back from slower tiers {quote.load_ms:.1f}" if quote.load_ms else "",
        f"trouble for others {quote.disturb_ms:.1f}" if quote.disturb_ms else "",
    ]
    return ", ".join(filter(None, terms))


def _compared(quote: Quote, best: Quote) -> str:
    """Say what makes an engine dearer than the one chosen, the largest term first."""
    more_ms = quote.cost_ms - best.cost_ms
    if more_ms <= _CLEARLY_MS:
        if more_ms >= -_CLEARLY_MS:
            return f"as good ({quote.cost_ms:.1f} ms): another one was drawn"
        return (
            f"{-more_ms:.1f} ms cheaper ({quote.cost_ms:.1f} ms), "
            "less than what the session, the floor share or nearness of costs is worth"
        )
    differences = sorted(
        (
            (quote.wait_ms - best.wait_ms, "its queue"),
            (quote.recompute_ms - best.recompute_ms, "more to compute"),
            (quote.load_ms - best.load_ms, "slower tiers"),
            (quote.disturb_ms - best.disturb_ms, "more trouble for others"),
        ),
        reverse=True,
    )
    terms = [f"{name} {by_ms:+.1f}" for by_ms, name in differences if by_ms > _CLEARLY_MS]
    return f"{more_ms:.1f} ms dearer ({quote.cost_ms:.1f} ms): {', '.join(terms)}"


def _summary(line: Line, choice: Choice | None) -> str:
    if line.outcome == "refused":
        said = _REFUSALS.get(line.reason, line.error)
        return f"refused with {line.status}, {line.reason}: {said}"
    if choice is None:
        return "it ended before anything was decided"
    decision = choice.decision
    if decision.engine is None:
        return _REFUSALS.get(decision.reason, decision.reason)
    reason = line.reason or decision.reason
    said = f"{line.engine or decision.engine}: {_REASONS.get(reason, reason)}"
    if decision.rung != "fresh":
        said += f" (by {decision.rung.replace('_', ' ')}: the state was not fresh)"
    return said


def _story(record: RequestRecord, line: Line) -> Iterator[str]:
    if line.waited_ms:
        yield f"it waited {line.waited_ms:.0f} ms for room"
    transfer = line.transfer
    if transfer is not None:
        yield from _told_of_pairs(line)
    for failure in line.failures:
        leg = "prefilling" if failure.leg == "prefill" else "before its first byte"
        yield f"{failure.engine} failed {leg} after {failure.after_ms:.0f} ms: {failure.why}"
    if line.first_byte_ms is not None:
        yield f"the first byte came after {line.first_byte_ms:.0f} ms{_predicted(line)}"
    reported, predicted = line.reported_cached_tokens, line.predicted_cached_tokens
    if reported is not None and predicted is not None:
        verdict = "as predicted" if reported == predicted else f"predicted were {predicted}"
        yield f"{reported} prompt tokens came from the cache, {verdict}"
    if line.total_ms is not None:
        tokens = "" if line.output_tokens is None else f" with {line.output_tokens} tokens"
        cause = f" ({line.error})" if line.error and line.outcome != "refused" else ""
        yield f"it ended {line.outcome}{cause} after {line.total_ms:.0f} ms{tokens}"
    elif record.ended_at is None:
        yield "it is still being served"


def _told_of_pairs(line: Line) -> Sequence[str]:
    transfer = line.transfer
    if transfer is None:
        return ()
    costs = ""
    if transfer.local_ms is not None and transfer.pair_ms is not None:
        costs = f": alone {transfer.local_ms:.1f} ms, by two {transfer.pair_ms:.1f} ms"
    if transfer.outcome == "local":
        return (f"one engine served it alone, since {transfer.why.replace('_', ' ')}{costs}",)
    size = "" if transfer.bytes is None else f", {transfer.bytes / 1e6:.1f} MB of KV"
    path = f" by {transfer.path}" if transfer.path else ""
    leg = f"; its prefill was {transfer.prefill}" if transfer.prefill else ""
    return (f"{transfer.source} prefilled for {transfer.target}{size}{path}{costs}{leg}",)


def _predicted(line: Line) -> str:
    if line.predicted_first_token_ms is None or line.first_token_ms is None:
        return ""
    return (
        f"; from its dispatch {line.first_token_ms:.0f} ms, "
        f"predicted were {line.predicted_first_token_ms:.0f} ms"
    )
