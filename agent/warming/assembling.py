"""Adding warm-up to the agent's application."""

from collections.abc import AsyncIterator

from aiohttp import web
from prometheus_client import CollectorRegistry

from nearkv.agent.node_state import NodeState
from nearkv.agent.probing import open_engine_session
from nearkv.agent.settings import AgentSettings
from nearkv.agent.warming.api import WarmApi
from nearkv.agent.warming.calling import EngineCaller
from nearkv.agent.warming.metrics import WarmCollector
from nearkv.agent.warming.seeding import Seeder
from nearkv.agent.warming.service import WarmService
from nearkv.health import Readiness
from nearkv.settings import secret_bytes
from nearkv.supervising import Job, supervised

_CHECK = "warming"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_warming(
    app: web.Application,
    registry: CollectorRegistry,
    settings: AgentSettings,
    state: NodeState,
    readiness: Readiness,
) -> WarmService:
    """Add warm-up: its API, status, series and, where set, its folder of prompts."""
    warming = settings.warming
    caller = EngineCaller(deadline_seconds=warming.deadline_seconds, priority=warming.priority)
    service = WarmService(state, caller, warming, secret=secret_bytes(settings.cluster_secret))
    state.parts["warming"] = service
    registry.register(WarmCollector(service))
    WarmApi(service, warming, may_change=_is_guarded(settings)).add_routes(app)
    folder = warming.folder
    seeders = [] if folder is None else [Seeder(folder, service, state, warming)]

    async def warm(_app: web.Application) -> AsyncIterator[None]:
        async with open_engine_session() as session, service.running():
            caller.session = session
            jobs = [Job(_CHECK, seeder.run) for seeder in seeders]
            async with supervised(jobs, readiness, check=_CHECK):
                yield

    app.cleanup_ctx.append(warm)
    return service


def _is_guarded(settings: AgentSettings) -> bool:
    """Tell whether only those can ask who may: loading costs engines their time."""
    shows_certificate = settings.tls is not None and settings.tls.client_ca is not None
    return bool(settings.token) or shows_certificate or settings.listen.host in _LOOPBACK
