"""Health for Kubernetes: ``/livez``, ``/readyz``, ``/healthz`` and ``/metrics``.

A probe reads cached facts and does no I/O, so it answers while the process is busy.
Liveness means "the event loop runs, and no background task was given up" and stays true while
draining: restarting a process because it is shutting down, or because a peer is away, helps
nobody. Readiness is the conjunction of named checks that the component reports, and is false while
draining.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from aiohttp import web
from prometheus_client import CollectorRegistry, Info
from prometheus_client.exposition import choose_encoder

from nearkv._version import __version__

HEALTH_PATHS = frozenset({"/livez", "/readyz", "/healthz"})
"""Paths that stay open when the others need a token: the kubelet has none."""


@dataclass(frozen=True, slots=True)
class Check:
    """The last report of one check; ``why`` says what is wrong, or adds detail."""

    ok: bool
    why: str = ""


class Readiness:
    """Named checks that together decide whether a process should get traffic.

    ``required`` names checks that count as failed until their first report, so that a
    process is not ready before it has begun. Use it from the event loop's thread only.
    """

    def __init__(self, *required: str) -> None:
        self._checks = {name: Check(ok=False, why="not reported yet") for name in required}
        self._draining = asyncio.Event()
        self._given_up = ""
        self.task_failures: Counter[str] = Counter()
        """How often background tasks failed, by name (:mod:`nearkv.supervising`)."""

    def set(self, name: str, ok: bool, why: str = "") -> None:  # noqa: FBT001 - reads as set("index", True)
        """Report a check; a name that is new becomes part of the conjunction."""
        self._checks[name] = Check(ok, why)

    @property
    def checks(self) -> Mapping[str, Check]:
        """All checks by name, read-only, in the order of their first mention."""
        return MappingProxyType(self._checks)

    @property
    def given_up(self) -> str:
        """Why the process wants to be restarted; empty while it does not."""
        return self._given_up

    def give_up(self, why: str) -> None:
        """Have liveness fail for good: what is broken does not get well in this process."""
        self._given_up = self._given_up or why

    @property
    def draining(self) -> bool:
        """True from ``start_draining`` on."""
        return self._draining.is_set()

    def start_draining(self) -> None:
        """Turn readiness off for good; there is no way back."""
        self._draining.set()

    async def wait_until_draining(self) -> None:
        """Return once draining starts. Endless streams end themselves on this."""
        await self._draining.wait()

    @property
    def is_ready(self) -> bool:
        """True when no check fails, the process is not draining and was not given up."""
        if self.draining or self._given_up:
            return False
        return all(check.ok for check in self._checks.values())


def add_health_routes(
    app: web.Application, readiness: Readiness, *, registry: CollectorRegistry | None = None
) -> None:
    """Add the three probes, and ``/metrics`` when a registry is given.

    ``/healthz`` is an alias of ``/livez``. ``?verbose`` lists the checks as text.
    """

    async def livez(request: web.Request) -> web.Response:
        checks = {"event_loop": Check(ok=True)}
        if readiness.given_up:
            checks["background_tasks"] = Check(ok=False, why=readiness.given_up)
        return _answer(request, checks, name="livez")

    async def readyz(request: web.Request) -> web.Response:
        why_not = "draining" if readiness.draining else readiness.given_up
        draining = Check(not why_not, why_not)
        return _answer(request, {"serving": draining, **readiness.checks}, name="readyz")

    app.router.add_get("/livez", livez)
    app.router.add_get("/healthz", livez)
    app.router.add_get("/readyz", readyz)
    if registry is not None:
        add_metrics_route(app, registry)


def add_metrics_route(app: web.Application, registry: CollectorRegistry) -> None:
    """Add ``/metrics`` in the Prometheus or OpenMetrics form that the scraper asks for."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    app.router.add_get("/metrics", metrics)


def create_registry(component: str) -> CollectorRegistry:
    """Return a registry of its own that holds ``nearkv_build_info{component,version}``."""
    registry = CollectorRegistry()
    build = Info("nearkv_build", "What runs here; the value is always 1.", registry=registry)
    build.info({"component": component, "version": __version__})
    return registry


def _answer(request: web.Request, checks: Mapping[str, Check], *, name: str) -> web.Response:
    failed = [label for label, check in checks.items() if not check.ok]
    if "verbose" in request.query:
        verdict = f"{name} check {'failed' if failed else 'passed'}"
        text = "\n".join([*_verbose(checks), verdict, ""])
    elif failed:
        text = "failed: " + "; ".join(_reason(label, checks[label]) for label in failed)
    else:
        text = "ok"
    return web.Response(
        text=text, status=503 if failed else 200, headers={"Cache-Control": "no-store"}
    )


def _verbose(checks: Mapping[str, Check]) -> Iterable[str]:
    for label, check in checks.items():
        sign, word = ("+", "ok") if check.ok else ("-", "failed")
        yield f"[{sign}]{label} {word}{f': {check.why}' if check.why else ''}"


def _reason(label: str, check: Check) -> str:
    return f"{label} ({check.why})" if check.why else label
