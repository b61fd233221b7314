"""Planning one request: which engine serves it, or which two.

Most models have neither roles nor KV that can move; for them this is one look at the model's
traits and the policy's decision. For the others, the policy's choice among engines that may
serve alone is compared with the best pair, by cost, and both costs are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nearkv.ingress.decisions import SplitRecord
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.pairing import Choice, Need, Pair, choose_pair
from nearkv.ingress.pd_costs import is_clearly_less
from nearkv.ingress.prefill_leg import read_fields, why_whole
from nearkv.ingress.routing import (
    Candidate,
    Decision,
    Gate,
    Policy,
    decide,
    decide_by_role,
)
from nearkv.ingress.settings import PdMode, PdSettings
from nearkv.ingress.two_legs import Split
from nearkv.ingress.weighing import Weigher


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a request; with a ``split``, the decision names the decode engine.

    ``computing_tokens`` are those that an engine alone will have to compute, counted only
    where plans depend on it.
    """

    decision: Decision
    split: Split | None = None
    record: SplitRecord | None = None
    computing_tokens: int = 0


class Planner:
    """Makes plans from candidates and what the fleet knows of moving KV."""

    def __init__(
        self, settings: PdSettings, knowledge: Knowledge, *, policy: Policy, gate: Gate
    ) -> None:
        self._settings = settings
        self._terms = settings.terms
        self._know = knowledge
        self._policy = policy
        self._gate = gate

    def plan(
        self, job: Job, candidates: Sequence[Candidate], *, turn: int, may_split: bool = True
    ) -> Plan:
        """Return the plan for a request; its decision's engine is ``None`` when nobody can."""
        if self._settings.mode is PdMode.OFF:
            return Plan(self._decide(candidates, turn))
        traits = self._know.fleet.traits(job.parsed.model)
        if not traits.movers and not traits.has_roles:
            return Plan(self._decide(candidates, turn))
        weigher = Weigher(job, candidates, traits, self._settings, self._know)
        local = self._decide_alone(candidates, weigher, turn)
        if not traits.movers or not may_split:
            return Plan(local, computing_tokens=weigher.missing_tokens(local.engine))
        return self._compare(job, weigher, local, turn)

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
                self._terms,
                turn=turn,
            )
        pair = choice.pair
        if pair is None or local.engine is None:
            return self._alone(weigher, local, pair, choice.why or "no_engine")
        if self._settings.mode is PdMode.ALWAYS:
            return self._together(weigher, local, pair, "always")
        if is_clearly_less(pair.seconds, weigher.local_seconds(local.engine), self._terms):
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
