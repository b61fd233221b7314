"""A second engine for a first byte that is late; whoever answers first serves.

Off unless ``hedge.after_ms`` says when. It trades some double work for a shorter tail, so it
has a budget of its own. Pairs of engines are never hedged: their KV is promised.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from nearkv.ingress.failure_settings import HedgeSettings
from nearkv.ingress.forwarding import Opened, RetryableFailureError
from nearkv.ingress.keying import Job
from nearkv.ingress.legs import Leg
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.planning import Plan
from nearkv.ingress.retry_budget import RetryBudget

Ask = Callable[[Leg], Coroutine[Any, Any, Opened]]


@dataclass(frozen=True, slots=True)
class Spare:
    """How a second leg begins (``None``: no other engine), and what is done when it fails."""

    begin: Callable[[], Leg | None]
    failed: Callable[[Leg, RetryableFailureError], None]


class Hedger:
    """Races two legs of a request."""

    def __init__(
        self,
        settings: HedgeSettings,
        metrics: IngressMetrics,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._now = now
        self._budget = RetryBudget(settings.budget)

    def after_seconds(self, job: Job, plan: Plan) -> float | None:
        """Return when a request's first byte is late; ``None`` where that means nothing."""
        settings = self._settings
        if settings.after_ms <= 0 or plan.split is not None:
            return None
        if settings.streamed_only and not job.parsed.stream:
            return None
        self._budget.count(job.parsed.model or "", self._now())
        after_ms = settings.after_ms
        if plan.expected is not None:
            after_ms = max(after_ms, settings.predicted_factor * plan.expected.first_token_ms)
        return after_ms / 1000

    async def open(
        self, job: Job, leg: Leg, after_seconds: float, ask: Ask, spare: Spare
    ) -> tuple[Leg, Opened]:
        """Return the answer that began first, and its leg; the other leg is closed.

        Raises what the first leg raises where no other does better; then ``leg`` stays open.
        """
        first = asyncio.create_task(ask(leg))
        legs = {first: leg}
        given: asyncio.Task[Opened] | None = None
        try:
            done, _ = await asyncio.wait(legs, timeout=after_seconds)
            other = None if done else self._begin(job, spare)
            kept = first
            if other is not None:
                legs[asyncio.create_task(ask(other))] = other
                kept = await _first_to_answer(legs) or first
                self._metrics.hedges.add("lost" if kept is first else "won")
            await asyncio.wait((kept,))
            given = kept
            return legs[kept], kept.result()
        finally:
            _let_go(legs, given, spare, left_open=first if given is None else given)

    def _begin(self, job: Job, spare: Spare) -> Leg | None:
        if not self._budget.take(job.parsed.model or "", self._now()):
            self._metrics.hedges.add("no_budget")
            return None
        other = spare.begin()
        if other is None:
            self._metrics.hedges.add("no_engine")
        return other


async def _first_to_answer(legs: Mapping[asyncio.Task[Opened], Leg]) -> asyncio.Task[Opened] | None:
    """Return the first task that ends well; ``None`` where none does."""
    pending = set(legs)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in legs:
            if task in done and task.exception() is None:
                return task
    return None


def _let_go(
    legs: Mapping[asyncio.Task[Opened], Leg],
    given: asyncio.Task[Opened] | None,
    spare: Spare,
    *,
    left_open: asyncio.Task[Opened],
) -> None:
    """End all legs but one: cancel what goes on, close what came, note what failed.

    ``given`` is the task whose answer or failure the caller gets, ``left_open`` that of the leg
    which is the caller's to close. Nothing is waited for: the caller may be cancelled any moment.
    """

    def settle(task: asyncio.Task[Opened]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            task.result().response.close()
        elif isinstance(error, RetryableFailureError):
            error.discard()
            spare.failed(legs[task], error)

    for task, leg in legs.items():
        if task is not given:
            task.cancel()
            task.add_done_callback(settle)
        if task is not left_open:
            leg.close()
