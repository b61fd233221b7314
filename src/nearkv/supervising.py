"""Background tasks that live as long as an application."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import structlog

from nearkv.health import Readiness

log = structlog.get_logger(__name__)


@asynccontextmanager
async def supervised(
    jobs: Iterable[Coroutine[Any, Any, None]], readiness: Readiness, *, check: str
) -> AsyncIterator[None]:
    """Run jobs in the background for the length of a block, then cancel them.

    A job that fails, which is a defect, is logged and fails the readiness ``check``, instead
    of ending in silence.
    """
    tasks = [asyncio.create_task(_guard(job, readiness, check)) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _guard(job: Coroutine[Any, Any, None], readiness: Readiness, check: str) -> None:
    try:
        await job
    except Exception as error:
        log.exception("background_task_failed")
        readiness.set(check, ok=False, why=f"a task failed: {error!r}")
