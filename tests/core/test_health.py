"""Health probes and metrics over a real server."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from nearkv._version import __version__
from nearkv.health import Readiness, add_health_routes, create_registry
from nearkv.serving import running
from nearkv.settings import Address


@pytest.fixture
def readiness():
    return Readiness("agents")


@pytest.fixture
async def fetch(readiness):
    app = web.Application()
    add_health_routes(app, readiness, registry=create_registry("ingress"))

    async with running(app, Address("127.0.0.1", 0)) as address, aiohttp.ClientSession() as client:

        async def get(path, **headers):
            async with client.get(address.url + path, headers=headers) as response:
                return response.status, await response.text()

        yield get


def test_a_required_check_fails_until_it_is_reported(readiness):
    assert not readiness.is_ready
    readiness.set("agents", ok=True)
    assert readiness.is_ready


def test_readiness_needs_every_check(readiness):
    readiness.set("agents", ok=True)
    readiness.set("index", ok=False, why="not synced")
    assert not readiness.is_ready
    assert readiness.checks["index"].why == "not synced"


async def test_draining_ends_readiness_and_tells_who_waits(readiness):
    readiness.set("agents", ok=True)
    waiting = asyncio.create_task(readiness.wait_until_draining())
    readiness.start_draining()
    await asyncio.wait_for(waiting, timeout=30)
    assert readiness.draining
    assert not readiness.is_ready


@pytest.mark.parametrize("path", ["/livez", "/healthz"])
async def test_liveness_is_true_whatever_readiness_says(fetch, readiness, path):
    readiness.start_draining()
    assert await fetch(path) == (200, "ok")


async def test_readyz_says_why_it_is_not_ready(fetch, readiness):
    assert await fetch("/readyz") == (503, "failed: agents (not reported yet)")
    readiness.set("agents", ok=True)
    assert await fetch("/readyz") == (200, "ok")
    readiness.start_draining()
    assert await fetch("/readyz") == (503, "failed: serving (draining)")


async def test_verbose_lists_the_checks(fetch, readiness):
    readiness.set("agents", ok=True, why="2 connected")
    readiness.set("index", ok=False)
    status, text = await fetch("/readyz?verbose")
    assert status == 503
    assert text.splitlines() == [
        "[+]serving ok",
        "[+]agents ok: 2 connected",
        "[-]index failed",
        "readyz check failed",
    ]


@pytest.mark.parametrize(
    ("accept", "end"),
    [
        pytest.param("", "", id="prometheus"),
        pytest.param("application/openmetrics-text; version=1.0.0", "# EOF\n", id="openmetrics"),
    ],
)
async def test_metrics_say_what_runs_here(fetch, accept, end):
    status, text = await fetch("/metrics", Accept=accept)
    assert status == 200
    assert f'nearkv_build_info{{component="ingress",version="{__version__}"}} 1.0' in text
    assert text.endswith(end)


def test_registries_are_apart():
    assert create_registry("agent") is not create_registry("agent")
