"""The router's books for one request that was picked for: ledger, suspects, what is learnt."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus

import structlog

from nearkv.ingress.answers import (
    ENGINE_HEADER,
    PREDICTED_HEADER,
    PREFILL_ENGINE_HEADER,
    REASON_HEADER,
)
from nearkv.ingress.extproc.messages import Header
from nearkv.ingress.extproc.picking import Head, Pick
from nearkv.ingress.extproc.reaching import Reach
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.forwarding import Outcome, reported_tokens
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.learning import Learner
from nearkv.ingress.ledger import LedgerEntry
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.planning import Plan

_FAILED_STATUSES = frozenset({500, 502, 503, 504})
_NO_KV = "no_kv"
_PREFILLER_FAILED = frozenset({"failed", "timeout"})
_PREFILL_OUTCOMES = _PREFILLER_FAILED | {"ok", "no_kv", "not_allowed", "refused", "unreadable"}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan, the engine that answers, and what it is predicted to have cached."""

    plan: Plan
    view: EngineView
    predicted: int


@dataclass(frozen=True, slots=True)
class Books:
    """Where a ticket writes."""

    knowledge: Knowledge
    metrics: IngressMetrics
    learner: Learner
    reach: Reach
    wake: Callable[[], None]
    now: Callable[[], float]
    clock: Callable[[], float]


class RoutedTicket:
    """One request on its way; counted from the pick until it is closed.

    ``clock`` of the books is what the job's arrival was taken with.
    """

    def __init__(
        self, books: Books, job: Job, chosen: Chosen, pick: Pick, *, shows_answer: bool
    ) -> None:
        self.pick = pick
        self._books = books
        self._job = job
        self._chosen = chosen
        self._view = chosen.view
        self._split = chosen.plan.split
        self._reason = chosen.plan.decision.reason
        self._tokens = job.prompt.token_count if job.prompt is not None else 0
        self._status = 0
        self._sent_at = books.clock()
        self._until_begun = ExitStack()
        new_tokens = max(0, self._tokens - chosen.predicted)
        self._entry: LedgerEntry | None = self._open(chosen.view, new_tokens)
        info = chosen.view.info
        self._is_trial = books.knowledge.suspects.begin(info.id, info.incarnation, books.now())
        self._count_beginnings(shows_answer=shows_answer)

    def _open(self, view: EngineView, new_tokens: int) -> LedgerEntry:
        return self._books.knowledge.ledger.open(view.info.id, view.info.incarnation, new_tokens)

    def _count_beginnings(self, *, shows_answer: bool) -> None:
        """Count what lasts until the answer begins: tokens to compute, KV to be moved.

        Where nobody shows us when that is, it lasts until the end.
        """
        know, plan, info = self._books.knowledge, self._chosen.plan, self._view.info
        until = self._until_begun
        if plan.split is not None:
            source = plan.split.source
            missing = plan.split.source_missing_tokens
            until.callback(know.ledger.close, self._open(source, missing))
            until.enter_context(
                know.computing.counting(source.info.id, source.info.incarnation, missing)
            )
            until.enter_context(know.staged.counting(info.id, info.incarnation, self._tokens))
        elif plan.computing_tokens:
            know.placements.note(info.id, info.incarnation, plan.computing_tokens)
            tells = shows_answer and self._job.parsed.stream
            until.enter_context(
                know.computing.counting(
                    info.id, info.incarnation, plan.computing_tokens, tells=tells
                )
            )

    def answered(self, head: Head) -> list[Header]:
        """Take the status and who served; return the headers for the client."""
        self._status = head.status
        self._follow(head.served)
        self._take_prefill(head.prefill)
        self._show_serving()
        know, info = self._books.knowledge, self._view.info
        if head.status in _FAILED_STATUSES:
            know.suspects.failed(info.id, info.incarnation, self._books.now(), reached=True)
            log.warning(
                "engine_failed",
                request_id=self._job.request_id,
                engine=info.id,
                status=head.status,
            )
        else:
            know.suspects.succeeded(info.id, info.incarnation, self._books.now())
            self._learn()
        return self._headers()

    def _take_prefill(self, outcome: str) -> None:
        """Take what the sidecar says of the prefill leg; silence counts as success."""
        split = self._split
        if split is None or not outcome:
            return
        self._job.watch.prefilled(outcome if outcome in _PREFILL_OUTCOMES else "other")
        self._books.metrics.pd.legs.add(
            "prefill", outcome if outcome in _PREFILL_OUTCOMES else "other"
        )
        if outcome == "ok":
            return
        self._split = None
        self._reason = _NO_KV
        if outcome in _PREFILLER_FAILED:
            source = split.source.info
            self._books.knowledge.suspects.failed(source.id, source.incarnation, self._books.now())

    def began(self) -> None:
        """Note the first byte of the answer."""
        self._until_begun.close()
        self._job.watch.began()
        now = self._books.clock()
        metrics, expected = self._books.metrics, self._chosen.plan.expected
        metrics.first_byte(self._reason).observe(max(0.0, now - self._job.arrived_at))
        seconds = now - self._sent_at
        is_as_planned = self._view is self._chosen.view and self._chosen.plan.split is None
        if expected is None or self._job.prompt is None or not is_as_planned or seconds <= 0:
            return
        if self._job.parsed.stream and self._status == HTTPStatus.OK:
            self._books.learner.first_token(self._view.info.id, expected, seconds)

    def _follow(self, served: str) -> None:
        """Move the books to the engine that served, where it is not the one picked."""
        if not served or served == self.pick.endpoint or self._entry is None:
            return
        view = self._books.reach.at(served)
        if view is None:
            return
        picked = self._view.info
        know = self._books.knowledge
        know.suspects.failed(picked.id, picked.incarnation, self._books.now())
        know.ledger.close(self._entry)
        self._entry = self._open(view, self._tokens)  # what it has cached nobody looked up
        self._view = view
        self._reason = "served_elsewhere"
        log.info(
            "served_elsewhere",
            request_id=self._job.request_id,
            picked=picked.id,
            engine=view.info.id,
        )

    def _headers(self) -> list[Header]:
        headers = [(ENGINE_HEADER, self._view.info.id), (REASON_HEADER, self._reason)]
        headers.append(("x-request-id", self._job.request_id))
        split = self._split
        if self._view is not self._chosen.view:
            return headers
        if self._job.prompt is not None:
            predicted = self._chosen.predicted if split is None else split.target_tokens
            headers.append((PREDICTED_HEADER, str(predicted)))
        if split is not None:
            headers.append((PREFILL_ENGINE_HEADER, split.source.info.id))
        return headers

    def _learn(self) -> None:
        split = self._split
        reused = self._chosen.predicted if split is None else split.reused_tokens
        reused = reused if self._view is self._chosen.view else 0
        self._books.learner.served(self._job, self._view.info, reused_tokens=reused)

    def _show_serving(self) -> None:
        split, is_as_picked = self._split, self._view is self._chosen.view
        predicted: int | None = None
        if self._job.prompt is not None and is_as_picked:
            predicted = self._chosen.predicted if split is None else split.target_tokens
        self._job.watch.served(
            self._view.info.id,
            self._reason,
            predicted=predicted,
            prefill_engine="" if split is None or not is_as_picked else split.source.info.id,
        )

    def _show_end(self, cached: int | None, output: int | None, *, complete: bool) -> None:
        end = Outcome(
            reported_cached_tokens=cached,
            output_tokens=output,
            error=None if complete else "broken_off",
        )
        self._job.watch.ended(self._status, end)
        self._job.watch.close()

    def close(self, tail: bytes, *, complete: bool) -> None:
        """End it; only the first call counts."""
        entry, self._entry = self._entry, None
        if entry is None:
            return
        self._until_begun.close()
        self._books.knowledge.ledger.close(entry)
        if self._is_trial:
            info = self._chosen.view.info
            self._books.knowledge.suspects.end_trial(info.id, info.incarnation)
        self._books.wake()
        metrics = self._books.metrics
        metrics.requests.add(self._reason, str(self._status or "none"))
        if self._status and not complete:
            metrics.broken_streams.add("broken_off")
        cached, output = reported_tokens(tail)
        self._show_end(cached, output, complete=complete)
        whole = self._job.prompt is not None and self._split is None
        if whole and complete and self._view is self._chosen.view:
            self._books.learner.cached(
                self._view.info,
                predicted=self._chosen.predicted,
                reported=cached,
                guessed_as=self._job.guessed_as,
            )
