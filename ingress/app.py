"""Putting the ingress together: settings in, a running application out."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from nearkv.certificates import ClientCertificates
from nearkv.health import Readiness, add_health_routes, create_registry
from nearkv.ingress.admitting import Admission
from nearkv.ingress.api import OwnApi
from nearkv.ingress.assembling import Sending, open_sending, open_suspects
from nearkv.ingress.capacity import CapacityCollector
from nearkv.ingress.extproc.app import Shared, add_ext_proc
from nearkv.ingress.fleet import Fleet
from nearkv.ingress.forwarding import Forwarder
from nearkv.ingress.generating import GenerateHandler
from nearkv.ingress.hints import PrefixHints
from nearkv.ingress.joining import CHECK_SYNC, AgentJoin
from nearkv.ingress.key_file import KeyFile
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.lease_releasing import LeaseReleaser
from nearkv.ingress.ledger import Ledger
from nearkv.ingress.metrics import FleetCollector, IngressMetrics
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.ingress.recording.api import DecisionsApi
from nearkv.ingress.recording.opening import Recording, open_recording
from nearkv.ingress.response_finding import ResponseFinder
from nearkv.ingress.response_owners import ResponseOwners
from nearkv.ingress.selecting import EngineSelector
from nearkv.ingress.settings import IngressSettings, Mode, TenantSettings
from nearkv.ingress.tenants import Tenants
from nearkv.ingress.tokens.engine_tokenizer import EngineTokenizer
from nearkv.ingress.tokens.local_tokenizer import LocalTokenizer
from nearkv.ingress.tokens.service import TokenService
from nearkv.ingress.upstream.pool import EnginePool
from nearkv.ingress.waiting_room import RoomLimits, WaitingRoom
from nearkv.keepalive import probed_socket
from nearkv.serving import InFlight, guard_with_token
from nearkv.settings import secret_bytes
from nearkv.supervising import Job, TaskFailureCollector, supervised

READINESS = web.AppKey("readiness", Readiness)
KNOWLEDGE = web.AppKey("knowledge", Knowledge)

_USUAL_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)
_HOUSEKEEPING_SECONDS = 5.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What the application is made of, and what has to be closed with it."""

    registry: CollectorRegistry
    readiness: Readiness
    recording: Recording
    session: aiohttp.ClientSession
    pool: EnginePool
    knowledge: Knowledge
    metrics: IngressMetrics
    certificates: ClientCertificates
    releaser: LeaseReleaser
    forwarder: Forwarder
    sending: Sending
    key_file: KeyFile | None
    admission: Admission
    selector: EngineSelector


async def build_app(settings: IngressSettings) -> web.Application:
    """Build the ingress's application; agents are followed while it runs.

    Raises ``IngressError`` when a local tokenizer cannot be loaded; ``TenantFileError``,
    ``CertificateError`` and ``RecordFileError`` when the files of ``tenants``, ``agent_tls`` or
    ``decisions`` cannot be used; ``TracingUnavailableError`` without OpenTelemetry.
    """
    if not settings.agents and not settings.agent_service.name and not settings.engines:
        log.warning("no_agents_and_no_engines_configured")
    parts = _open_parts(settings)
    readiness, knowledge, metrics = parts.readiness, parts.knowledge, parts.metrics
    app = web.Application(client_max_size=settings.limits.max_body_bytes)
    app[READINESS] = readiness
    app[KNOWLEDGE] = knowledge
    add_health_routes(app, readiness, registry=parts.registry)
    own = OwnApi(settings, knowledge, readiness, now=time.monotonic)
    decisions = parts.recording.api(settings)
    _add_routes(app, own, _handler(settings, parts), settings.admin_token, decisions)
    app.cleanup_ctx.append(parts.recording.run)
    if parts.key_file is not None:
        app.cleanup_ctx.append(_following(parts.key_file, readiness))
    app.cleanup_ctx.append(_background(settings, parts))
    if settings.mode is Mode.EXT_PROC:
        shared = Shared(
            settings,
            knowledge,
            metrics,
            parts.admission,
            parts.registry,
            readiness,
            selector=parts.selector,
            recorder=parts.recording.recorder,
        )
        add_ext_proc(app, shared)
    return app


def _open_parts(settings: IngressSettings) -> _Parts:
    local = _load_tokenizers(settings)
    registry = create_registry("ingress")
    recording = open_recording(settings, registry)
    session = _open_session(settings)
    knowledge = _gather_knowledge(settings, session, local)
    metrics = IngressMetrics(registry)
    registry.register(FleetCollector(knowledge.fleet, knowledge.ledger))
    readiness = Readiness(CHECK_SYNC)
    registry.register(TaskFailureCollector("ingress", readiness))
    pool = EnginePool(
        connect_seconds=settings.deadlines.connect_seconds,
        idle_seconds=settings.deadlines.engine_keepalive_seconds,
        socket_factory=_probed_socket,
    )
    forwarder = _open_forwarder(settings, pool)
    certificates = ClientCertificates(settings.agent_tls.files, count=metrics.certificate_loads.add)
    releaser = _open_releaser(settings, session, metrics, certificates)
    sending = open_sending(
        settings, knowledge, metrics, registry, forwarder=forwarder, releaser=releaser
    )
    key_file = _open_key_file(settings.tenants, metrics)
    return _Parts(
        registry=registry,
        readiness=readiness,
        recording=recording,
        session=session,
        pool=pool,
        knowledge=knowledge,
        metrics=metrics,
        certificates=certificates,
        releaser=releaser,
        forwarder=forwarder,
        sending=sending,
        key_file=key_file,
        admission=_open_admission(settings, knowledge, metrics, registry, key_file),
        selector=_open_selector(settings, knowledge, metrics, session),
    )


def _handler(settings: IngressSettings, parts: _Parts) -> GenerateHandler:
    return GenerateHandler(
        settings,
        parts.knowledge,
        parts.forwarder,
        parts.metrics,
        sending=parts.sending,
        admission=parts.admission,
        recorder=parts.recording.recorder,
        selector=parts.selector,
        now=time.monotonic,
    )


def _load_tokenizers(settings: IngressSettings) -> dict[str, LocalTokenizer]:
    return {
        model: LocalTokenizer.load(Path(folder))
        for model, folder in settings.tokenization.local.items()
    }


def _open_forwarder(settings: IngressSettings, pool: EnginePool) -> Forwarder:
    return Forwarder(
        pool,
        settings.deadlines,
        own_key=_reveal(settings.engine_api_key),
        keeps_keys=settings.tenants.file is not None,
    )


def _open_releaser(
    settings: IngressSettings,
    session: aiohttp.ClientSession,
    metrics: IngressMetrics,
    certificates: ClientCertificates,
) -> LeaseReleaser:
    return LeaseReleaser(
        session,
        token=_reveal(settings.agent_token),
        certificates=certificates,
        deadline_seconds=settings.pd.release_seconds,
        count=metrics.pd.releases.add,
    )


def _open_selector(
    settings: IngressSettings,
    knowledge: Knowledge,
    metrics: IngressMetrics,
    session: aiohttp.ClientSession,
) -> EngineSelector:
    finder = ResponseFinder(
        session,
        timeout_seconds=settings.deadlines.tokenize_seconds,
        api_key=_reveal(settings.engine_api_key),
        keeps_keys=settings.tenants.file is not None,
    )
    return EngineSelector(knowledge, metrics, finder, settings=settings, now=time.monotonic)


def _open_key_file(settings: TenantSettings, metrics: IngressMetrics) -> KeyFile | None:
    """Read the tenants, where there are any; raises ``TenantFileError``."""
    if settings.file is None:
        return None
    key_file = KeyFile(
        settings.file,
        Tenants(time.monotonic),
        seconds=settings.reload_seconds,
        count=metrics.admission.key_files.add,
    )
    key_file.load()
    return key_file


def _open_admission(
    settings: IngressSettings,
    knowledge: Knowledge,
    metrics: IngressMetrics,
    registry: CollectorRegistry,
    key_file: KeyFile | None,
) -> Admission:
    limits = settings.admission
    room = WaitingRoom(
        RoomLimits(limits.max_waiting, limits.wait_seconds, settings.gate.retry_after_seconds)
    )
    registry.register(CapacityCollector(settings, knowledge, room, time.monotonic))
    return Admission(
        room,
        metrics.admission,
        None if key_file is None else key_file.tenants,
        waits=limits.wait_seconds > 0,
    )


def _following(key_file: KeyFile, readiness: Readiness) -> Any:  # noqa: ANN401 (as below)
    async def run(_app: web.Application) -> AsyncIterator[None]:
        async with supervised([Job("tenants", key_file.follow)], readiness, check="tenants"):
            yield

    return run


def _add_routes(
    app: web.Application,
    own: OwnApi,
    generate: GenerateHandler,
    token: SecretStr | None,
    records: DecisionsApi,
) -> None:
    app.router.add_get("/v1/models", own.models)
    app.router.add_get("/v1/models/{name:.+}", own.model)
    for path, handler in (
        ("/v1/status", own.status),
        ("/v1/prefixes", own.prefixes),
        ("/v1/decisions", records.decisions),
        ("/v1/explain", records.explain),
    ):
        app.router.add_get(path, guard_with_token(handler, token))
    for path in _USUAL_PATHS:  # found by name, without going through patterns
        app.router.add_post(path, generate.handle)
    app.router.add_route("*", "/v1/{tail:.*}", generate.handle)


def _open_session(settings: IngressSettings) -> aiohttp.ClientSession:
    """Open the connections to agents, and to engines for all that is no client's request.

    No limit on their number: the ledger bounds requests.
    """
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=settings.deadlines.engine_keepalive_seconds,
        socket_factory=_probed_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
        read_bufsize=1 << 18,
    )


def _probed_socket(address: tuple[Any, ...]) -> socket.socket:
    """Notice within 20 s that a host is gone; that an engine is slow says nothing here."""
    return probed_socket(address, after_seconds=10, every_seconds=3, probes=3, unheard_seconds=20)


def _gather_knowledge(
    settings: IngressSettings,
    session: aiohttp.ClientSession,
    local: dict[str, LocalTokenizer],
) -> Knowledge:
    fleet = Fleet(
        PrefixIndex(limit_bytes=settings.limits.index_bytes),
        path_aged_seconds=settings.pd.path_aged_seconds,
    )
    for engine in settings.engines:
        fleet.add_static_engine(engine.id, engine.url.rstrip("/"))
    tokens = TokenService(
        EngineTokenizer(
            session,
            timeout_seconds=settings.deadlines.tokenize_seconds,
            api_key=_reveal(settings.engine_api_key),
        ),
        local,
        order=settings.tokenization.order,
        memo_bytes=settings.limits.token_memo_bytes,
    )
    return Knowledge(
        fleet=fleet,
        tokens=tokens,
        hints=PrefixHints(limit_bytes=settings.limits.hint_bytes),
        ledger=Ledger(),
        parity=ParityCheck(),
        suspects=open_suspects(settings),
        in_flight=InFlight(),
        secret=secret_bytes(settings.cluster_secret),
        owners=ResponseOwners(
            most=settings.models.response_ids, seconds=settings.models.response_seconds
        ),
    )


def _background(settings: IngressSettings, parts: _Parts) -> Any:  # noqa: ANN401 (aiohttp's cleanup context type is private)
    readiness, knowledge = parts.readiness, parts.knowledge
    agents = AgentJoin(
        settings,
        knowledge.fleet,
        parts.metrics,
        session=parts.session,
        certificates=parts.certificates,
    )

    async def run(_app: web.Application) -> AsyncIterator[None]:
        house = Job("housekeeping", lambda: _keep_house(knowledge))
        patience = Job("patience", parts.sending.patience.watch)
        jobs = [*agents.jobs(readiness), house, patience]
        async with supervised(jobs, readiness, check="background"):
            yield
        await parts.releaser.close()
        knowledge.tokens.close()
        await parts.session.close()
        parts.pool.close()

    return run


def _reveal(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


async def _keep_house(knowledge: Knowledge) -> None:
    """Sweep the index in slices, drop what was learnt of engines long gone, check secrets."""
    warned: list[str] = []
    while True:
        await asyncio.sleep(_HOUSEKEEPING_SECONDS)
        for _ in knowledge.fleet.index.sweep():
            await asyncio.sleep(0)
        knowledge.forget_the_gone()
        knowledge.owners.sweep(time.monotonic())
        mismatches = knowledge.key_mismatches()
        if mismatches != warned:
            warned = mismatches
            log.warning("cluster_secret_differs", engines=mismatches)
