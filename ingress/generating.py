"""Serving ``/v1/*``: read, tokenize, decide, forward, learn.

One request, in order: the body is read and checked, its block keys are found (at most one
tokenization), the policy decides, the ledger counts, the request is forwarded. A failure
before the first byte gets one more decision without the engine that failed.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

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
from nearkv.ingress.cost_planning import Expected
from nearkv.ingress.deciding import Decided, Decider
from nearkv.ingress.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    EngineFailedError,
    IngressError,
    NoEngineError,
    NoRoomError,
    RequestError,
    UnknownModelError,
)
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.forwarding import Forwarder, Opened, Outcome, RetryableFailureError, Target
from nearkv.ingress.hints import PrefixHint, prefix_ids_of
from nearkv.ingress.keying import Job, KeyFinder
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.parity_watch import ParityWatch
from nearkv.ingress.planning import Plan
from nearkv.ingress.requests import parse_request
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.two_legs import PrefillFailedError, TwoLegs

_NO_KV = "no_kv"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Serving:
    """Who answers a request, and why.

    ``predicted`` are the tokens that the engine has cached when it begins, ``reused`` those
    that nobody computes for this request; they differ where KV was pulled.
    """

    view: EngineView
    reason: str
    predicted: int
    reused: int
    prefill_engine: str = ""


class GenerateHandler:
    """Handles every ``/v1/*`` request that an engine has to answer."""

    def __init__(  # noqa: PLR0913 - its collaborators
        self,
        settings: IngressSettings,
        knowledge: Knowledge,
        forwarder: Forwarder,
        metrics: IngressMetrics,
        *,
        two_legs: TwoLegs,
        admission: Admission,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._know = knowledge
        self._forwarder = forwarder
        self._metrics = metrics
        self._admission = admission
        self._decider = Decider(settings, knowledge, metrics, now)
        self._keys = KeyFinder(knowledge, metrics, settings.policy, now)
        self._in_flight = knowledge.in_flight
        self._now = now
        self._two_legs = two_legs
        self._parity = ParityWatch(knowledge.parity, metrics)
        self._request_ids = RequestIds()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; errors become OpenAI's envelope, with a reason header."""
        arrived_at = time.perf_counter()
        self._know.totals.requests += 1
        request_id = self._request_ids.of(request.headers.get("X-Request-Id", ""))
        self._in_flight.enter(request)
        try:
            job = await self._accept(request, request_id, arrived_at)
            await self._keys.find(job)
            if job.tenant is not None and job.prompt is not None:
                self._admission.charge(job.tenant, job.prompt.token_count)
            return await self._serve(job)
        except IngressError as error:
            log.info(
                "refused",
                path=request.path,
                request_id=request_id,
                reason=error.reason,
                error=str(error),
            )
            return self._refuse(error, request_id)
        except Exception:
            # The last line of defence: a defect must not look like a broken connection.
            log.exception("request_failed", path=request.path, request_id=request_id)
            return self._refuse(IngressError("an error inside the ingress"), request_id)
        finally:
            self._in_flight.leave(request)

    def _refuse(self, error: IngressError, request_id: str) -> web.Response:
        self._metrics.requests.add(error.reason, str(error.status))
        return error_response(error, request_id=request_id)

    # -- Accepting ---------------------------------------------------------------------

    async def _accept(self, request: web.Request, request_id: str, arrived_at: float) -> Job:
        check_room(self._in_flight.count, self._settings)
        check_path(request.path)
        tenant, priority = self._admission.admit(request.headers)
        body = await self._read_body(request)
        parsed = parse_request(request.method, request.path, body, lambda: request.content_type)
        prefix_ids = prefix_ids_of(request.headers)
        return Job(
            web_request=request,
            path=request.path,
            body=body,
            parsed=parsed,
            request_id=request_id,
            arrived_at=arrived_at,
            views=self._views_for(parsed.model),
            prefix_ids=prefix_ids,
            hint=self._know.hints.first_of(prefix_ids) if prefix_ids else None,
            priority=priority,
            tenant=tenant,
        )

    async def _read_body(self, request: web.Request) -> bytes:
        limit = self._settings.limits.max_body_bytes
        declared = request.content_length
        if declared is not None and declared > limit:
            raise BodyTooLargeError(f"the body has {declared} bytes, the limit is {limit}")
        if request.content.is_eof():  # all of it is here, as nearly always
            return await self._read_whole(request)
        seconds = self._settings.deadlines.first_byte_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._read_whole(request)
        except TimeoutError as error:
            raise BodyTimeoutError(f"the body did not arrive within {seconds:g} s") from error

    async def _read_whole(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            limit = self._settings.limits.max_body_bytes
            raise BodyTooLargeError(f"the body is over the limit of {limit} bytes") from error
        except (web.RequestPayloadError, ConnectionError) as error:
            raise RequestError(f"the body did not arrive whole: {error}") from error

    def _views_for(self, model: str | None) -> Sequence[EngineView]:
        """Return the engines that answer to a model name; raises for a name nobody knows."""
        fleet = self._know.fleet
        views = list(fleet.engines.values()) if model is None else fleet.serving(model)
        if views or not fleet.engines or model is None:
            return views
        engines = fleet.engines.values()
        known = sorted({name for v in engines for name in (*v.info.models, *v.info.adapters)})
        raise UnknownModelError(
            f"The model `{model[:200]}` does not exist. Known: {', '.join(known)}.", param="model"
        )

    # -- Deciding and forwarding -------------------------------------------------------

    async def _serve(self, job: Job) -> web.StreamResponse:
        """Decide and forward, once more on another engine after a failure.

        Prefill legs that fail are no attempts of this kind: nothing went to the engine that
        answers. They are bounded by ``job.pairs_left``.
        """
        failure: RetryableFailureError | None = None
        attempt = 0
        while attempt <= self._settings.retries:
            try:
                decided = await self._decide(job, attempt, failure)
            except NoRoomError:
                if failure is None:
                    raise
                break  # an engine's own error says more than the others' lack of room
            view = decided.view
            if view is None:
                break
            if attempt:
                self._metrics.retries.add()
                _discard(failure)
            try:
                return await self._dispatch(job, decided.plan, view, decided.predicted)
            except PrefillFailedError as error:
                self._note_failed_prefill(job, error)
            except RetryableFailureError as error:
                failure = error
                attempt += 1
                self._note_failed(job, view, error)
        return await self._give_up(job, failure)

    def _note_failed(self, job: Job, view: EngineView, error: RetryableFailureError) -> None:
        info = view.info
        job.tried.add(info.id)
        self._know.suspects.failed(info.id, info.incarnation, self._now())
        log.warning("engine_failed", request_id=job.request_id, engine=info.id, error=str(error))

    def _note_failed_prefill(self, job: Job, error: PrefillFailedError) -> None:
        job.failed_sources.add(error.source)
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

        if failure is not None:
            return decide()
        return await self._admission.in_turn(job.parsed.model or "", job.priority, decide)

    async def _dispatch(
        self, job: Job, plan: Plan, view: EngineView, predicted: int
    ) -> web.StreamResponse:
        info = view.info
        tokens = job.prompt.token_count if job.prompt is not None else 0
        entry = self._know.ledger.open(info.id, info.incarnation, tokens)
        self._metrics.routing_seconds.observe(time.perf_counter() - job.arrived_at)
        try:
            opened, serving = await self._open(job, plan, view, predicted)
            self._know.suspects.succeeded(info.id, info.incarnation)
            self._learn(job, serving)
            return await self._relay(job, serving, opened)
        finally:
            self._know.ledger.close(entry)
            self._admission.wake()

    async def _open(
        self, job: Job, plan: Plan, view: EngineView, predicted: int
    ) -> tuple[Opened, _Serving]:
        """Open an engine's answer, by way of a prefill engine where the plan says so."""
        split = plan.split
        if split is not None:
            legs = await self._two_legs.open(job, split)
            if not legs.has_kv:
                return legs.opened, _Serving(view, _NO_KV, predicted, predicted)
            return legs.opened, _Serving(
                view,
                plan.decision.reason,
                split.target_tokens,
                split.reused_tokens,
                prefill_engine=split.source.info.id,
            )
        info = view.info
        serving = _Serving(view, plan.decision.reason, predicted, predicted)
        target = Target(info.id, info.url, info.dp_rank)
        missing = plan.computing_tokens
        if not missing:
            opened = await self._forwarder.open(job.web_request, job.body, target, job.request_id)
            return opened, serving
        know, engine, incarnation = self._know, info.id, info.incarnation
        know.placements.note(engine, incarnation, missing)
        streams = job.parsed.stream
        sent_at = time.perf_counter()
        with know.computing.counting(engine, incarnation, missing, tells=streams):
            opened = await self._forwarder.open(job.web_request, job.body, target, job.request_id)
        expected = plan.expected if streams and job.prompt is not None else None
        if expected is not None and opened.response.status == HTTPStatus.OK:
            self._compare_times(engine, expected, time.perf_counter() - sent_at)
        return opened, serving

    def _compare_times(self, engine: str, expected: Expected, seconds: float) -> None:
        """Learn from the time to the first token, and tell how well it was predicted."""
        self._metrics.first_token_ratio.observe(expected.first_token_ms / 1000 / seconds)
        if expected.undisturbed:
            self._know.fits.observe(engine, expected.missing_tokens, seconds)

    async def _relay(self, job: Job, serving: _Serving, opened: Opened) -> web.StreamResponse:
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
        try:
            answer = await self._forwarder.relay(
                job.web_request,
                opened,
                headers,
                outcome,
                first_byte=lambda: first_byte.observe(time.perf_counter() - job.arrived_at),
            )
        except asyncio.CancelledError:
            outcome.error = "client_gone"
            raise
        finally:
            self._metrics.requests.add(serving.reason, str(opened.response.status))
            if outcome.error is not None:
                self._note_broken(job, serving.view, outcome.error)
        if job.prompt is not None and not serving.prefill_engine:
            # KV that was pulled counts as cached too, which says nothing about our view.
            self._parity.compare(
                serving.view.info,
                predicted=serving.predicted,
                reported=outcome.reported_cached_tokens,
            )
        return answer

    def _note_broken(self, job: Job, view: EngineView, cause: str) -> None:
        self._metrics.broken_streams.add(cause)
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
        self._metrics.requests.add(EngineFailedError.reason, str(failure.opened.response.status))
        return await self._forwarder.relay(
            job.web_request, failure.opened, headers, Outcome(), first_byte=lambda: None
        )

    # -- Learning ----------------------------------------------------------------------

    def _learn(self, job: Job, serving: _Serving) -> None:
        if job.prompt is not None:
            self._metrics.prompt_tokens.add(by=job.prompt.token_count)
            self._metrics.predicted_tokens.add(by=serving.reused)
            self._know.totals.prompt_tokens += job.prompt.token_count
            self._know.totals.predicted_tokens += serving.reused
        keys = job.prompt.keys if job.prompt is not None else ()
        if not keys and job.hint is not None:
            keys = job.hint.keys  # what was learnt before is better than nothing
        info = serving.view.info
        for prefix_id in job.prefix_ids:
            self._know.hints.learn(prefix_id, PrefixHint(keys, info.id, info.incarnation))


def _discard(failure: RetryableFailureError | None) -> None:
    if failure is not None and failure.opened is not None:
        failure.opened.response.close()
