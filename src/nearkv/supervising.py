"""Background tasks that live as long as an application, and are begun anew when they fail.

A task that fails is a defect, or a surprise that nobody thought of. What it did is missed from
then on, so it is started again after a pause; what fails over and over will not get well by that.
Then the process gives up: readiness and liveness fail, and whoever runs it starts it anew.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from nearkv.health import Readiness

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A background task. ``run`` makes it, each time anew; ``name`` is its kind, for metrics.

    Whatever ``run`` keeps outside of itself must be as good for a second start as for the first.
    """

    name: str
    run: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """How often a task may fail within ``window_seconds``, and the pauses before it goes on."""

    max_restarts: int = 5
    window_seconds: float = 600.0
    first_pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0


DEFAULT_LIMITS = RestartLimits()


class RestartPlan:
    """Decides for one task (pure); ``draw`` returns random numbers from 0 to 1."""

    def __init__(self, limits: RestartLimits, *, draw: Callable[[], float]) -> None:
        self._limits = limits
        self._draw = draw
        self._failed_at: deque[float] = deque()

    def failed(self, now: float) -> float | None:
        """Take a failure; return how many seconds to wait, ``None`` where it is the last straw."""
        limits, failed_at = self._limits, self._failed_at
        while failed_at and now - failed_at[0] >= limits.window_seconds:
            failed_at.popleft()
        if len(failed_at) >= limits.max_restarts:
            return None
        pause_seconds = limits.first_pause_seconds * 2.0 ** len(failed_at)
        failed_at.append(now)
        return min(pause_seconds, limits.longest_pause_seconds) * (0.5 + self._draw())


@asynccontextmanager
async def supervised(
    jobs: Iterable[Job],
    readiness: Readiness,
    *,
    check: str,
    limits: RestartLimits = DEFAULT_LIMITS,
    draw: Callable[[], float] = random.random,
) -> AsyncIterator[None]:
    """Run jobs in the background for the length of a block, then cancel them.

    Each failure is logged and counted (:class:`TaskFailureCollector`). One that comes too often
    fails the readiness ``check`` and the process's liveness.
    """
    tasks = [
        asyncio.create_task(
            keep_running(job, readiness, check=check, plan=RestartPlan(limits, draw=draw))
        )
        for job in jobs
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def keep_running(
    job: Job, readiness: Readiness, *, check: str, plan: RestartPlan | None = None
) -> None:
    """Run one job until it ends by itself, is cancelled, or has failed too often."""
    plan = plan or RestartPlan(DEFAULT_LIMITS, draw=random.random)
    # A counter that begins with its first failure has no increase that Prometheus could see.
    readiness.task_failures.setdefault(job.name, 0)
    while True:
        try:
            await job.run()
        except Exception as error:
            readiness.task_failures[job.name] += 1
            pause_seconds = plan.failed(asyncio.get_running_loop().time())
            log.exception(
                "background_task_failed",
                task=job.name,
                restart_after_seconds=pause_seconds and round(pause_seconds, 3),
            )
            if pause_seconds is None:
                why = f"the task {job.name} failed too often: {error!r}"
                readiness.set(check, ok=False, why=why)
                readiness.give_up(why)
                return
        else:
            return
        await asyncio.sleep(pause_seconds)


class TaskFailureCollector(Collector):
    """The failures of a process's background tasks as series, read when scraped."""

    def __init__(self, component: str, readiness: Readiness) -> None:
        self._name = f"nearkv_{component}_background_task_failures"
        self._readiness = readiness

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Yield the one counter, with a sample for each kind of task that ever ran."""
        failures = CounterMetricFamily(
            self._name,
            "Failures of background tasks, which are defects; each is started again, five times "
            "in ten minutes.",
            labels=("task",),
        )
        for task, count in sorted(self._readiness.task_failures.items()):
            failures.add_metric([task], count)
        yield failures
