"""Picking by the router: the same knowledge, candidates and plans as the own proxy.

This module is all that stands between the protocol and the router's inside.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import msgspec
from aiohttp import web

from nearkv.ingress.accepting import RequestIds, check_path, check_room
from nearkv.ingress.admitting import Admission
from nearkv.ingress.deciding import Decided, Decider
from nearkv.ingress.errors import (
    IngressError,
    NoEngineError,
    NoRoomError,
    RequestError,
)
from nearkv.ingress.extproc.messages import Header
from nearkv.ingress.extproc.picking import Asked, Pick
from nearkv.ingress.extproc.reaching import Reach
from nearkv.ingress.extproc.ticketing import Books, Chosen, RoutedTicket
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.hints import prefix_ids_of
from nearkv.ingress.keying import Job, KeyFinder
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.learning import Learner
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.planning import Plan
from nearkv.ingress.recording.recorder import Recorder
from nearkv.ingress.recording.watching import RequestWatch
from nearkv.ingress.requests import parse_request
from nearkv.ingress.selecting import EngineSelector
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.tracing.context import TRACEPARENT_HEADER


class RouterPicker:
    """Picks as the own proxy does, among the engines that the gateway can reach."""

    def __init__(  # noqa: PLR0913 (its collaborators, by keyword)
        self,
        *,
        settings: IngressSettings,
        knowledge: Knowledge,
        metrics: IngressMetrics,
        admission: Admission,
        selector: EngineSelector,
        recorder: Recorder,
        reach: Reach,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._know = knowledge
        self._metrics = metrics
        self._admission = admission
        self._selector = selector
        self._recorder = recorder
        self._reach = reach
        self._others = settings.ext_proc.fallback_endpoints
        self._now = now
        self._keys = KeyFinder(knowledge, metrics, settings.policy, now)
        self._decider = Decider(settings, knowledge, metrics, now)
        # Ties go round by turns, which are counted with each decision.
        self._second_best = Decider(settings, knowledge, metrics, now, watched=False)
        self._books = Books(
            knowledge,
            metrics,
            Learner(knowledge, metrics),
            reach,
            wake=admission.wake,
            now=now,
            clock=time.perf_counter,
        )
        self._own_headers, self._removed_headers = _credentials(settings)
        self._request_ids = RequestIds()

    def check_room(self) -> None:
        """Look whether one more request may be served; raises ``TooManyRequestsError``."""
        check_room(self._know.in_flight.count, self._settings)

    def refused(self, error: IngressError) -> None:
        """Count a refusal among the requests answered."""
        self._metrics.requests.add(error.reason, str(error.status))

    async def pick(self, asked: Asked) -> RoutedTicket:
        """Choose; raises ``IngressError`` where the request cannot be served."""
        self._know.totals.requests += 1
        watch = self._recorder.begin(
            self._request_ids.of(asked.headers.get("x-request-id", "")),
            asked.path,
            arrived_at=asked.arrived_at,
            traceparent=asked.headers.get(TRACEPARENT_HEADER, ""),
        )
        try:
            return await self._pick(asked, watch)
        except IngressError as error:
            watch.refused(error.reason, error.status, str(error))
            watch.close()
            raise
        except BaseException:
            watch.close()
            raise

    async def _pick(self, asked: Asked, watch: RequestWatch) -> RoutedTicket:
        job = await self._accept(asked, watch)
        await self._keys.find(job)
        if job.tenant is not None:
            self._admission.charge(job.tenant, job.charged_tokens)
        decided = await self._decide(job, asked)
        if decided.view is None:
            raise NoEngineError("no engine is known that could serve this request")
        endpoint, prefiller = self._reach.endpoint(decided.view), self._prefiller(decided.plan)
        if not endpoint:  # it left the pool while the request waited
            raise NoEngineError("the engine chosen cannot be reached any more")
        others = self._next_best(job, decided.view)
        plan = _without_bodies(job, decided.plan, splits=bool(prefiller))
        chosen = Chosen(plan, decided.view, decided.predicted)
        pick = Pick(
            endpoint=endpoint,
            request_id=job.request_id,
            others=others,
            prefiller=prefiller,
            dp_rank=chosen.view.info.dp_rank,
            headers=[*self._own_headers, *_trace_headers(watch)],
            removed=self._removed_headers,
        )
        self._metrics.routing_seconds.observe(max(0.0, time.perf_counter() - asked.arrived_at))
        return RoutedTicket(self._books, job, chosen, pick, shows_answer=asked.shows_answer)

    # -- Accepting ---------------------------------------------------------------------

    async def _accept(self, asked: Asked, watch: RequestWatch) -> Job:
        check_path(asked.path)
        tenant, priority = self._admission.admit(asked.headers)
        headers = asked.headers
        prefix_ids = prefix_ids_of(headers)
        parsed, body = self._selector.names.apply(
            parse_request(
                asked.method, asked.path, asked.body, lambda: headers.get("content-type", "")
            ),
            asked.body,
        )
        if body is not asked.body:
            if not asked.may_change_body:
                raise RequestError(
                    "model: an alias can be put right only with FULL_DUPLEX_STREAMED bodies",
                    param="model",
                )
            asked.changed_body = body
        reachable = self._reach.views(parsed.model, asked.endpoints)
        views = await self._selector.narrow(reachable, parsed, headers)
        adapter = self._selector.adapter_of(parsed, views)
        watch.accepted(
            model=parsed.model,
            stream=parsed.stream,
            tenant="" if tenant is None else tenant.spec.name,
            prefix_ids=prefix_ids,
        )
        return Job(
            web_request=cast(web.Request, None),  # nothing is forwarded from here
            path=asked.path,
            body=body,
            parsed=parsed,
            request_id=watch.record.request_id,
            arrived_at=asked.arrived_at,
            views=views,
            prefix_ids=prefix_ids,
            hint=self._know.hints.first_of(prefix_ids) or self._selector.home_of(adapter),
            priority=priority,
            tenant=tenant,
            adapter=adapter,
            watch=watch,
        )

    # -- Deciding ----------------------------------------------------------------------

    async def _decide(self, job: Job, asked: Asked) -> Decided:
        """Decide at once, or, where there is no room, in turn."""

        def decide() -> Decided:
            return self._decider.decide(job, 0)

        def decide_again() -> Decided:
            try:
                reachable = self._reach.views(job.parsed.model, asked.endpoints)
            except IngressError:
                reachable = ()
            job.views = self._selector.present(job.views, reachable, job.parsed, asked.headers)
            return decide()

        return await self._admission.in_turn(
            job.parsed.model or "",
            job.priority,
            decide,
            again=decide_again,
            queued=job.watch.queued,
        )

    def _next_best(self, job: Job, first: EngineView) -> list[str]:
        """Return the endpoints to try after the pick, each as if those before had failed."""
        found: list[str] = []
        view: EngineView | None = first
        while view is not None and len(found) < self._others:
            job.tried.add(view.info.id)
            try:
                view = self._second_best.decide(job, 1 + len(found)).view
            except NoRoomError:
                break
            if view is not None and (endpoint := self._reach.endpoint(view)):
                found.append(endpoint)
        return found

    def _prefiller(self, plan: Plan) -> str:
        return "" if plan.split is None else self._reach.endpoint(plan.split.source)


def _without_bodies(job: Job, plan: Plan, *, splits: bool) -> Plan:
    """Let go of what deciding needed of the prompt: answers take minutes, prompts megabytes."""
    job.body, job.fields = b"", None
    job.parsed = msgspec.structs.replace(job.parsed, text="", token_ids=())
    split = plan.split
    if split is not None:
        split = replace(split, fields={}) if splits else None
    return replace(plan, split=split)


def _trace_headers(watch: RequestWatch) -> list[Header]:
    return [(TRACEPARENT_HEADER, watch.traceparent)] if watch.traceparent else []


def _credentials(settings: IngressSettings) -> tuple[list[Header], list[str]]:
    """Return the headers that engines get and lose where clients' keys are ours to check."""
    if settings.tenants.file is None:
        return [], []
    if settings.engine_api_key is None:
        return [], ["authorization", "x-api-key"]
    key = settings.engine_api_key.get_secret_value()
    return [("authorization", f"Bearer {key}")], ["x-api-key"]
