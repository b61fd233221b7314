"""Putting the extender together: settings in, a running application out."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import structlog
from aiohttp import web

from nearkv.certificates import Certificates, ClientCertificates
from nearkv.descriptors import descriptor_limit
from nearkv.extender.api import (
    FILTER,
    PREEMPT,
    PRIORITIZE,
    Answering,
    SchedulerApi,
    refuse_bind,
    refuse_preempt,
)
from nearkv.extender.configuring import (
    body_limits,
    distance_config,
    headroom_config,
    pod_rules,
    score_config,
    transport,
    view_config,
)
from nearkv.extender.deciding import Scorer
from nearkv.extender.decisions import Decisions
from nearkv.extender.distance import DistanceConfig
from nearkv.extender.ledger import Ledger
from nearkv.extender.metrics import ExtenderMetrics, GaugeCollector, Gauges
from nearkv.extender.model import Snapshot
from nearkv.extender.questions import QuestionApi
from nearkv.extender.settings import ExtenderSettings
from nearkv.extender.topology import describe_topology
from nearkv.extender.view.cluster import ClusterView, ViewConfig, ViewStats
from nearkv.extender.view.polling import within_descriptors
from nearkv.health import Readiness, add_health_routes, create_registry
from nearkv.kube.access import ApiAccess
from nearkv.serving import Transport, guard_with_token
from nearkv.supervising import Job, TaskFailureCollector, supervised

READINESS = web.AppKey("readiness", Readiness)
TRANSPORT = web.AppKey("transport", Transport)
SCORER = web.AppKey("scorer", Scorer)

_CHECK_SYNC = "caches_synced"
_CHECK_TASKS = "background"
_SYNC_NEWS_SECONDS = 1.0
"""How often ``/readyz`` learns what keeps the first list from coming."""

log = structlog.get_logger(__name__)


class View(Protocol):
    """What the cluster is known by."""

    def snapshot(self) -> Snapshot | None:
        """Return the newest snapshot, ``None`` before the first."""

    def stats(self) -> ViewStats | None:
        """Return the view in figures, where it has any."""

    async def wait_until_synced(self) -> None:
        """Return once there is a snapshot."""

    async def run(self) -> None:
        """Follow the cluster until cancelled."""


class NoView:
    """The view without Kubernetes: nothing is known, so every answer is neutral."""

    def snapshot(self) -> Snapshot | None:
        """Return nothing."""
        return None

    def stats(self) -> ViewStats | None:
        """Return nothing."""
        return None

    async def wait_until_synced(self) -> None:
        """Return at once: there is nothing to wait for."""

    async def run(self) -> None:
        """Return at once."""


class KubernetesView:
    """The view by Kubernetes' API; access is opened while it runs."""

    def __init__(self, view: ClusterView, access: ApiAccess) -> None:
        self._view = view
        self._access = access
        self.snapshot = view.snapshot
        self.stats = view.stats
        self.wait_until_synced = view.wait_until_synced

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with self._access:
            await self._view.run()


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the handlers share."""

    settings: ExtenderSettings
    distance: DistanceConfig
    ledger: Ledger
    view: View
    scorer: Scorer
    metrics: ExtenderMetrics
    decisions: Decisions
    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


def build_app(settings: ExtenderSettings, *, view: View | None = None) -> web.Application:
    """Build the extender's application; the cluster is followed while it runs.

    ``view`` takes the place of Kubernetes, for tests and benchmarks. Raises
    ``CertificateError`` when the TLS files cannot be used.
    """
    registry = create_registry("extender")
    metrics = ExtenderMetrics(registry)
    certificates = _load_certificates(settings, metrics)
    parts = _make_parts(settings, view, metrics)
    registry.register(GaugeCollector(lambda: _read_gauges(parts)))
    readiness = Readiness(_CHECK_SYNC)
    registry.register(TaskFailureCollector("extender", readiness))
    app = web.Application()
    app[READINESS] = readiness
    app[SCORER] = parts.scorer
    app[TRANSPORT] = dataclasses.replace(
        transport(settings), tls=None if certificates is None else certificates.context
    )
    add_health_routes(app, readiness, registry=registry)
    _add_scheduler_routes(app, parts)
    _add_question_routes(app, parts)
    app.cleanup_ctx.append(_background(parts, readiness, certificates))
    return app


def _load_certificates(settings: ExtenderSettings, metrics: ExtenderMetrics) -> Certificates | None:
    if settings.tls is None:
        return None
    return Certificates(
        settings.tls.files,
        count=lambda outcome: metrics.certificate_loads.labels(outcome).inc(),
        count_handshake=lambda reason: metrics.failed_handshakes.labels(reason).inc(),
    )


def _make_parts(settings: ExtenderSettings, view: View | None, metrics: ExtenderMetrics) -> _Parts:
    distance = distance_config(settings.distance)
    ledger = Ledger(ttl_seconds=settings.ledger.ttl_seconds, max_pods=settings.ledger.max_pods)
    return _Parts(
        settings=settings,
        distance=distance,
        ledger=ledger,
        view=view or _open_view(settings, distance, ledger, metrics),
        scorer=Scorer(
            distance,
            headroom_config(settings.headroom),
            score_config(settings.score),
            ledger,
            record_nodes=settings.decisions.max_nodes,
        ),
        metrics=metrics,
        decisions=Decisions(
            max_count=settings.decisions.max_count, max_bytes=settings.decisions.max_bytes
        ),
    )


def _open_view(
    settings: ExtenderSettings,
    distance: DistanceConfig,
    ledger: Ledger,
    metrics: ExtenderMetrics,
) -> View:
    if not settings.kubernetes.enabled:
        log.warning("kubernetes_is_off", effect="every answer is neutral")
        return NoView()
    kubeconfig = settings.kubernetes.kubeconfig
    access = ApiAccess.automatic(
        "" if kubeconfig is None else str(kubeconfig), settings.kubernetes.context or ""
    )
    certificates = ClientCertificates(
        settings.agents.tls.files,
        count=lambda outcome: metrics.certificate_loads.labels(outcome).inc(),
    )
    config = _within_descriptors(view_config(settings, distance, certificates))
    return KubernetesView(ClusterView(access, config, ledger), access)


def _within_descriptors(config: ViewConfig) -> ViewConfig:
    descriptors = descriptor_limit()
    collect = within_descriptors(config.collect, descriptors)
    if collect != config.collect:
        log.warning(
            "few_descriptors",
            descriptors=descriptors,
            max_connections=collect.max_connections,
            effect="agents take turns where there are more of them",
            remedy="raise the hard limit on open files (RLIMIT_NOFILE)",
        )
    return dataclasses.replace(config, collect=collect)


def _add_scheduler_routes(app: web.Application, parts: _Parts) -> None:
    settings = parts.settings
    api = SchedulerApi(
        Answering(
            limits=body_limits(settings),
            rules=pod_rules(settings),
            memory_ratio=settings.headroom.memory_ratio,
            highest_score=settings.score.highest,
        ),
        scorer=parts.scorer,
        snapshot=parts.view.snapshot,
        metrics=parts.metrics,
        decisions=parts.decisions,
        now=parts.now,
        wall=parts.wall,
    )
    app.router.add_post(f"/v1/{FILTER}", api.filter)
    app.router.add_post(f"/v1/{PRIORITIZE}", api.prioritize)
    app.router.add_post(f"/v1/{PREEMPT}", api.preempt if settings.preempt else refuse_preempt)
    app.router.add_post("/v1/bind", refuse_bind)


def _add_question_routes(app: web.Application, parts: _Parts) -> None:
    levels = parts.distance.levels
    questions = QuestionApi(
        decisions=parts.decisions,
        snapshot=parts.view.snapshot,
        describe=lambda snapshot, now: describe_topology(snapshot, levels, now),
        now=parts.now,
    )
    token = parts.settings.admin_token
    app.router.add_get("/v1/explain", guard_with_token(questions.explain, token))
    app.router.add_get("/v1/topology", guard_with_token(questions.topology, token))


def _read_gauges(parts: _Parts) -> Gauges:
    stats = parts.view.stats()
    heard_at = None if stats is None else min(stats.nodes_heard_at, stats.pods_heard_at)
    is_known = heard_at is not None and heard_at > float("-inf")
    return Gauges(
        snapshot_age_seconds=parts.now() - heard_at if is_known and heard_at is not None else None,
        stats=stats,
        ledger_pods=len(parts.ledger),
        decisions=len(parts.decisions),
        decisions_bytes=parts.decisions.size_bytes,
    )


def _background(
    parts: _Parts, readiness: Readiness, certificates: Certificates | None
) -> Callable[[web.Application], AsyncIterator[None]]:
    async def run(_app: web.Application) -> AsyncIterator[None]:
        jobs = [
            Job("view", parts.view.run),
            Job("report_sync", lambda: _report_sync(parts.view, readiness)),
        ]
        tls = parts.settings.tls
        if certificates is not None and tls is not None:
            reload_seconds = tls.reload_seconds
            jobs.append(Job("certificates", lambda: certificates.watch(reload_seconds)))
        async with supervised(jobs, readiness, check=_CHECK_TASKS):
            yield

    return run


async def _report_sync(view: View, readiness: Readiness) -> None:
    """Become ready once all nodes and pods are known; before, answers would be neutral."""
    is_synced = False
    while not is_synced:
        stats = view.stats()
        problems = stats.problems if stats is not None else ()
        why = "; ".join(["nodes and pods are not all listed yet", *problems])
        readiness.set(_CHECK_SYNC, ok=False, why=why)
        with suppress(TimeoutError):
            async with asyncio.timeout(_SYNC_NEWS_SECONDS):
                await view.wait_until_synced()
                is_synced = True
    readiness.set(_CHECK_SYNC, ok=True)
    log.info("caches_synced")
