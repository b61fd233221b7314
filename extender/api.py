"""The endpoints that kube-scheduler calls: filter, prioritize, preempt.

Only status 200 counts for kube-scheduler. A filter that fails holds a pod up, a prioritize that
fails is dropped in silence. So whatever goes wrong inside is counted and answered neutrally: all
nodes kept, equal scores. Errors are left for bodies that nobody could answer.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import structlog
from aiohttp import web

from nearkv.extender.asking import ask_of
from nearkv.extender.bodies import BodyLimits, BodyRoom, HeldRoom, read_body, send_json
from nearkv.extender.deciding import FilterDecision, PriorityDecision, Scorer
from nearkv.extender.decisions import Decision, Decisions, Rejection
from nearkv.extender.errors import BadRequestError
from nearkv.extender.explaining import explain
from nearkv.extender.metrics import ExtenderMetrics
from nearkv.extender.model import Ints, PodAsk, Snapshot
from nearkv.extender.preempting import answer_preemption
from nearkv.extender.view.pods import PodRules
from nearkv.extender.wire import Buffer, Mode, Question, Wire

log = structlog.get_logger(__name__)

FILTER, PRIORITIZE, PREEMPT = "filter", "prioritize", "preempt"

_SnapshotSource = Callable[[], Snapshot | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """How questions are answered: limits, how pods are read, the highest score.

    ``memory_ratio`` is the share of a device that engines are taken to need which do not say.
    """

    limits: BodyLimits
    rules: PodRules
    memory_ratio: float
    highest_score: int


class SchedulerApi:
    """Handlers for kube-scheduler; ``now`` is monotonic seconds, ``wall`` seconds of the day."""

    def __init__(  # noqa: PLR0913 (keyword-only collaborators)
        self,
        answering: Answering,
        *,
        scorer: Scorer,
        snapshot: _SnapshotSource,
        metrics: ExtenderMetrics,
        decisions: Decisions,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._answering = answering
        self._scorer = scorer
        self._snapshot = snapshot
        self._metrics = metrics
        self._decisions = decisions
        self._now = now
        self._wall = wall
        self._wire = Wire()
        self._room = BodyRoom(answering.limits.max_bodies_bytes)

    async def filter(self, request: web.Request) -> web.StreamResponse:
        """Answer which nodes can work at all."""
        return await self._answer(request, FILTER, self._filter)

    async def prioritize(self, request: web.Request) -> web.StreamResponse:
        """Answer a score for each node."""
        return await self._answer(request, PRIORITIZE, self._prioritize)

    async def preempt(self, request: web.Request) -> web.StreamResponse:
        """Answer with all candidates for preemption, unjudged."""
        return await self._answer(request, PREEMPT, _preempt)

    async def _answer(
        self,
        request: web.Request,
        verb: str,
        answer: Callable[[Buffer], tuple[Mode, int, Iterable[Buffer]]],
    ) -> web.StreamResponse:
        with self._room.held() as held:
            return await self._answer_within(request, verb, answer, held)

    async def _answer_within(
        self,
        request: web.Request,
        verb: str,
        answer: Callable[[Buffer], tuple[Mode, int, Iterable[Buffer]]],
        held: HeldRoom,
    ) -> web.StreamResponse:
        limits = self._answering.limits
        try:
            body = await read_body(request, limits, held)
            began = self._now()
            mode, candidates, pieces = answer(body)
            whole = list(pieces)
            self._metrics.request_seconds.labels(verb, mode).observe(self._now() - began)
            self._metrics.candidates.labels(verb).observe(candidates)
            return await send_json(request, whole, limits)
        except BadRequestError as error:
            return self._refuse(request, verb, error)
        except asyncio.CancelledError:
            self._metrics.bad_requests.labels(verb, "client_gone").inc()
            raise
        except (ConnectionError, TimeoutError) as error:
            reason = "answer_not_taken" if isinstance(error, TimeoutError) else "client_gone"
            self._metrics.bad_requests.labels(verb, reason).inc()
            return web.Response()  # goes nowhere: the connection is gone

    def _refuse(
        self, request: web.Request, verb: str, error: BadRequestError
    ) -> web.StreamResponse:
        self._metrics.bad_requests.labels(verb, error.reason).inc()
        log.warning(
            "bad_request", verb=verb, reason=error.reason, error=str(error), peer=request.remote
        )
        return error_response(error.status, str(error), reason=error.reason)

    def _filter(self, body: Buffer) -> tuple[Mode, int, Iterable[Buffer]]:
        question, ask = self._understand(body)
        decision = self._decide_filter(ask, question)
        self._record_filter(ask, question, decision)
        pieces = self._wire.filtered(
            question,
            kept=decision.kept,
            failed=decision.failed,
            unresolvable=decision.unresolvable,
        )
        return question.mode, len(question.names), pieces

    def _prioritize(self, body: Buffer) -> tuple[Mode, int, Iterable[Buffer]]:
        question, ask = self._understand(body)
        scores = self._decide_scores(ask, question)
        return question.mode, len(question.names), [self._wire.scores(question.names, scores)]

    def _understand(self, body: Buffer) -> tuple[Question, PodAsk]:
        question = self._wire.read(body)
        ask, ignored = ask_of(
            question.pod, self._answering.rules, memory_ratio=self._answering.memory_ratio
        )
        for annotation in ignored:
            self._metrics.ignored_annotations.labels(annotation).inc()
        return question, ask

    def _decide_filter(self, ask: PodAsk, question: Question) -> FilterDecision:
        snapshot = self._snapshot()
        if not ask.group or snapshot is None:
            return FilterDecision(kept=question.names, failed={}, unresolvable={})
        try:
            return self._scorer.filter(ask, question.names, snapshot, self._now())
        except Exception:  # noqa: BLE001 (a defect must not hold pods up; it is logged and counted)
            self._fail(FILTER, ask)
            return FilterDecision(kept=question.names, failed={}, unresolvable={})

    def _record_filter(self, ask: PodAsk, question: Question, decision: FilterDecision) -> None:
        if not decision.failed and not decision.unresolvable:
            return
        rejected = self._metrics.rejected_nodes
        rejected.labels("foreign_memory").inc(len(decision.failed))
        rejected.labels("failed_devices").inc(len(decision.unresolvable))
        if not decision.kept:
            self._metrics.all_rejected.inc()
        rejection = Rejection(
            nodes=len(question.names),
            failed=decision.failed,
            unresolvable=decision.unresolvable,
        )
        self._keep(ask, FILTER, rejection.size_bytes, rejection.describe)

    def _decide_scores(self, ask: PodAsk, question: Question) -> Ints:
        snapshot = self._snapshot()
        if not ask.group:
            return self._neutral(question, "not_ours")
        if snapshot is None:
            return self._neutral(question, "no_snapshot")
        if not question.names:
            return self._neutral(question, "no_nodes")
        try:
            decision = self._scorer.prioritize(ask, question.names, snapshot, self._now())
        except Exception:  # noqa: BLE001 (as above)
            self._fail(PRIORITIZE, ask)
            return self._neutral(question, "internal_failure")
        self._record_scores(ask, decision)
        return decision.scores

    def _record_scores(self, ask: PodAsk, decision: PriorityDecision) -> None:
        record = decision.record
        if record is None:
            return
        if record.flat and not record.dealt_to:
            self._metrics.neutral_answers.labels("equal").inc()
        self._keep(ask, PRIORITIZE, record.size_bytes, lambda limit: explain(record, limit))

    def _neutral(self, question: Question, reason: str) -> Ints:
        self._metrics.neutral_answers.labels(reason).inc()
        return np.full(len(question.names), self._answering.highest_score // 2, np.int32)

    def _fail(self, verb: str, ask: PodAsk) -> None:
        self._metrics.internal_failures.labels(verb).inc()
        pod = f"{ask.namespace}/{ask.name}"
        log.error("deciding_failed", verb=verb, pod=pod, exc_info=True)  # noqa: LOG014 (called by handlers)

    def _keep(
        self, ask: PodAsk, verb: str, size_bytes: int, describe: Callable[[int], dict[str, object]]
    ) -> None:
        self._decisions.add(
            Decision(
                pod=f"{ask.namespace}/{ask.name}",
                uid=ask.uid,
                verb=verb,
                at=self._wall(),
                size_bytes=size_bytes,
                describe=describe,
            )
        )


def _preempt(body: Buffer) -> tuple[Mode, int, Sequence[Buffer]]:
    mode, candidates, answer = answer_preemption(body)
    return mode, candidates, [answer]


def error_response(status: int, message: str, *, reason: str) -> web.Response:
    """Return an error as JSON; kube-scheduler reads no more than its status."""
    body = msgspec.json.encode({"error": message, "reason": reason})
    return web.Response(status=status, body=body, content_type="application/json")


async def refuse_bind(_request: web.Request) -> web.Response:
    """Say that nearkv binds nothing."""
    return error_response(
        404, "nearkv binds no pods: leave bindVerb out of the configuration", reason="no_bind"
    )


async def refuse_preempt(_request: web.Request) -> web.Response:
    """Say how preemption is switched on."""
    return error_response(
        404, "preempt is off: set preempt, or leave preemptVerb out", reason="no_preempt"
    )
