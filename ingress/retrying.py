"""What follows from a failure before the first byte: blame, and whether to try again.

Blame: an engine that could not be reached is to blame. One that had the request may be; but a
request that fails on a second engine is at fault itself, and neither engine is blamed, or one
such request would close the whole fleet.

Another try: always where nothing was reached, since nobody did any work; else ``retries`` times
and within the model's budget.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from nearkv.ingress.attempts import Attempts
from nearkv.ingress.engine_failures import FailureKind
from nearkv.ingress.fleet import EngineView
from nearkv.ingress.forwarding import RetryableFailureError
from nearkv.ingress.keying import Job
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.retry_budget import RetryBudget
from nearkv.ingress.suspects import Suspects

_MOST_UNREACHED = 8
"""Engines found unreachable by one request; its agents should know of so many."""


class Retrying:
    """Decides for all requests; ``draw`` gives numbers from 0 to 1 for jitter."""

    def __init__(  # noqa: PLR0913 - keyword-only collaborators
        self,
        *,
        suspects: Suspects,
        budget: RetryBudget,
        metrics: IngressMetrics,
        retries: int,
        pause_seconds: float,
        now: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self._suspects = suspects
        self._budget = budget
        self._metrics = metrics
        self._retries = retries
        self._pause_seconds = pause_seconds
        self._now = now
        self._draw = draw

    def count(self, job: Job) -> None:
        """Count a request that came in."""
        self._budget.count(job.parsed.model or "", self._now())

    def blame(self, job: Job, view: EngineView, kind: FailureKind) -> None:
        """Note that an engine failed a request; at the second one, blame the request instead."""
        info = view.info
        attempts = job.attempts
        if attempts is None:
            attempts = job.attempts = Attempts()
        if kind.reached and info.id in attempts.blamed:
            return  # the same request says nothing new
        strike = self._suspects.failed(info.id, info.incarnation, self._now(), reached=kind.reached)
        if not kind.reached:
            attempts.unreached += 1
            return
        attempts.blamed.add(info.id)
        attempts.strikes.append(strike)
        if len(attempts.blamed) > 1:
            for strike in attempts.strikes:
                self._suspects.retract(strike)
            attempts.strikes.clear()

    def may_retry(self, job: Job, failure: RetryableFailureError) -> bool:
        """Tell whether a request may be sent once more; a retry allowed is a retry taken."""
        attempts = job.attempts
        if attempts is None:
            return False
        if not failure.kind.reached:
            return attempts.unreached <= _MOST_UNREACHED
        attempts.taken += 1
        if attempts.taken > self._retries:
            self._metrics.retries_refused.add("limit")
            return False
        if not self._budget.take(job.parsed.model or "", self._now()):
            self._metrics.retries_refused.add("budget")
            return False
        return True

    async def same_again(self, job: Job, engine: str, failure: RetryableFailureError) -> bool:
        """Wait a little and let the same engine be asked again, where there is no other.

        Only where it had not begun with the request: it was not reached, or answered 503.
        """
        attempts = job.attempts
        opened = failure.opened
        busy = opened is not None and opened.response.status == HTTPStatus.SERVICE_UNAVAILABLE
        if attempts is None or attempts.again >= self._retries:
            return False
        if failure.kind.reached and not busy:
            return False
        attempts.again += 1
        try:
            await asyncio.sleep(self._pause_seconds * (0.5 + self._draw()))
        except asyncio.CancelledError:  # nobody gets the engine's own error any more
            failure.discard()
            raise
        job.tried.discard(engine)
        return True
