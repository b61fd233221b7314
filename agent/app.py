"""Putting the agent together: settings in, a running application out."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry

from nearkv._version import __version__
from nearkv.agent.api import StateApi
from nearkv.agent.discovering import EngineSpec, configured_engines
from nearkv.agent.engine_kinds_probing import EngineKindProbe
from nearkv.agent.gpu.metrics import GpuCollector
from nearkv.agent.gpu.service import GpuService, plan_of
from nearkv.agent.kubernetes.joining import WORKER_STATUSES, add_kubernetes
from nearkv.agent.links.metrics import LinkCollector
from nearkv.agent.links.service import LinkService
from nearkv.agent.metrics import NodeCollector, certificate_loads, failed_handshakes
from nearkv.agent.node_state import NodeState
from nearkv.agent.probes.neighbours import Neighbours
from nearkv.agent.probing import open_engine_session
from nearkv.agent.settings import AgentSettings
from nearkv.agent.state_log import StateLog
from nearkv.agent.subscribing import open_context
from nearkv.agent.summary import DeviceReader, Hardware, HardwareReader, SummaryTiming
from nearkv.agent.summary_api import SummaryService
from nearkv.agent.summary_metrics import SummaryMetrics
from nearkv.agent.transfer.abilities import TransferAbilities
from nearkv.agent.transfer.assembling import Surroundings
from nearkv.agent.transfer.metrics import TransferCollector, TransferGauges, TransferMetrics
from nearkv.agent.transfer.path_costs import PathCosts, path_priors
from nearkv.agent.transfer.service import TransferService
from nearkv.agent.waking import RoomAnnouncer, WakingLimits
from nearkv.agent.warming.assembling import add_warming
from nearkv.agent.warming.service import WarmService
from nearkv.agent.watching import EngineWatch, WatchLimits
from nearkv.agent.worker_status.prefixes import NamedPrefix
from nearkv.certificates import Certificates
from nearkv.health import Readiness, add_health_routes, create_registry
from nearkv.kube.access import ApiAccess
from nearkv.kube.patching import Patcher
from nearkv.serving import Transport, require_bearer_token, require_client_certificate
from nearkv.settings import secret_bytes
from nearkv.supervising import Job, TaskFailureCollector, supervised

NODE_STATE = web.AppKey("node_state", NodeState)
READINESS = web.AppKey("readiness", Readiness)
TRANSPORT = web.AppKey("transport", Transport)
TRANSFER = web.AppKey("transfer", TransferService)
LINKS = web.AppKey("links", LinkService)
GPUS = web.AppKey("gpus", GpuService)
WARMING = web.AppKey("warming", WarmService)

_CHECK_WATCHES = "watching"
_CHECK_SUMMARY = "summary"
_CHECK_TLS = "tls"
_FIRST_LOOK_SECONDS = 5.0

log = structlog.get_logger(__name__)


def build_app(settings: AgentSettings, *, devices: DeviceReader | None = None) -> web.Application:
    """Build the agent's application; engines are watched while it runs.

    ``devices`` reads the node's GPUs for the summary; default: what NVML says.
    """
    specs = configured_engines(settings.engines)
    if not specs and not settings.kubernetes.is_on:
        log.warning("no_engines_configured")
    abilities = TransferAbilities({engine.id: engine.transfer for engine in settings.engines})
    state = _open_state(settings, abilities)
    readiness = Readiness(_CHECK_WATCHES)
    registry = create_registry("agent")
    registry.register(NodeCollector(state))
    registry.register(TaskFailureCollector("agent", readiness))
    app = web.Application(middlewares=guards(settings))
    app[TRANSPORT] = _add_tls(app, registry, settings, readiness)
    app[NODE_STATE] = state
    app[READINESS] = readiness
    add_health_routes(app, readiness, registry=registry)
    StateApi(state, readiness, settings, started_at=state.now()).add_routes(app)
    links = _add_links(app, registry, settings, state, readiness)
    gpus = _add_gpus(app, registry, settings, state, readiness)
    app.cleanup_ctx.append(_watching(specs, settings, state, readiness))
    neighbours = Neighbours()
    _add_transfer(
        app, registry, settings, state, abilities, readiness=readiness, neighbours=neighbours
    )
    app[WARMING] = add_warming(app, registry, settings, state, readiness)
    devices = devices or gpus.summaries
    read_hardware = _hardware_reader(devices, links, gpus)
    summaries = SummaryMetrics(registry)
    summary = _add_summary(app, summaries, settings, state, readiness, read_hardware)
    _add_waking(app, summaries, settings, readiness, devices, publish=summary.refresh)
    add_kubernetes(
        app,
        registry,
        settings,
        state,
        readiness,
        modes=abilities,
        gpus=gpus,
        hardware=read_hardware,
        neighbours=neighbours,
    )
    warming = app[WARMING]
    app[WORKER_STATUSES].prefixes = lambda engine: [
        NamedPrefix(name, uses) for name, uses in warming.named_prefixes(engine)
    ]
    return app


def _open_state(settings: AgentSettings, abilities: TransferAbilities) -> NodeState:
    """Return the node's state, empty, under a name for this start of the agent."""
    boot = secrets.token_hex(4)
    return NodeState(
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
        tables_limit_bytes=settings.state.tables_limit_bytes,
    )


def _hardware_reader(
    devices: DeviceReader, links: LinkService, gpus: GpuService
) -> Callable[[], Hardware]:
    """Return what reads the node's hardware as it is now, with a reason for what is missing."""

    def read() -> Hardware:
        rdma = links.rdma
        why = {"rdma": rdma.reason} | ({"devices": str(gpus.missing)} if gpus.missing else {})
        return Hardware(devices=devices(), rdma=rdma.usable, why=why)

    return read


def guards(settings: AgentSettings) -> list[Middleware]:
    """Return what keeps strangers out: a token, a client certificate, or both."""
    checks = [require_bearer_token(settings.token)]
    if settings.tls is not None and settings.tls.client_ca is not None:
        checks.append(require_client_certificate())
    return checks


def _add_tls(
    app: web.Application,
    registry: CollectorRegistry,
    settings: AgentSettings,
    readiness: Readiness,
) -> Transport:
    """Have the certificate files looked at, where there are some; returns how to serve."""
    count, count_handshake = certificate_loads(registry), failed_handshakes(registry)
    tls = settings.tls
    if tls is None:
        return Transport()
    certificates = Certificates(tls.files, count=count, count_handshake=count_handshake)

    async def watch(_app: web.Application) -> AsyncIterator[None]:
        job = Job("certificates", lambda: certificates.watch(tls.reload_seconds))
        async with supervised([job], readiness, check=_CHECK_TLS):
            yield

    app.cleanup_ctx.append(watch)
    return Transport(tls=certificates.context)


def _add_summary(
    app: web.Application,
    metrics: SummaryMetrics,
    settings: AgentSettings,
    state: NodeState,
    readiness: Readiness,
    hardware: HardwareReader,
) -> SummaryService:
    """Add the summary for the extender."""
    timing = SummaryTiming(
        interval_seconds=settings.summary.interval_seconds,
        drift_seconds=settings.summary.drift_seconds,
        heartbeat_seconds=settings.summary.heartbeat_seconds,
    )
    service = SummaryService(
        state,
        readiness,
        node=settings.node,
        timing=timing,
        hardware=hardware,
        max_waiting=settings.summary.max_waiting,
        count=lambda outcome: metrics.requests.labels(outcome).inc(),
    )
    service.add_routes(app)

    async def summarize(_app: web.Application) -> AsyncIterator[None]:
        async with supervised([Job("summary", service.run)], readiness, check=_CHECK_SUMMARY):
            yield

    app.cleanup_ctx.append(summarize)
    return service


def _add_waking(
    app: web.Application,
    metrics: SummaryMetrics,
    settings: AgentSettings,
    readiness: Readiness,
    devices: DeviceReader,
    *,
    publish: Callable[[], object],
) -> None:
    """Wake pods that wait for room on this node, where that is on."""
    waking = settings.waking
    if not waking.enabled:
        return

    async def wake(_app: web.Application) -> AsyncIterator[None]:
        async with ApiAccess.automatic(
            str(waking.kubeconfig or ""), waking.context or ""
        ) as access:
            announcer = RoomAnnouncer(
                Patcher(access),
                node=settings.node,
                devices=devices,
                interval_seconds=settings.summary.interval_seconds,
                publish=publish,
                count=lambda outcome: metrics.room_announcements.labels(outcome).inc(),
                limits=WakingLimits(
                    min_seconds=waking.min_seconds,
                    settle_seconds=waking.settle_seconds,
                    jitter_seconds=waking.settle_seconds,
                ),
            )
            job = Job("waking", announcer.run)
            async with supervised([job], readiness, check=_CHECK_SUMMARY):
                yield

    app.cleanup_ctx.append(wake)


def _add_gpus(
    app: web.Application,
    registry: CollectorRegistry,
    settings: AgentSettings,
    state: NodeState,
    readiness: Readiness,
) -> GpuService:
    """Add the node's GPUs: their status and series."""
    gpus = GpuService(settings.gpu, plan=plan_of(settings.gpu), now=state.now)
    app[GPUS] = gpus
    state.parts["gpu"] = gpus
    registry.register(GpuCollector(gpus))

    async def read_gpus(_app: web.Application) -> AsyncIterator[None]:
        async with gpus.running(readiness):
            yield

    app.cleanup_ctx.append(read_gpus)
    return gpus


def _add_links(
    app: web.Application,
    registry: CollectorRegistry,
    settings: AgentSettings,
    state: NodeState,
    readiness: Readiness,
) -> LinkService:
    """Add the node's links: their status, series and verdict on RDMA."""
    links = LinkService(settings.links, now=state.now)
    app[LINKS] = links
    state.parts["links"] = links
    registry.register(LinkCollector(links))

    async def follow_links(_app: web.Application) -> AsyncIterator[None]:
        async with links.running(readiness):
            yield

    app.cleanup_ctx.append(follow_links)
    return links


def _add_transfer(  # noqa: PLR0913 (each is a part of the agent)
    app: web.Application,
    registry: CollectorRegistry,
    settings: AgentSettings,
    state: NodeState,
    abilities: TransferAbilities,
    *,
    readiness: Readiness,
    neighbours: Neighbours,
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
    service = TransferService(
        directory, settings.transfer, around, neighbours=neighbours, readiness=readiness
    )
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
        adapters_seconds=settings.scrape.adapters_seconds,
        table_limit_bytes=settings.state.table_limit_bytes,
        secret=secret_bytes(settings.cluster_secret),
    )

    async def watch_engines(_app: web.Application) -> AsyncIterator[None]:
        context = open_context()
        async with open_engine_session() as session:
            watches = [
                EngineWatch(
                    spec,
                    EngineKindProbe(
                        spec.url,
                        session,
                        timeout_seconds=settings.scrape.timeout_seconds,
                        bearer_token=spec.api_key,
                        kind=spec.kind,
                    ),
                    state,
                    node=settings.node,
                    context=context,
                    limits=limits,
                )
                for spec in specs
            ]
            jobs = [Job("engine_watch", watch.run) for watch in watches]
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
