"""Opening an engine's answer: by one engine, by two for one request, or by whoever is first."""

import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from nearkv.ingress.deciding import Decided, Decider
from nearkv.ingress.errors import NoRoomError
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.forwarding import Forwarder, Opened, Target
from nearkv.ingress.hedging import Hedger, Spare
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.learning import Learner
from nearkv.ingress.legs import Leg, begin_leg
from nearkv.ingress.patience import Patience
from nearkv.ingress.retrying import Retrying
from nearkv.ingress.two_legs import Split, TwoLegs

_NO_KV = "no_kv"


class Serving(msgspec.Struct, frozen=True):
    """Who answers a request, and why.

    ``predicted`` are the tokens that the engine has cached when it begins, ``reused`` those
    that nobody computes for this request; they differ where KV was pulled.
    """

    view: EngineView
    reason: str
    predicted: int
    reused: int
    prefill_engine: str = ""


class Opener:
    """Sends requests where they were decided to go."""

    def __init__(  # noqa: PLR0913 - keyword-only collaborators
        self,
        *,
        knowledge: Knowledge,
        forwarder: Forwarder,
        two_legs: TwoLegs,
        decider: Decider,
        learner: Learner,
        retrying: Retrying,
        patience: Patience,
        hedger: Hedger,
        now: Callable[[], float],
    ) -> None:
        self._know = knowledge
        self._forwarder = forwarder
        self._two_legs = two_legs
        self._decider = decider
        self._learner = learner
        self._retrying = retrying
        self._patience = patience
        self._hedger = hedger
        self._now = now

    def begin(self, job: Job, decided: Decided, view: EngineView) -> Leg:
        """Count a request at the engine that it is about to be sent to."""
        tokens = job.prompt.token_count if job.prompt is not None else 0
        return begin_leg(self._know, decided, view, tokens=tokens, now=self._now())

    async def open(self, job: Job, leg: Leg) -> tuple[Leg, Opened, Serving]:
        """Return the answer, begun, and the leg that it came by.

        Where that is another leg, the given one is closed. Raises what
        :meth:`Forwarder.open` and :meth:`TwoLegs.open` raise.
        """
        split = leg.plan.split
        if split is not None:
            return await self._open_pair(job, leg, split)
        after_seconds = self._hedger.after_seconds(job, leg.plan)
        if after_seconds is None:
            opened = await self._ask(job, leg)
        else:
            leg, opened = await self._hedger.open(
                job,
                leg,
                after_seconds,
                ask=lambda one: self._ask(job, one),
                spare=Spare(
                    begin=lambda: self._begin_spare(job, leg),
                    failed=lambda one, error: self._retrying.blame(job, one.view, error.kind),
                ),
            )
        return leg, opened, Serving(leg.view, leg.reason, leg.predicted, leg.predicted)

    async def _open_pair(self, job: Job, leg: Leg, split: Split) -> tuple[Leg, Opened, Serving]:
        legs = await self._two_legs.open(job, split)
        if not legs.has_kv:
            return leg, legs.opened, Serving(leg.view, _NO_KV, leg.predicted, leg.predicted)
        serving = Serving(
            leg.view,
            leg.reason,
            split.target_tokens,
            split.reused_tokens,
            prefill_engine=split.source.info.id,
        )
        return leg, legs.opened, serving

    async def _ask(self, job: Job, leg: Leg) -> Opened:
        """Send a request to one engine and wait for its first bytes."""
        missing = leg.plan.computing_tokens
        if not missing:
            return await self._wait_for(job, leg)
        know, info, streams = self._know, leg.view.info, job.parsed.stream
        know.placements.note(info.id, info.incarnation, missing)
        sent_at = time.perf_counter()
        with know.computing.counting(info.id, info.incarnation, missing, tells=streams):
            opened = await self._wait_for(job, leg)
        expected = leg.plan.expected if streams and job.prompt is not None else None
        if expected is not None and opened.response.status == HTTPStatus.OK:
            self._learner.first_token(info.id, expected, time.perf_counter() - sent_at)
        return opened

    async def _wait_for(self, job: Job, leg: Leg) -> Opened:
        info, expected = leg.view.info, leg.plan.expected
        late = expected.first_token_ms if expected is not None and job.parsed.stream else None
        target = Target(info.id, info.url, info.dp_rank, job.watch.traceparent)
        wait = self._patience.begin(info.id, job.views, job.tried, predicted_ms=late)
        try:
            return await self._forwarder.open(
                job.web_request, job.body, target, job.request_id, wait
            )
        finally:
            self._patience.end(wait)

    def _begin_spare(self, job: Job, leg: Leg) -> Leg | None:
        """Begin a leg at another engine, where one has room."""
        first = leg.view.info.id
        job.tried.add(first)
        try:
            decided = self._decider.decide(job, attempt=1)
        except NoRoomError:
            return None
        finally:
            job.tried.discard(first)
        view = decided.view
        if view is None or self._know.suspects.is_suspect(
            view.info.id, view.info.incarnation, self._now()
        ):
            return None
        return self.begin(job, decided, view)
