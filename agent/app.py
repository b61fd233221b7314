"""Putting the agent together: settings in, a running application out."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import aiohttp
import structlog
import zmq.asyncio
from aiohttp import web

from nearkv._version import __version__
from nearkv.agent.api import StateApi
from nearkv.agent.discovering import configured_engines
from nearkv.agent.metrics import NodeCollector
from nearkv.agent.node_state import NodeState
from nearkv.agent.probing import EngineProbe
from nearkv.agent.settings import AgentSettings
from nearkv.agent.state_log import StateLog
from nearkv.agent.watching import EngineWatch, WatchLimits
from nearkv.health import Readiness, add_health_routes, create_registry
from nearkv.serving import require_bearer_token

NODE_STATE = web.AppKey("node_state", NodeState)
READINESS = web.AppKey("readiness", Readiness)

_CHECK_WATCHES = "watching"

log = structlog.get_logger(__name__)


def build_app(settings: AgentSettings) -> web.Application:
    """Build the agent's application; engines are watched while it runs.

    Raises ``AgentError`` when the configured engines contradict each other.
    """
    specs = configured_engines(settings.engines)
    boot = secrets.token_hex(4)
    state = NodeState(
        StateLog(
            boot=boot,
            node=settings.node,
            version=__version__,
            ring_limit_bytes=settings.state.ring_limit_bytes,
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
                    limits=_limits_of(settings),
                )
                for spec in specs
            ]
            tasks = [asyncio.create_task(_guard(watch, readiness)) for watch in watches]
            readiness.set(_CHECK_WATCHES, ok=True)
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)

    app.cleanup_ctx.append(watch_engines)
    return app


async def _guard(watch: EngineWatch, readiness: Readiness) -> None:
    """Let a defect in one watch be seen, instead of ending in silence."""
    try:
        await watch.run()
    except Exception as error:
        log.exception("watch_failed")
        readiness.set(_CHECK_WATCHES, ok=False, why=f"a watch failed: {error!r}")


def _limits_of(settings: AgentSettings) -> WatchLimits:
    secret = settings.cluster_secret
    return WatchLimits(
        scrape_interval_seconds=settings.scrape.interval_seconds,
        table_limit_bytes=settings.state.table_limit_bytes,
        secret=secret.get_secret_value().encode() if secret else b"",
    )
