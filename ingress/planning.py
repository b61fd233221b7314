"""Planning one request: which engine serves it, or which two.

Most models have neither roles nor KV that can move; for them this is one look at the model's
traits and the policy's decision. For the others, the policy's choice among engines that may
serve alone is compared with the best pair, by cost, and both costs are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nearkv.ingress.cost_planning import CostChooser, Expected
from nearkv.ingress.decisions import SplitRecord
from nearkv.ingress.fleet import ModelTraits
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.pairing import Choice, Need, Pair, choose_pair
from nearkv.ingress.pd_costs import CostTerms, is_clearly_less
from nearkv.ingress.prefill_leg import read_fields, why_whole
from nearkv.ingress.pricing import Pricing
from nearkv.ingress.quoting import EngineTerms, Quote
from nearkv.ingress.routing import (
    Candidate,
    Decision,
    Gate,
    Policy,
    decide,
    decide_by_role,
)
from nearkv.ingress.settings import CostSettings, PdMode, PdSettings
from nearkv.ingress.two_legs import Split
from nearkv.ingress.weighing import Weigher

_USUAL_COST = CostSettings()


@dataclass(slots=True)
class Plan:
    """What to do with a request; with a ``split``, the decision names the decode engine.

    Not to be changed; not frozen, since that would cost a microsecond on every request.

    ``computing_tokens`` are those that an engine alone will have to compute, counted only
    where plans depend on it. ``quotes`` are all engines' costs, ``expected`` what the engine
    alone should do; both under policy ``cost`` only.
    """

    decision: Decision
    split: Split | None = None
    record: SplitRecord | None = None
    computing_tokens: int = 0
    quotes: Sequence[Quote] = ()
    expected: Expected | None = None


class Planner:
    """Makes plans from candidates and what the fleet knows of moving KV."""

    def __init__(
        self,
        settings: PdSettings,
        knowledge: Knowledge,
        *,
        policy: Policy,
        gate: Gate,
        cost: CostSettings = _USUAL_COST,
    ) -> None:
        self._settings = settings
        self._terms = settings.terms
        self._know = knowledge
        self._policy = policy
        self._gate = gate
        self._weights = cost.weights(settings.decode_stall_weight)
        self._pricing = Pricing(knowledge, cost, settings.prior)
        self._chooser = CostChooser(
            cost, self._weights, knowledge, gate, roles=settings.mode is not PdMode.OFF
        )

    def plan(
        self, job: Job, candidates: Sequence[Candidate], *, turn: int, may_split: bool = True
    ) -> Plan:
        """Return the plan for a request; its decision's engine is ``None`` when nobody can."""
        if self._policy is Policy.COST:
            return self._plan_by_cost(job, candidates, turn, may_split=may_split)
        if self._settings.mode is PdMode.OFF:
            return Plan(self._decide(candidates, turn))
        traits = self._know.fleet.traits(job.parsed.model)
        if not traits.movers and not traits.has_roles:
            return Plan(self._decide(candidates, turn))
        tokens = 0 if job.prompt is None else job.prompt.token_count
        views = {view.info.id: view for view in job.views}
        engines = self._pricing.terms(views, candidates, tokens)
        weigher = self._weigher(job, candidates, traits, engines, self._terms)
        local = self._decide_alone(candidates, weigher, turn)
        if not traits.movers or not may_split:
            return Plan(local, computing_tokens=weigher.missing_tokens(local.engine))
        return self._compare(job, weigher, local, turn)

    def _plan_by_cost(
        self, job: Job, candidates: Sequence[Candidate], turn: int, *, may_split: bool
    ) -> Plan:
        """Compare one engine alone with pairs, all by the same terms."""
        chooser = self._chooser
        tokens = chooser.prompt_tokens(job, candidates)
        views = {view.info.id: view for view in job.views}
        engines = self._pricing.terms(views, candidates, tokens)
        costed = chooser.choose(job, candidates, views, engines, tokens=tokens, turn=turn)
        expected = costed.expected
        alone = Plan(
            costed.decision,
            computing_tokens=0 if expected is None else max(1, expected.missing_tokens),
            quotes=costed.quotes,
            expected=expected,
        )
        if not may_split or self._settings.mode is PdMode.OFF:
            return alone
        traits = self._know.fleet.traits(job.parsed.model)
        if not traits.movers:
            return alone
        terms = replace(self._terms, weights=self._weights.for_priority(job.priority))
        weigher = self._weigher(job, candidates, traits, engines, terms)
        compared = self._compare(job, weigher, costed.decision, turn)
        if compared.split is None:
            return replace(alone, record=compared.record)
        return replace(compared, quotes=costed.quotes)

    def _weigher(
        self,
        job: Job,
        candidates: Sequence[Candidate],
        traits: ModelTraits,
        engines: Mapping[str, EngineTerms],
        terms: CostTerms,
    ) -> Weigher:
        return Weigher(
            job,
            candidates,
            traits,
            engines=engines,
            terms=terms,
            settings=self._settings,
            knowledge=self._know,
        )

    def _decide(self, candidates: Sequence[Candidate], turn: int) -> Decision:
        return decide(self._policy, candidates, turn=turn, gate=self._gate)

    def _decide_alone(
        self, candidates: Sequence[Candidate], weigher: Weigher, turn: int
    ) -> Decision:
        """Choose one engine: by role, unless a decode engine clearly computes it sooner."""
        first, *others = decide_by_role(self._policy, candidates, turn=turn, gate=self._gate)
        for other in others:
            if weigher.role(other.engine) != "decode" or not weigher.knows_tokens:
                continue
            if is_clearly_less(
                weigher.local_seconds(other.engine),
                weigher.local_seconds(first.engine),
                self._terms,
            ):
                return other
        return first

    def _compare(self, job: Job, weigher: Weigher, local: Decision, turn: int) -> Plan:
        why = self._why_whole(job)
        choice = Choice(None, why)
        if not why:
            choice = choose_pair(
                weigher.pair_candidates(self._gate),
                Need(
                    room_tokens=weigher.token_count + self._settings.room_margin_tokens,
                    holder_tokens=self._settings.min_tokens,
                ),
                weigher.path_between,
                weigher.terms,
                turn=turn,
            )
        pair = choice.pair
        if pair is None or local.engine is None:
            return self._alone(weigher, local, pair, choice.why or "no_engine")
        if self._settings.mode is PdMode.ALWAYS:
            return self._together(weigher, local, pair, "always")
        if is_clearly_less(pair.seconds, weigher.local_seconds(local.engine), weigher.terms):
            return self._together(weigher, local, pair, "cheaper")
        return self._alone(weigher, local, pair, "not_cheaper")

    def _why_whole(self, job: Job) -> str:
        """Return why this request is not split, empty if it may be; looked at once."""
        if job.prompt is None:
            return "no_tokens"
        if job.pairs_left <= 0:
            return "pairs_failed"
        if job.prompt.token_count < self._settings.min_tokens:
            return "short"
        if job.fields is None:
            try:
                job.fields = read_fields(job.body)
            except ValueError:
                return "unreadable"  # engines may be less strict, so it is served as it is
        return why_whole(job.fields)

    def _alone(self, weigher: Weigher, local: Decision, pair: Pair | None, why: str) -> Plan:
        record = weigher.record("local", why, local, pair)
        missing = weigher.missing_tokens(local.engine)
        return Plan(local, record=record, computing_tokens=missing)

    def _together(self, weigher: Weigher, local: Decision, pair: Pair, why: str) -> Plan:
        return Plan(
            weigher.decision(pair),
            split=weigher.split(pair),
            record=weigher.record(pair.outcome, why, local, pair),
        )
