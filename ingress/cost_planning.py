"""One request under policy ``cost``: quotes for every engine, and the decision they lead to."""

from collections.abc import Mapping, Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from nearkv.ingress.cost_policy import Ask, Entrant, decide_by_cost, gate_for
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.placements import Placed
from nearkv.ingress.quoting import EngineTerms, Quote, Weights, quote
from nearkv.ingress.routing import Candidate, Decision, Gate
from nearkv.ingress.settings import CostSettings


class Expected(msgspec.Struct, frozen=True, gc=False):
    """What is expected of the engine chosen.

    ``missing_tokens`` are those it computes, ``first_token_ms`` the predicted time to its
    first token. ``undisturbed`` says that nothing is known to be before this request there.
    """

    missing_tokens: int
    first_token_ms: float
    undisturbed: bool


class Costed(msgspec.Struct, frozen=True):
    """A decision by cost, the quotes behind it, and what is expected."""

    decision: Decision
    quotes: Sequence[Quote]
    expected: Expected | None


class CostChooser:
    """Chooses one engine by cost."""

    def __init__(
        self,
        settings: CostSettings,
        weights: Weights,
        knowledge: Knowledge,
        gate: Gate,
        *,
        roles: bool,
    ) -> None:
        self._roles = roles
        self._settings = settings
        self._rules = settings.rules
        self._weights = weights
        self._know = knowledge
        self._gate = gate

    def prompt_tokens(self, job: Job, candidates: Sequence[Candidate]) -> int:
        """Return a prompt's length; where it is unknown, at least what a hint makes likely."""
        if job.prompt is not None:
            return job.prompt.token_count
        hinted = max((c.cached_tokens for c in candidates), default=0)
        return hinted + self._settings.unknown_prompt_tokens

    def choose(
        self,
        job: Job,
        candidates: Sequence[Candidate],
        views: Mapping[str, EngineView],
        terms: Mapping[str, EngineTerms],
        *,
        tokens: int,
        turn: int,
    ) -> Costed:
        """Return the decision for a prompt of so many tokens; views and terms are by engine."""
        priority = job.priority
        weights = self._weights.for_priority(priority) if priority else self._weights
        placements = self._know.placements
        entrants = []
        quotes = []
        for candidate in candidates:
            engine = candidate.engine
            quoted = quote(candidate, terms[engine], tokens, weights)
            placed = placements.at(engine, views[engine].info.incarnation)
            if placed is None:
                placed = self._join(engine, candidates, views)
            quotes.append(quoted)
            entrants.append(Entrant(candidate, quoted, placed.requests, placed.new_tokens))
        seed = xxh3_64_intdigest(job.request_id.encode())
        ask = Ask(
            seed=seed,
            group=job.prompt.keys[0] if job.prompt is not None and job.prompt.keys else seed,
            tokens=tokens,
            priority=priority,
            turn=turn,
            roles=self._roles,
        )
        gate = gate_for(priority, self._gate) if priority else self._gate
        decision = decide_by_cost(entrants, ask, self._rules, gate)
        return Costed(decision, quotes, _expected(decision, quotes, tokens))

    def _join(
        self, engine: str, candidates: Sequence[Candidate], views: Mapping[str, EngineView]
    ) -> Placed:
        """Start counting what is placed on a new engine: as on the others on average."""
        placements = self._know.placements
        placed = (placements.at(c.engine, views[c.engine].info.incarnation) for c in candidates)
        known = [each.new_tokens for each in placed if each is not None]
        usual = sum(known) / len(known) if known else 0.0
        return placements.join(engine, views[engine].info.incarnation, usual)


def _expected(decision: Decision, quotes: Sequence[Quote], tokens: int) -> Expected | None:
    chosen = decision.engine
    for quoted in quotes:
        if quoted.engine == chosen:
            missing = tokens - quoted.held_tokens  # no quote holds more than the prompt
            return Expected(missing, quoted.first_token_ms, quoted.wait_ms == 0.0)
    return None
