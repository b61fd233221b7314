"""The ingress's own router in a replay: its decider, index, ledger, backlog and fits.

What the HTTP side does around a decision (counting before dispatch, learning from first bytes)
is done here in the same order, by the simulation's clock.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web
from prometheus_client import CollectorRegistry

from nearkv.ingress.backlog import Backlog
from nearkv.ingress.deciding import Decided, Decider
from nearkv.ingress.errors import NoRoomError
from nearkv.ingress.fleet import EngineView, Fleet
from nearkv.ingress.hints import PrefixHints
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.learning import Learner
from nearkv.ingress.ledger import Ledger
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.ingress.requests import GenerateRequest, PromptKind
from nearkv.ingress.routing import Policy
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.suspects import Suspects
from nearkv.ingress.tokens.memo import PromptKeys
from nearkv.ingress.tokens.service import TokenService
from nearkv.ingress.two_legs import Split
from nearkv.replay.fleet_feed import AGENT_URL, MODEL, LinkProfile
from nearkv.replay.routing import Clock, Route
from nearkv.replay.traces import Arrival
from nearkv.serving import InFlight
from nearkv.state.model import Frame

_BLIND = (Policy.LEAST_LOADED, Policy.ROUND_ROBIN)


@dataclass(slots=True)
class _Sent:
    """One request on its way, and what is counted for it."""

    job: Job
    decided: Decided
    view: EngineView
    sent_at: float
    counted: ExitStack
    prefill: ExitStack = field(default_factory=ExitStack)
    computing: ExitStack = field(default_factory=ExitStack)
    was_alone: bool = False


class NearkvRouter:
    """Routes as the ingress with these settings would."""

    def __init__(self, settings: IngressSettings, clock: Clock, link: LinkProfile | None) -> None:
        fleet = Fleet(PrefixIndex(limit_bytes=settings.limits.index_bytes))
        fleet.add_agent(AGENT_URL)
        self.max_waiting = settings.admission.max_waiting
        self.wait_seconds = settings.admission.wait_seconds
        self._clock = clock
        self._link = link
        self._looks_at_prefixes = settings.policy not in _BLIND
        self._know = Knowledge(
            fleet=fleet,
            tokens=cast("TokenService", None),  # a trace has tokens already
            hints=PrefixHints(limit_bytes=settings.limits.hint_bytes),
            ledger=Ledger(),
            parity=ParityCheck(),
            suspects=Suspects(),
            in_flight=InFlight(),
            computing=Backlog(clock.now),
        )
        metrics = IngressMetrics(CollectorRegistry())
        self._decider = Decider(settings, self._know, metrics, clock.now)
        self._learner = Learner(self._know, metrics)
        self._sent: dict[int, _Sent] = {}

    def hear(self, frame: Frame) -> None:
        """Take one frame of the agents' state; closed slots are swept as the ingress does."""
        self._know.fleet.apply(AGENT_URL, frame, self._clock.now())

    def route(self, number: int, arrival: Arrival) -> Route | None:
        """Decide, and count the request as sent."""
        job = self._job(number, arrival)
        try:
            decided = self._decider.decide(job, 0)
        except NoRoomError:
            return None
        view = decided.view
        if view is None:
            return None
        self._sent[number] = self._count(job, decided, view)
        split = decided.plan.split
        if split is None:
            return Route(view.info.id)
        return Route(
            view.info.id, split.source.info.id, self._transfer_seconds(split, arrival.prompt_tokens)
        )

    def prefilled(self, number: int) -> None:
        """Note that the source of a split request is done."""
        sent = self._sent[number]
        sent.prefill.close()
        split = sent.decided.plan.split
        if split is not None and sent.was_alone:
            seconds = self._seconds_since(sent)
            self._know.fits.observe(split.source.info.id, split.source_missing_tokens, seconds)

    def first_token(self, number: int) -> None:
        """Learn from the first byte, as the ingress does."""
        sent = self._sent[number]
        sent.computing.close()
        sent.prefill.close()
        plan, info = sent.decided.plan, sent.view.info
        reused = sent.decided.predicted if plan.split is None else plan.split.reused_tokens
        self._learner.served(sent.job, info, reused_tokens=reused)
        if plan.split is None and plan.expected is not None:
            self._learner.first_token(info.id, plan.expected, self._seconds_since(sent))

    def ended(self, number: int, cached_tokens: int) -> None:
        """Close the books of a request."""
        sent = self._sent.pop(number)
        for stack in (sent.computing, sent.prefill, sent.counted):
            stack.close()
        if sent.decided.plan.split is None and self._looks_at_prefixes:
            self._learner.cached(
                sent.view.info, predicted=sent.decided.predicted, reported=cached_tokens
            )

    def _job(self, number: int, arrival: Arrival) -> Job:
        prompt = None
        if self._looks_at_prefixes:
            prompt = PromptKeys(arrival.prompt_tokens, arrival.keys, "ids")
        prefix_ids = (f"X-Session-ID:{arrival.session}",) if arrival.session else ()
        return Job(
            web_request=cast("web.Request", None),  # only forwarding looks at it
            path="/v1/completions",
            body=b"{}",
            parsed=GenerateRequest(model=MODEL, kind=PromptKind.TOKENS, stream=True),
            request_id=f"replayed-{number}",
            arrived_at=self._clock.now(),
            views=self._know.fleet.serving(MODEL),
            prompt=prompt,
            prefix_ids=prefix_ids,
            hint=self._know.hints.first_of(prefix_ids),
            priority=arrival.priority,
        )

    def _count(self, job: Job, decided: Decided, view: EngineView) -> _Sent:
        know, info, plan = self._know, view.info, decided.plan
        tokens = 0 if job.prompt is None else job.prompt.token_count
        sent = _Sent(job, decided, view, self._clock.now(), ExitStack())
        new_tokens = max(0, tokens - decided.predicted)
        entry = know.ledger.open(info.id, info.incarnation, new_tokens)
        sent.counted.callback(know.ledger.close, entry)
        if plan.split is not None:
            self._count_prefill(plan.split, sent, tokens)
        elif plan.computing_tokens:
            know.placements.note(info.id, info.incarnation, plan.computing_tokens)
            counting = know.computing.counting(info.id, info.incarnation, plan.computing_tokens)
            sent.computing.enter_context(counting)
        return sent

    def _count_prefill(self, split: Split, sent: _Sent, tokens: int) -> None:
        know, source, target = self._know, split.source.info, split.target.info
        missing = split.source_missing_tokens
        staged = know.staged.counting(target.id, target.incarnation, tokens)
        sent.computing.enter_context(staged)
        entry = know.ledger.open(source.id, source.incarnation, missing)
        sent.prefill.callback(know.ledger.close, entry)
        sent.was_alone = not know.computing.requests_at(source.id, source.incarnation)
        know.placements.note(source.id, source.incarnation, missing)
        sent.prefill.enter_context(know.computing.counting(source.id, source.incarnation, missing))

    def _seconds_since(self, sent: _Sent) -> float:
        return self._clock.now() - sent.sent_at

    def _transfer_seconds(self, split: Split, prompt_tokens: int) -> float:
        if self._link is None:
            return 0.0
        transfer = split.source.info.transfer
        per_token = 0 if transfer is None else transfer.kv_bytes_per_token or 0
        missing = max(0, prompt_tokens - self._cached_at(split))
        return self._link.setup_seconds + missing * per_token / self._link.bytes_per_second

    @staticmethod
    def _cached_at(split: Split) -> int:
        """Return what D held of the prompt before; P's part is counted only if P holds less."""
        return split.reused_tokens if split.reused_tokens > split.source_cached_tokens else 0
