"""Putting the ingress together: settings in, a running application out."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from nearkv.certificates import ClientCertificates, ClientFiles
from nearkv.health import Readiness, add_health_routes, create_registry
from nearkv.ingress.admitting import Admission
from nearkv.ingress.api import OwnApi
from nearkv.ingress.capacity import CapacityCollector
from nearkv.ingress.extproc.app import Shared, add_ext_proc
from nearkv.ingress.fleet import Fleet
from nearkv.ingress.following import AgentFollower, FollowLimits
from nearkv.ingress.forwarding import Forwarder
from nearkv.ingress.generating import GenerateHandler
from nearkv.ingress.hints import PrefixHints
from nearkv.ingress.key_file import KeyFile
from nearkv.ingress.knowledge import Knowledge
from nearkv.ingress.lease_releasing import LeaseReleaser
from nearkv.ingress.ledger import Ledger
from nearkv.ingress.metrics import FleetCollector, IngressMetrics
from nearkv.ingress.parity import ParityCheck
from nearkv.ingress.parity_watch import ParityWatch
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.ingress.settings import IngressSettings, Mode, TenantSettings
from nearkv.ingress.suspects import Suspects
from nearkv.ingress.tenants import Tenants
from nearkv.ingress.tokens.engine_tokenizer import EngineTokenizer
from nearkv.ingress.tokens.local_tokenizer import LocalTokenizer
from nearkv.ingress.tokens.service import TokenService
from nearkv.ingress.two_legs import TwoLegs
from nearkv.ingress.waiting_room import RoomLimits, WaitingRoom
from nearkv.serving import InFlight, guard_with_token
from nearkv.settings import secret_bytes
from nearkv.supervising import supervised

READINESS = web.AppKey("readiness", Readiness)
KNOWLEDGE = web.AppKey("knowledge", Knowledge)

_USUAL_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
_CHECK_SYNC = "agents_synced"
_HOUSEKEEPING_SECONDS = 5.0
_SYNC_POLL_SECONDS = 0.05

log = structlog.get_logger(__name__)


async def build_app(settings: IngressSettings) -> web.Application:
    """Build the ingress's application; agents are followed while it runs.

    Raises ``IngressError`` when a local tokenizer cannot be loaded, ``TenantFileError`` when
    the file of tenants cannot.
    """
    if not settings.agents and not settings.engines:
        log.warning("no_agents_and_no_engines_configured")
    local = _load_tokenizers(settings)
    session = _open_session(settings)
    knowledge = _gather_knowledge(settings, session, local)
    registry = create_registry("ingress")
    metrics = IngressMetrics(registry)
    registry.register(FleetCollector(knowledge.fleet, knowledge.ledger))
    readiness = Readiness(_CHECK_SYNC)
    forwarder = _open_forwarder(settings, session)
    releaser = _open_releaser(settings, session, metrics)
    two_legs = TwoLegs(
        forwarder=forwarder,
        knowledge=knowledge,
        metrics=metrics,
        parity=ParityWatch(knowledge.parity, metrics),
        releaser=releaser,
        prefill_seconds=settings.pd.prefill_seconds,
        now=time.monotonic,
    )
    key_file = _open_key_file(settings.tenants, metrics)
    admission = _open_admission(settings, knowledge, metrics, registry, key_file)
    generate = GenerateHandler(
        settings,
        knowledge,
        forwarder,
        metrics,
        two_legs=two_legs,
        admission=admission,
        now=time.monotonic,
    )
    app = web.Application(client_max_size=settings.limits.max_body_bytes)
    app[READINESS] = readiness
    app[KNOWLEDGE] = knowledge
    add_health_routes(app, readiness, registry=registry)
    own = OwnApi(settings, knowledge, readiness, now=time.monotonic)
    _add_routes(app, own, generate, settings.admin_token)
    if key_file is not None:
        app.cleanup_ctx.append(_following(key_file, readiness))
    app.cleanup_ctx.append(_background(settings, knowledge, metrics, readiness, session, releaser))
    if settings.mode is Mode.EXT_PROC:
        shared = Shared(settings, knowledge, metrics, admission, registry, readiness)
        add_ext_proc(app, shared)
    return app


def _load_tokenizers(settings: IngressSettings) -> dict[str, LocalTokenizer]:
    return {
        model: LocalTokenizer.load(Path(folder))
        for model, folder in settings.tokenization.local.items()
    }


def _open_forwarder(settings: IngressSettings, session: aiohttp.ClientSession) -> Forwarder:
    return Forwarder(
        session,
        settings.deadlines,
        own_key=_reveal(settings.engine_api_key),
        keeps_keys=settings.tenants.file is not None,
    )


def _open_releaser(
    settings: IngressSettings, session: aiohttp.ClientSession, metrics: IngressMetrics
) -> LeaseReleaser:
    return LeaseReleaser(
        session,
        token=_reveal(settings.agent_token),
        deadline_seconds=settings.pd.release_seconds,
        count=metrics.pd.releases.add,
    )


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
        async with supervised([key_file.follow()], readiness, check="tenants"):
            yield

    return run


def _add_routes(
    app: web.Application, own: OwnApi, generate: GenerateHandler, token: SecretStr | None
) -> None:
    app.router.add_get("/v1/models", own.models)
    for path, handler in (("/v1/status", own.status), ("/v1/prefixes", own.prefixes)):
        app.router.add_get(path, guard_with_token(handler, token))
    for path in _USUAL_PATHS:  # found by name, without going through patterns
        app.router.add_post(path, generate.handle)
    app.router.add_route("*", "/v1/{tail:.*}", generate.handle)


def _open_session(settings: IngressSettings) -> aiohttp.ClientSession:
    """Open the connection pool for engines and agents.

    No limit on connections: the ledger bounds requests. Answers are not decompressed, since
    they are passed on as they are.
    """
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=settings.deadlines.engine_keepalive_seconds
    )
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
        read_bufsize=1 << 18,
    )


def _gather_knowledge(
    settings: IngressSettings,
    session: aiohttp.ClientSession,
    local: dict[str, LocalTokenizer],
) -> Knowledge:
    fleet = Fleet(PrefixIndex(limit_bytes=settings.limits.index_bytes))
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
        suspects=Suspects(),
        in_flight=InFlight(),
        secret=secret_bytes(settings.cluster_secret),
    )


def _background(
    settings: IngressSettings,
    knowledge: Knowledge,
    metrics: IngressMetrics,
    readiness: Readiness,
    session: aiohttp.ClientSession,
    releaser: LeaseReleaser,
) -> Any:  # noqa: ANN401 (aiohttp's cleanup context type is private)
    async def run(_app: web.Application) -> AsyncIterator[None]:
        token = _reveal(settings.agent_token)
        tls = settings.agent_tls
        certificates = ClientCertificates(ClientFiles(tls.ca, tls.cert, tls.key))
        followers = [
            AgentFollower(
                url,
                knowledge.fleet,
                session,
                now=time.monotonic,
                count_error=metrics.stream_errors.add,
                limits=FollowLimits(
                    token=token,
                    certificates=certificates,
                    connect_seconds=settings.deadlines.connect_seconds,
                    silence_seconds=settings.deadlines.agent_silence_seconds,
                ),
            )
            for url in settings.agents
        ]
        jobs: list[Coroutine[Any, Any, None]] = [
            *(follower.run() for follower in followers),
            _keep_house(knowledge),
            _report_sync(knowledge.fleet, readiness, settings.deadlines.sync_seconds),
        ]
        async with supervised(jobs, readiness, check="background"):
            yield
        await releaser.close()
        knowledge.tokens.close()
        await session.close()

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
        mismatches = knowledge.key_mismatches()
        if mismatches != warned:
            warned = mismatches
            log.warning("cluster_secret_differs", engines=mismatches)


async def _report_sync(fleet: Fleet, readiness: Readiness, longest_seconds: float) -> None:
    """Become ready once every agent's snapshot is here, or after a while without."""
    give_up_at = time.monotonic() + longest_seconds
    while True:
        missing = [agent.url for agent in fleet.agents.values() if not agent.synced]
        if not missing:
            readiness.set(_CHECK_SYNC, ok=True)
            return
        if time.monotonic() >= give_up_at:
            why = f"serving without {len(missing)} of {len(fleet.agents)} agents"
            readiness.set(_CHECK_SYNC, ok=True, why=why)
            log.warning("serving_without_agents", missing=missing)
            return
        readiness.set(_CHECK_SYNC, ok=False, why=f"waiting for {', '.join(missing)}")
        await asyncio.sleep(_SYNC_POLL_SECONDS)
