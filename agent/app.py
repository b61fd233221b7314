"""Putting the agent together: settings in, a running application out."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import aiohttp
import structlog
import zmq.asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry

from nearkv._version import __version__
from nearkv.agent.api import StateApi
from nearkv.agent.discovering import EngineSpec, configured_engines
from nearkv.agent.metrics import NodeCollector
from nearkv.agent.node_state import NodeState
from nearkv.agent.probing import EngineProbe
from nearkv.agent.settings import AgentSettings
from nearkv.agent.state_log import StateLog
from nearkv.agent.transfer.abilities import TransferAbilities
from nearkv.agent.transfer.assembling import Surroundings
from nearkv.agent.transfer.metrics import TransferCollector, TransferGauges, TransferMetrics
from nearkv.agent.transfer.path_costs import PathCosts, path_priors
from nearkv.agent.transfer.service import TransferService
from nearkv.agent.watching import EngineWatch, WatchLimits
from nearkv.health import Readiness, add_health_routes, create_registry
from nearkv.serving import require_bearer_token
from nearkv.settings import secret_bytes
from nearkv.supervising import supervised

NODE_STATE = web.AppKey("node_state", NodeState)
READINESS = web.AppKey("readiness", Readiness)
TRANSFER = web.AppKey("transfer", TransferService)

_CHECK_WATCHES = "watching"
_FIRST_LOOK_SECONDS = 5.0

log = structlog.get_logger(__name__)


def build_app(settings: AgentSettings) -> web.Application:
    """Build the agent's application; engines are watched while it runs."""
    specs = configured_engines(settings.engines)
    if not specs:
        log.warning("no_engines_configured")
    boot = secrets.token_hex(4)
    abilities = TransferAbilities({engine.id: engine.transfer for engine in settings.engines})
    state = NodeState(
        StateLog(
            boot=boot,
            node=settings.node,
            version=__version__,
            ring_limit_bytes=settings.state.ring_limit_bytes,
            transfer_of=abilities.of,
        ),
        boot=boot,
        flush_seconds=settings.state.flush_seconds,
        now=time.monotonic,
    )
    readiness = Readiness(_CHECK_WATCHES)
    registry = create_registry("agent")
    registry.register(NodeCollector(state))
    app = web.Application(middlewares=[require_bearer_token(settings.token)])
    app[NODE_STATE] = state
    app[READINESS] = readiness
    add_health_routes(app, readiness, registry=registry)
    StateApi(state, readiness, settings, started_at=state.now()).add_routes(app)
    app.cleanup_ctx.append(_watching(specs, settings, state, readiness))
    _add_transfer(app, registry, settings, state, abilities)
    return app


def _add_transfer(
    app: web.Application,
    registry: CollectorRegistry,
    settings: AgentSettings,
    state: NodeState,
    abilities: TransferAbilities,
) -> None:
    """Add KV transfer where it is on; its series are there in any case."""
    metrics = TransferMetrics(registry)
    directory = settings.transfer.socket_dir
    if directory is None:
        registry.register(TransferCollector(TransferGauges))
        return
    around = Surroundings(
        node=settings.node,
        state=state,
        abilities=abilities,
        metrics=metrics,
        costs=PathCosts(settings.node, path_priors(settings.transfer.priors)),
        packet_key=secret_bytes(settings.cluster_secret) or None,
    )
    service = TransferService(directory, settings.transfer, around)
    state.transfer = service
    registry.register(TransferCollector(service.gauges))
    app[TRANSFER] = service
    app.router.add_post("/v1/transfer/release", service.release)

    async def transfer_kv(_app: web.Application) -> AsyncIterator[None]:
        async with service.running():
            yield

    app.cleanup_ctx.append(transfer_kv)


def _watching(
    specs: Sequence[EngineSpec], settings: AgentSettings, state: NodeState, readiness: Readiness
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return the application's context in which the engines are watched."""
    limits = WatchLimits(
        scrape_interval_seconds=settings.scrape.interval_seconds,
        table_limit_bytes=settings.state.table_limit_bytes,
        secret=secret_bytes(settings.cluster_secret),
    )

    async def watch_engines(_app: web.Application) -> AsyncIterator[None]:
        context = zmq.asyncio.Context()
        async with aiohttp.ClientSession() as session:
            watches = [
                EngineWatch(
                    spec,
                    EngineProbe(
                        spec.url,
                        session,
                        timeout_seconds=settings.scrape.timeout_seconds,
                        bearer_token=spec.api_key,
                    ),
                    state,
                    node=settings.node,
                    context=context,
                    limits=limits,
                )
                for spec in specs
            ]
            jobs = [watch.run() for watch in watches]
            async with supervised(jobs, readiness, check=_CHECK_WATCHES):
                await _first_looks(watches)
                readiness.set(_CHECK_WATCHES, ok=True)
                yield
        context.destroy(linger=0)

    return watch_engines


async def _first_looks(watches: Sequence[EngineWatch]) -> None:
    """Wait until every engine was asked once, before anybody is served.

    The snapshot of an agent that has just begun would tell its consumers that the engines
    are gone, and requests would be refused although all of them answer. Nobody there to
    connect to means no more than that what is known grows old.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_LOOK_SECONDS):
            await asyncio.gather(*(watch.first_look() for watch in watches))
