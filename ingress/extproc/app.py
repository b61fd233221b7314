"""Adding the endpoint picker to the ingress's application."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from aiohttp import web
from prometheus_client import CollectorRegistry

from nearkv.health import Readiness
from nearkv.ingress.admitting import Admission
from nearkv.ingress.bodies import BodyRoom
from nearkv.ingress.extproc.conversing import Conversation
from nearkv.ingress.extproc.endpoints import Membership
from nearkv.ingress.extproc.metrics import ExtProcMetrics
from nearkv.ingress.extproc.pool_watching import PoolWatch, make_pool_watch
from nearkv.ingress.extproc.reaching import Reach
from nearkv.ingress.extproc.routed_picking import RouterPicker
from nearkv.ingress.extproc.serving import Servers, serving
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.metrics import IngressMetrics
from nearkv.ingress.recording.recorder import Recorder
from nearkv.ingress.selecting import EngineSelector
from nearkv.ingress.settings import IngressSettings
from nearkv.serving import InFlight
from nearkv.supervising import Job, supervised

_CHECK_POOL = "pool"
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 0.1
"""For streams that a drain has waited for already."""


@dataclass(slots=True)
class Listening:
    """Where the picker serves, once it does."""

    servers: Servers | None = None


EXT_PROC = web.AppKey("ext_proc", Listening)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the picker shares with the rest of the ingress."""

    settings: IngressSettings
    knowledge: Knowledge
    metrics: IngressMetrics
    admission: Admission
    registry: CollectorRegistry
    readiness: Readiness
    selector: EngineSelector
    recorder: Recorder


def add_ext_proc(app: web.Application, shared: Shared) -> None:
    """Serve Envoy for as long as the application runs, with the application's knowledge."""
    settings, knowledge, readiness = shared.settings, shared.knowledge, shared.readiness
    own = settings.ext_proc
    counts = ExtProcMetrics(shared.registry)
    watch, access = make_pool_watch(own.pool, counts.pool_failures.add)
    picker = RouterPicker(
        settings=settings,
        knowledge=knowledge,
        metrics=shared.metrics,
        admission=shared.admission,
        selector=shared.selector,
        recorder=shared.recorder,
        reach=Reach(
            knowledge.fleet,
            _no_pool if watch is None else watch.membership,
            counts.skipped.add,
        ),
        now=time.monotonic,
    )
    conversation = Conversation(
        picker,
        counts,
        bodies=BodyRoom(settings),
        limit_bytes=settings.limits.max_body_bytes,
        body_seconds=settings.deadlines.body_seconds,
    )
    listening = app[EXT_PROC] = Listening()

    async def run(_app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if watch is not None and access is not None:
                await stack.enter_async_context(access)
                readiness.set(_CHECK_POOL, ok=False, why=watch.problem)
                jobs = [
                    Job("pool_watch", watch.run),
                    Job("report_pool", partial(_report_pool, watch, readiness)),
                ]
                await stack.enter_async_context(supervised(jobs, readiness, check="pool_watch"))
            listening.servers = await stack.enter_async_context(
                serving(
                    conversation=conversation,
                    readiness=readiness,
                    listen=own.listen,
                    health_listen=own.health_listen,
                    tls=own.tls,
                    limit_bytes=settings.limits.max_body_bytes,
                    close_seconds=_CLOSE_SECONDS,
                    track=lambda: _counted(knowledge.in_flight),
                )
            )
            yield

    app.cleanup_ctx.append(run)


async def _report_pool(watch: PoolWatch, readiness: Readiness) -> None:
    """Report whether the pool was read; one without members is a state, not a fault."""
    while True:
        readiness.set(_CHECK_POOL, ok=watch.was_read, why=watch.problem)
        await asyncio.sleep(_POLL_SECONDS)


def _no_pool() -> Membership | None:
    return None


@dataclass(frozen=True, slots=True)
class _Stream:
    """What the count of requests in flight wants of one."""

    task: "asyncio.Task[Any]"


@contextmanager
def _counted(in_flight: InFlight) -> Iterator[None]:
    """Count a stream among the requests in flight, so that a drain waits for it."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 (a handler is a task)
    stream = cast(web.Request, _Stream(task))
    in_flight.enter(stream)
    try:
        yield
    finally:
        in_flight.leave(stream)
