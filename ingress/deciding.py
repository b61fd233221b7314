"""Deciding about one request: what its prompt means to the fleet, a plan, and its record."""

from collections.abc import Callable, Sequence

import msgspec
import structlog

from nearkv.ingress.candidates import CandidateBuilder, PromptView
from nearkv.ingress.decisions import DecisionRecord, predicted_tokens
from nearkv.ingress.errors import NoRoomError
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.planning import Plan, Planner
from nearkv.ingress.pricing import kv_bytes_per_token
from nearkv.ingress.routing import Candidate, Gate
from nearkv.ingress.settings import IngressSettings

_HINTED_TOKENS = 1 << 31
"""Stands for the unknown length of a prompt routed by a hint's keys: all of them may match."""

log = structlog.get_logger(__name__)


class Decided(msgspec.Struct, frozen=True):
    """A plan, the engine that answers (``None``: nobody can), and what it should have cached."""

    plan: Plan
    view: EngineView | None
    predicted: int


class Decider:
    """Makes, counts and records decisions; those not ``watched`` are only asked what if."""

    def __init__(
        self,
        settings: IngressSettings,
        knowledge: Knowledge,
        metrics: IngressMetrics,
        now: Callable[[], float],
        *,
        watched: bool = True,
    ) -> None:
        self._watched = watched
        self._settings = settings
        self._know = knowledge
        self._metrics = metrics
        self._now = now
        self._log = log.bind()  # a bound logger skips the module's lazy proxy at each event
        self._candidates = CandidateBuilder(
            knowledge.ledger, knowledge.parity, knowledge.suspects, settings.freshness.limits
        )
        self._planner = Planner(
            settings.pd,
            knowledge,
            policy=settings.policy,
            gate=Gate(settings.gate.min_free_bytes, settings.gate.min_free_ratio),
            cost=settings.cost,
        )
        self._turn = 0
        self._policy = settings.policy.value

    def decide(self, job: Job, attempt: int) -> Decided:
        """Return the decision; raises :class:`NoRoomError` where no engine may take more."""
        prompt = job.prompt
        keys: Sequence[int] = ()
        if prompt is not None:
            keys = prompt.keys
        elif job.hint is not None:
            keys = job.hint.keys
        depths, faster = self._know.fleet.match_tiers(keys) if keys else ({}, {})
        token_count = prompt.token_count if prompt is not None else _HINTED_TOKENS
        now = self._now()
        views = self._know.suspects.worth_asking(job.views, job.tried, now)
        candidates = self._candidates.build(
            views, PromptView(token_count, depths, job.hint, job.tried, faster), now
        )
        self._turn += 1
        plan = self._planner.plan(job, candidates, turn=self._turn, may_split=attempt == 0)
        predicted = predicted_tokens(candidates, plan.decision)
        record = self._record(job, attempt, plan, predicted, candidates)
        if self._watched:
            self._show(job, record, plan, now, views)
        if plan.decision.reason == "no_kv_room":
            raise NoRoomError(
                "every engine is below its free KV cache threshold; try again, or scale up",
                retry_after_seconds=self._settings.gate.retry_after_seconds,
            )
        chosen = plan.decision.engine
        view = next((v for v in job.views if v.info.id == chosen), None)
        return Decided(plan, view, predicted)

    def _record(
        self, job: Job, attempt: int, plan: Plan, predicted: int, candidates: Sequence[Candidate]
    ) -> DecisionRecord:
        decision, prompt = plan.decision, job.prompt
        expected = plan.expected
        record = DecisionRecord(
            request_id=job.request_id,
            path=job.path,
            model=job.parsed.model or "",
            policy=self._policy,
            engine=decision.engine,
            reason=decision.reason,
            rung=decision.rung,
            attempt=attempt,
            prompt_tokens=prompt.token_count if prompt is not None else None,
            predicted_cached_tokens=plan.split.target_tokens if plan.split else predicted,
            tokens_from=prompt.source if prompt is not None else "none",
            candidates=candidates,
            split=plan.record,
            priority=job.priority,
            quotes=plan.quotes,
            first_token_ms=None if expected is None else round(expected.first_token_ms, 3),
        )
        self._log.info(
            "decision",
            request_id=record.request_id,
            model=record.model,
            engine=record.engine,
            reason=record.reason,
            rung=record.rung,
            attempt=attempt,
            prompt_tokens=record.prompt_tokens,
            predicted_cached_tokens=record.predicted_cached_tokens,
            tokens_from=record.tokens_from,
            first_token_ms=record.first_token_ms,
        )
        # All that it stood on is in the record (/v1/explain); a line of that would be the dearest
        # part of a decision.
        self._log.debug("decision_inputs", decision=record)
        self._metrics.decisions.add(record.policy, record.reason, record.rung)
        if plan.record is not None:
            self._metrics.pd.decisions.add(plan.record.outcome, plan.record.why)
        return record

    def _show(
        self,
        job: Job,
        record: DecisionRecord,
        plan: Plan,
        now: float,
        views: Sequence[EngineView],
    ) -> None:
        """Hand a decision to whoever watches the request, with what it stood on."""
        watch, tried = job.watch, job.tried
        if job.prompt is not None:
            watch.keyed(job.prompt.keys, job.views[0].info.block_size if job.views else None)
        watch.decided(
            record,
            now=now,
            heard_at=[v.gauges_at for v in views if not tried or v.info.id not in tried],
            pull=self._pull_of(record, plan),
        )

    def _pull_of(self, record: DecisionRecord, plan: Plan) -> tuple[int | None, str]:
        """Return the KV bytes that the decode engine lacks, and the path they would take."""
        split = plan.split
        if split is None:
            return None, ""
        source, target = split.source, split.target
        reading = self._know.fleet.path_between(source, target)
        prior = self._settings.pd.prior.kv_bytes_per_token
        held_tokens = predicted_tokens(record.candidates, plan.decision)
        tokens = max(0, split.target_tokens - held_tokens)
        path = "" if reading is None else reading.path
        return tokens * int(kv_bytes_per_token(target, prior)), path
