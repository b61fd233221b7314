"""Putting the sidecar together: the engine's port, and another one for our own probes.

Everything on the serving port is the engine's, ``/health`` and ``/metrics`` included; what the
sidecar says of itself is on ``listen`` of the ingress.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog
from aiohttp import web

from nearkv.health import Readiness, add_health_routes, create_registry
from nearkv.ingress.bodies import BodyRoom
from nearkv.ingress.extproc.endpoints import Membership
from nearkv.ingress.extproc.pool_watching import make_pool_watch
from nearkv.ingress.forwarding import Forwarder
from nearkv.ingress.settings import IngressSettings
from nearkv.ingress.sidecar.metrics import SidecarMetrics
from nearkv.ingress.sidecar.prefillers import Allowed
from nearkv.ingress.sidecar.prefilling import Prefilling
from nearkv.ingress.sidecar.proxying import SidecarHandler
from nearkv.ingress.upstream.pool import EnginePool
from nearkv.serving import InFlight, running, serve
from nearkv.supervising import Job, TaskFailureCollector, supervised

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The two applications of a sidecar."""

    proxy: web.Application
    probes: web.Application
    readiness: Readiness
    in_flight: InFlight


def build_sidecar(settings: IngressSettings) -> Sidecar:
    """Build the sidecar's applications; call it where an event loop runs."""
    own = settings.sidecar
    registry = create_registry("ingress")
    metrics = SidecarMetrics(registry)
    watch, access = make_pool_watch(own.pool, metrics.pool_failures.add)
    if watch is None and not own.prefillers:
        log.warning("no_prefillers_allowed", hint="set sidecar.prefillers or sidecar.pool.name")
    pool = EnginePool(
        connect_seconds=settings.deadlines.connect_seconds,
        idle_seconds=settings.deadlines.engine_keepalive_seconds,
    )
    forwarder = Forwarder(pool, settings.deadlines)
    readiness = Readiness()
    registry.register(TaskFailureCollector("ingress", readiness))
    in_flight = InFlight()
    handler = SidecarHandler(
        engine_url=own.engine,
        forwarder=forwarder,
        prefilling=Prefilling(
            forwarder,
            metrics,
            allowed=Allowed.of(own.prefillers),
            membership=_no_pool if watch is None else watch.membership,
            deadline_seconds=own.prefill_seconds,
        ),
        metrics=metrics,
        in_flight=in_flight,
        bodies=BodyRoom(settings),
    )

    async def run(_app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.callback(pool.close)
            if watch is not None and access is not None:
                await stack.enter_async_context(access)
                # Readiness is not about having read it: without the engine still answers.
                jobs = [Job("pool_watch", watch.run)]
                await stack.enter_async_context(supervised(jobs, readiness, check="pool_watch"))
            yield

    proxy = web.Application(client_max_size=settings.limits.max_body_bytes)
    proxy.router.add_route("*", "/{tail:.*}", handler.handle)
    proxy.cleanup_ctx.append(run)
    probes = web.Application()
    add_health_routes(probes, readiness, registry=registry)
    return Sidecar(proxy, probes, readiness, in_flight)


async def serve_sidecar(settings: IngressSettings) -> None:
    """Serve both applications until told to stop."""
    sidecar = build_sidecar(settings)
    async with running(sidecar.probes, settings.listen) as address:
        log.info("probes_listening", address=str(address))
        await serve(
            sidecar.proxy,
            address=settings.sidecar.listen,
            readiness=sidecar.readiness,
            in_flight=sidecar.in_flight,
            drain_seconds=settings.drain_seconds,
        )


def _no_pool() -> Membership | None:
    return None
