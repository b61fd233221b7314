"""Serving ``/v1/*``: read, tokenize, decide, forward, learn.

One request, in order: the body is read and checked, its block keys are found (at most one
tokenization), the policy decides, the ledger counts, the request is forwarded. A failure
before the first byte gets one more decision without the engine that failed.
"""

import asyncio
import time
from collections.abc import Callable

import structlog
from aiohttp import web

from nearkv.ingress.accepting import RequestIds, check_path, check_room
from nearkv.ingress.admitting import Admission
from nearkv.ingress.answers import (
    ENGINE_HEADER,
    PREDICTED_HEADER,
    PREFILL_ENGINE_HEADER,
    REASON_HEADER,
    REQUEST_ID_HEADER,
    error_response,
)
from nearkv.ingress.assembling import Sending
from nearkv.ingress.bodies import BodyRoom, HeldRoom
from nearkv.ingress.deciding import Decided
from nearkv.ingress.engine_failures import FailureKind
from nearkv.ingress.errors import (
    EngineFailedError,
    EngineTimeoutError,
    IngressError,
    NoEngineError,
    NoRoomError,
)
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.forwarding import Forwarder, Opened, Outcome, RetryableFailureError
from nearkv.ingress.hints import prefix_ids_of
from nearkv.ingress.keying import Job, KeyFinder
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.opening import Serving
from nearkv.ingress.recording.recorder import Recorder
from nearkv.ingress.recording.watching import RequestWatch
from nearkv.ingress.requests import parse_request
from nearkv.ingress.selecting import EngineSelector
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.tracing.context import TRACEPARENT_HEADER
from nearkv.ingress.two_legs import PrefillFailedError

_ENGINES_FAULTS = ("engine_died", "engine_timeout")

log = structlog.get_logger(__name__)


class GenerateHandler:
    """Handles every ``/v1/*`` request that an engine has to answer."""

    def __init__(  # noqa: PLR0913 - its collaborators
        self,
        settings: IngressSettings,
        knowledge: Knowledge,
        forwarder: Forwarder,
        metrics: IngressMetrics,
        *,
        sending: Sending,
        admission: Admission,
        recorder: Recorder,
        selector: EngineSelector,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        self._selector = selector
        self._know = knowledge
        self._forwarder = forwarder
        self._metrics = metrics
        self._admission = admission
        self._decider = sending.decider
        self._keys = KeyFinder(knowledge, metrics, settings.policy, now)
        self._in_flight = knowledge.in_flight
        self._now = now
        self._opener = sending.opener
        self._retrying = sending.retrying
        self._learner = sending.learner
        self._request_ids = RequestIds()
        self._bodies = BodyRoom(settings)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; errors become OpenAI's envelope, with a reason header."""
        arrived_at = time.perf_counter()
        self._know.totals.requests += 1
        request_id = self._request_ids.of(request.headers.get("X-Request-Id", ""))
        self._in_flight.enter(request)
        held = self._bodies.hold()
        watch = self._recorder.begin(
            request_id,
            request.path,
            arrived_at=arrived_at,
            traceparent=request.headers.get(TRACEPARENT_HEADER, ""),
        )
        try:
            job = await self._accept(request, request_id, arrived_at, watch, held)
            await self._keys.find(job)
            if job.tenant is not None:
                self._admission.charge(job.tenant, job.charged_tokens)
            return await self._serve(job)
        except IngressError as error:
            log.info(
                "refused",
                path=request.path,
                request_id=request_id,
                reason=error.reason,
                error=str(error),
            )
            return self._refuse(error, request, request_id, watch)
        except Exception:
            # The last line of defence: a defect must not look like a broken connection.
            log.exception("request_failed", path=request.path, request_id=request_id)
            defect = IngressError("an error inside the ingress")
            return self._refuse(defect, request, request_id, watch)
        finally:
            held.release()
            self._in_flight.leave(request)
            watch.close()

    def _refuse(
        self, error: IngressError, request: web.Request, request_id: str, watch: RequestWatch
    ) -> web.Response:
        self._metrics.requests.add(error.reason, str(error.status))
        watch.refused(error.reason, error.status, str(error))
        return error_response(error, request_id=request_id, path=request.path)

    # -- Accepting ---------------------------------------------------------------------

    async def _accept(
        self,
        request: web.Request,
        request_id: str,
        arrived_at: float,
        watch: RequestWatch,
        held: HeldRoom,
    ) -> Job:
        check_room(self._in_flight.count, self._settings)
        check_path(request.path)
        tenant, priority = self._admission.admit(request.headers)
        body = await self._bodies.read(request, held)
        parsed, body = self._selector.names.apply(
            parse_request(request.method, request.path, body, lambda: request.content_type), body
        )
        prefix_ids = prefix_ids_of(request.headers)
        watch.accepted(
            model=parsed.model,
            stream=parsed.stream,
            tenant="" if tenant is None else tenant.spec.name,
            prefix_ids=prefix_ids,
        )
        views = await self._selector.select(parsed, request.headers)
        adapter = self._selector.adapter_of(parsed, views)
        hint = self._know.hints.first_of(prefix_ids) if prefix_ids else None
        return Job(
            web_request=request,
            path=request.path,
            body=body,
            parsed=parsed,
            request_id=request_id,
            arrived_at=arrived_at,
            views=views,
            prefix_ids=prefix_ids,
            hint=hint or self._selector.home_of(adapter),
            priority=priority,
            tenant=tenant,
            adapter=adapter,
            watch=watch,
        )

    # -- Deciding and forwarding -------------------------------------------------------

    async def _serve(self, job: Job) -> web.StreamResponse:
        """Decide and forward, once more on another engine after a failure.

        Prefill legs that fail are no attempts of this kind: nothing went to the engine that
        answers. They are bounded by ``job.pairs_left``.
        """
        failure: RetryableFailureError | None = None
        attempt, last_failed = 0, ""
        self._retrying.count(job)
        while True:
            try:
                decided = await self._decide(job, attempt, failure)
            except NoRoomError:
                if failure is None:
                    raise
                break  # an engine's own error says more than the others' lack of room
            view = decided.view
            if view is None:
                if failure and await self._retrying.same_again(job, last_failed, failure):
                    continue
                break
            if failure is not None and last_failed:
                self._metrics.retries.add(failure.kind.value)
                failure.discard()
            try:
                return await self._dispatch(job, decided, view)
            except PrefillFailedError as error:
                self._note_failed_prefill(job, error)
                last_failed = ""
            except RetryableFailureError as error:
                failure, last_failed = error, view.info.id
                attempt += 1
                self._note_failed(job, view, error)
                if not self._retrying.may_retry(job, error):
                    break
        return await self._give_up(job, failure)

    def _note_failed(self, job: Job, view: EngineView, error: RetryableFailureError) -> None:
        info = view.info
        job.tried.add(info.id)
        job.watch.failed(info.id, str(error))
        self._retrying.blame(job, view, error.kind)
        log.warning("engine_failed", request_id=job.request_id, engine=info.id, error=str(error))

    def _note_failed_prefill(self, job: Job, error: PrefillFailedError) -> None:
        job.failed_sources.add(error.source)
        job.watch.failed(error.source, str(error), leg="prefill")
        job.pairs_left = job.pairs_left - 1 if error.may_pair_again else 0
        log.warning(
            "prefill_failed", request_id=job.request_id, engine=error.source, error=str(error)
        )

    async def _decide(
        self, job: Job, attempt: int, failure: RetryableFailureError | None
    ) -> Decided:
        """Decide at once, or, where there is no room and nothing failed yet, in turn."""

        def decide() -> Decided:
            return self._decider.decide(job, attempt)

        def decide_again() -> Decided:
            parsed, serving = job.parsed, self._selector.serving(job.parsed.model)
            headers = job.web_request.headers
            job.views = self._selector.present(job.views, serving, parsed, headers)
            return decide()

        if failure is not None:
            return decide_again()
        return await self._admission.in_turn(
            job.parsed.model or "",
            job.priority,
            decide,
            again=decide_again,
            queued=job.watch.queued,
        )

    async def _dispatch(self, job: Job, decided: Decided, view: EngineView) -> web.StreamResponse:
        leg = self._opener.begin(job, decided, view)
        self._metrics.routing_seconds.observe(time.perf_counter() - job.arrived_at)
        try:
            leg, opened, serving = await self._opener.open(job, leg)
            info = serving.view.info
            self._know.suspects.succeeded(info.id, info.incarnation, self._now())
            self._learner.served(job, info, reused_tokens=serving.reused)
            self._selector.answered(job.parsed, job.path, serving.view, opened)
            return await self._relay(job, serving, opened)
        except EngineTimeoutError:
            self._retrying.blame(job, view, FailureKind.SILENT)
            raise
        finally:
            leg.close()
            self._admission.wake()

    async def _relay(self, job: Job, serving: Serving, opened: Opened) -> web.StreamResponse:
        headers = {
            ENGINE_HEADER: serving.view.info.id,
            REASON_HEADER: serving.reason,
            REQUEST_ID_HEADER: job.request_id,
        }
        if job.prompt is not None:
            headers[PREDICTED_HEADER] = str(serving.predicted)
        if serving.prefill_engine:
            headers[PREFILL_ENGINE_HEADER] = serving.prefill_engine
        outcome = Outcome()
        first_byte = self._metrics.first_byte(serving.reason)
        job.watch.served(
            serving.view.info.id,
            serving.reason,
            predicted=None if job.prompt is None else serving.predicted,
            prefill_engine=serving.prefill_engine,
        )

        def note_first_byte() -> None:
            first_byte.observe(time.perf_counter() - job.arrived_at)
            job.watch.began()

        try:
            answer = await self._forwarder.relay(
                job.web_request,
                opened,
                headers,
                outcome,
                first_byte=note_first_byte,
            )
        except asyncio.CancelledError:
            outcome.error = "client_gone"
            raise
        finally:
            self._metrics.requests.add(serving.reason, str(opened.response.status))
            job.watch.ended(opened.response.status, outcome)
            if outcome.error is not None:
                self._note_broken(job, serving.view, outcome.error)
        if job.prompt is not None and not serving.prefill_engine:
            self._learner.cached(
                serving.view.info,
                predicted=serving.predicted,
                reported=outcome.reported_cached_tokens,
                guessed_as=job.guessed_as,
            )
        return answer

    def _note_broken(self, job: Job, view: EngineView, cause: str) -> None:
        self._metrics.broken_streams.add(cause)
        if cause in _ENGINES_FAULTS:
            info = view.info
            self._know.suspects.failed(info.id, info.incarnation, self._now(), reached=True)
        log.warning("stream_broken", request_id=job.request_id, engine=view.info.id, cause=cause)

    async def _give_up(self, job: Job, failure: RetryableFailureError | None) -> web.StreamResponse:
        """Pass on the last engine's own error where it gave one, else say what happened."""
        if failure is None:
            raise NoEngineError("no engine is known that could serve this request")
        if failure.opened is None:
            raise EngineFailedError(f"the engines tried failed before the first byte: {failure}")
        headers = {
            ENGINE_HEADER: ",".join(sorted(job.tried)),
            REASON_HEADER: EngineFailedError.reason,
            REQUEST_ID_HEADER: job.request_id,
        }
        status = failure.opened.response.status
        self._metrics.requests.add(EngineFailedError.reason, str(status))
        job.watch.refused(EngineFailedError.reason, status, f"the engine's own error: {failure}")
        return await self._forwarder.relay(
            job.web_request, failure.opened, headers, Outcome(), first_byte=job.watch.began
        )
