"""Serving one request by two engines: prefill on P, then the rest on D.

P is asked for one token and answers with parameters that say where its KV is; D gets the
client's request with these parameters, pulls what it lacks and answers. No failure on the
way is an error to the client: without KV, D computes by itself; without P, another engine is
found; what P holds is given back as soon as nobody will fetch it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import msgspec
import structlog

from nearkv.bounded_reading import AnswerTooLargeError
from nearkv.http_failures import explain_failure
from nearkv.ingress.engine_failures import FailureKind
from nearkv.ingress.errors import EngineTimeoutError
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.forwarding import (
    Asked,
    Forwarder,
    Opened,
    RetryableFailureError,
    Target,
    failure_kind,
    reported_tokens,
)
from nearkv.ingress.keying import Job
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.lease_releasing import LeaseReleaser
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.parity_watch import ParityWatch
from nearkv.ingress.patience import Patience
from nearkv.ingress.prefill_leg import (
    UnreadableAnswerError,
    decode_body,
    prefill_body,
    read_params,
)
from nearkv.ingress.requests import PromptKind
from nearkv.ingress.retrying import Retrying

_MOST_ANSWER_BYTES = 1 << 20
"""A prefill answer is a token and block numbers: 100 kB for the longest of prompts."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Split:
    """Two engines for one request; ``fields`` are those of its body.

    ``source_missing_tokens`` is what P has to compute, ``reused_tokens`` what either engine
    held before, ``target_tokens`` what D will have cached once it has pulled.
    """

    source: EngineView
    target: EngineView
    fields: dict[str, msgspec.Raw]
    source_cached_tokens: int
    source_missing_tokens: int
    reused_tokens: int
    target_tokens: int


@dataclass(frozen=True, slots=True)
class LegsOpened:
    """D's answer, begun. ``has_kv`` tells whether D was given P's KV to pull."""

    opened: Opened
    has_kv: bool


class PrefillFailedError(Exception):
    """P failed; nothing was sent to D.

    ``may_pair_again`` is false where another P would refuse as well.
    """

    def __init__(self, source: str, message: str, *, may_pair_again: bool) -> None:
        super().__init__(message)
        self.source = source
        self.may_pair_again = may_pair_again


class TwoLegs:
    """Runs the two requests of a split one."""

    def __init__(  # noqa: PLR0913 - its collaborators, by keyword
        self,
        *,
        forwarder: Forwarder,
        knowledge: Knowledge,
        metrics: IngressMetrics,
        parity: ParityWatch,
        releaser: LeaseReleaser,
        retrying: Retrying,
        patience: Patience,
        prefill_seconds: float,
        now: Callable[[], float],
    ) -> None:
        self._forwarder = forwarder
        self._know = knowledge
        self._metrics = metrics
        self._parity = parity
        self._releaser = releaser
        self._retrying = retrying
        self._patience = patience
        self._prefill_seconds = prefill_seconds
        self._now = now

    async def open(self, job: Job, split: Split) -> LegsOpened:
        """Have P prefill, then open D's answer.

        Raises :class:`PrefillFailedError` before anything went to D, and what
        :meth:`Forwarder.open` raises after that.
        """
        tokens = job.prompt.token_count if job.prompt is not None else 0
        info = split.target.info
        with self._know.staged.counting(info.id, info.incarnation, tokens):
            params = await self._prefill(job, split)
            if params is None:
                return LegsOpened(await self._open(job, split.target, job.body), has_kv=False)
            try:
                opened = await self._open(
                    job, split.target, decode_body(job.body, split.fields, params)
                )
            except BaseException:
                self._releaser.release(split.source.agent, params)
                raise
            if opened.response.status < HTTPStatus.BAD_REQUEST:
                return LegsOpened(opened, has_kv=True)
            # Perhaps it is the parameters that D does not like; as it is, the request is the
            # client's own, and so will be the error.
            self._releaser.release(split.source.agent, params)
            opened.response.close()
            return LegsOpened(await self._open(job, split.target, job.body), has_kv=False)

    # -- P -----------------------------------------------------------------------------

    async def _prefill(self, job: Job, split: Split) -> msgspec.Raw | None:
        info = split.source.info
        started_at = time.perf_counter()
        missing = split.source_missing_tokens
        entry = self._know.ledger.open(info.id, info.incarnation, missing)
        is_trial = self._know.suspects.begin(info.id, info.incarnation, self._now())
        alone = not self._know.computing.requests_at(info.id, info.incarnation)
        self._know.placements.note(info.id, info.incarnation, missing)
        try:
            with self._know.computing.counting(info.id, info.incarnation, missing):
                asked = await self._ask(job, split)
        finally:
            self._know.ledger.close(entry)
            if is_trial:
                self._know.suspects.end_trial(info.id, info.incarnation)
        seconds = time.perf_counter() - started_at
        self._metrics.pd.prefill_seconds.observe(seconds)
        if alone and asked.status == HTTPStatus.OK:
            self._know.fits.observe(info.id, missing, seconds)
        return self._read(job, split, asked)

    async def _ask(self, job: Job, split: Split) -> Asked:
        info = split.source.info
        body = prefill_body(split.fields, is_chat=job.parsed.kind is PromptKind.CHAT)
        wait = self._patience.begin(info.id, job.views, job.failed_sources)
        try:
            return await self._forwarder.ask(
                job.web_request,
                body,
                target=Target(info.id, info.url, info.dp_rank, job.watch.prefill_traceparent),
                request_id=job.request_id,
                deadline_seconds=self._prefill_seconds,
                limit_bytes=_MOST_ANSWER_BYTES,
                wait=wait,
            )
        except AnswerTooLargeError:
            return Asked(HTTPStatus.OK, b"")  # nothing that could be read
        except asyncio.CancelledError:
            self._metrics.pd.legs.add("prefill", "client_gone")
            raise
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                kind, why = wait.why or FailureKind.SILENT, "no answer in time"
            else:
                kind, why = failure_kind(error), explain_failure(error)
            raise self._failed(job, split, kind, why) from error
        finally:
            self._patience.end(wait)

    def _read(self, job: Job, split: Split, asked: Asked) -> msgspec.Raw | None:
        """Return P's parameters; ``None`` where its KV cannot be had."""
        info = split.source.info
        if asked.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise self._failed(job, split, FailureKind.STATUS, f"status {asked.status}")
        self._know.suspects.succeeded(info.id, info.incarnation, self._now())
        if asked.status != HTTPStatus.OK:
            # The request's own fault, most likely: the one engine that serves it will say.
            self._metrics.pd.legs.add("prefill", "refused")
            raise PrefillFailedError(info.id, f"status {asked.status}", may_pair_again=False)
        try:
            params = read_params(asked.body)
        except UnreadableAnswerError as error:
            log.warning(
                "prefill_answer_unreadable",
                request_id=job.request_id,
                engine=info.id,
                error=str(error),
            )
            self._metrics.pd.legs.add("prefill", "unreadable")
            return None
        outcome = "no_kv" if params is None else "ok"
        self._metrics.pd.legs.add("prefill", outcome)
        job.watch.prefilled(outcome)
        # No other answer would ever check P's predictions.
        reported, _ = reported_tokens(asked.body)
        self._parity.compare(
            info,
            predicted=split.source_cached_tokens,
            reported=reported,
            guessed_as=job.guessed_as,
        )
        return params

    def _failed(self, job: Job, split: Split, kind: FailureKind, why: str) -> PrefillFailedError:
        is_late = kind in (FailureKind.SILENT, FailureKind.LOST)
        self._metrics.pd.legs.add("prefill", "timeout" if is_late else "failed")
        self._retrying.blame(job, split.source, kind)
        return PrefillFailedError(split.source.info.id, why, may_pair_again=True)

    # -- D -----------------------------------------------------------------------------

    async def _open(self, job: Job, target: EngineView, body: bytes) -> Opened:
        info = target.info
        wait = self._patience.begin(info.id, job.views, job.tried)
        try:
            opened = await self._forwarder.open(
                job.web_request,
                body,
                Target(info.id, info.url, info.dp_rank, job.watch.traceparent),
                job.request_id,
                wait,
            )
        except asyncio.CancelledError:
            self._metrics.pd.legs.add("decode", "client_gone")
            raise
        except EngineTimeoutError:
            self._metrics.pd.legs.add("decode", "timeout")
            raise
        except RetryableFailureError:
            self._metrics.pd.legs.add("decode", "failed")
            raise
        finally:
            self._patience.end(wait)
        refused = opened.response.status >= HTTPStatus.BAD_REQUEST
        self._metrics.pd.legs.add("decode", "refused" if refused else "ok")
        return opened
