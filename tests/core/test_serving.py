"""Serving: real addresses, the order of shutdown, and bearer tokens."""

import asyncio
import contextlib
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest
from aiohttp import web
from pydantic import SecretStr

from nearkv.errors import ListenError
from nearkv.health import Readiness, add_health_routes
from nearkv.serving import StopRequest, require_bearer_token, run, running, serve
from nearkv.settings import Address

LOOPBACK = Address("127.0.0.1", 0)
DEADLINE_SECONDS = 30

PROGRAM = """
from aiohttp import web
from nearkv.health import Readiness, add_health_routes
from nearkv.logs import configure_logging
from nearkv.serving import run, serve
from nearkv.settings import Address

async def main():
    app, readiness = web.Application(), Readiness()
    add_health_routes(app, readiness)
    await serve(app, address=Address("127.0.0.1", 0), readiness=readiness, drain_seconds=5)

configure_logging(component="demo")
run(main())
"""


async def answer(_request):
    return web.Response()


class Held:
    """An application with a request that lasts until it is let go."""

    def __init__(self):
        self.begun = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.app = web.Application()
        self.app.router.add_get("/held", self.handle)

    async def handle(self, _request):
        self.begun.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return web.Response(text="done")


class Drain:
    """One server with one request in flight, told to stop."""

    def __init__(self):
        self.held = Held()
        self.readiness = Readiness()
        self.stop = StopRequest()
        self.listening = asyncio.get_running_loop().create_future()
        add_health_routes(self.held.app, self.readiness)

    @contextlib.asynccontextmanager
    async def started(self, *, drain_seconds):
        server = asyncio.create_task(
            serve(
                self.held.app,
                address=LOOPBACK,
                readiness=self.readiness,
                drain_seconds=drain_seconds,
                stop=self.stop,
                on_listening=self.listening.set_result,
            )
        )
        async with asyncio.timeout(DEADLINE_SECONDS), aiohttp.ClientSession() as client:
            request = asyncio.create_task(self.get(client, "/held"))
            await self.held.begun.wait()
            self.stop.request()
            await self.readiness.wait_until_draining()
            yield server, client, request
            await asyncio.wait([request])
            await server

    async def get(self, client, path):
        address = await self.listening
        async with client.get(address.url + path) as response:
            return response.status, await response.text()


@pytest.fixture
async def drain():
    return Drain()


async def test_port_zero_becomes_a_real_port():
    async with running(web.Application(), LOOPBACK) as address, aiohttp.ClientSession() as client:
        assert address.port != 0
        async with client.get(address.url) as response:
            assert response.status == 404


async def test_an_address_in_use_is_named():
    async with running(web.Application(), LOOPBACK) as address:
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{address.port}: "):
            async with running(web.Application(), address):
                pass


async def test_a_client_that_leaves_cancels_its_handler():
    held = Held()
    async with running(held.app, LOOPBACK) as address, aiohttp.ClientSession() as client:
        request = asyncio.create_task(client.get(f"{address.url}/held"))
        await held.begun.wait()
        request.cancel()
        await asyncio.wait_for(held.cancelled.wait(), DEADLINE_SECONDS)


async def test_a_drain_answers_what_is_in_flight_and_then_stops(drain):
    async with drain.started(drain_seconds=DEADLINE_SECONDS) as (server, client, request):
        assert await drain.get(client, "/readyz") == (503, "failed: serving (draining)")
        assert await drain.get(client, "/livez") == (200, "ok")
        assert not server.done()
        drain.held.release.set()
        assert await request == (200, "done")


async def test_a_drain_has_an_end(drain):
    async with drain.started(drain_seconds=0.05) as (server, _client, request):
        await server
        assert drain.held.cancelled.is_set()
        with pytest.raises(aiohttp.ClientError):
            await request


async def test_a_second_request_to_stop_ends_the_drain(drain):
    async with drain.started(drain_seconds=10 * DEADLINE_SECONDS) as (server, _client, request):
        drain.stop.request()
        await server
        assert drain.held.cancelled.is_set()
        with pytest.raises(aiohttp.ClientError):
            await request


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_program_cleanly(number):
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(2 * DEADLINE_SECONDS):
            listening = json.loads(await program.stderr.readline())
            assert listening["event"] == "listening"
            assert not listening["address"].endswith(":0")
            program.send_signal(number)
            rest = (await program.stderr.read()).splitlines()
            assert await program.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            program.kill()
        await program.wait()
    assert [json.loads(line)["event"] for line in rest] == ["draining", "stopping", "stopped"]


def test_run_returns_what_the_program_returns():
    async def main():
        return type(asyncio.get_running_loop()).__module__

    # In a thread of its own: asyncio.Runner would drop the loop that pytest-asyncio keeps.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, main()).result(DEADLINE_SECONDS).startswith("uvloop")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        pytest.param("/data", {"Authorization": "Bearer s3cret"}, 200, id="right"),
        pytest.param("/data", {"Authorization": "bearer s3cret"}, 200, id="scheme-in-any-case"),
        pytest.param("/data", {"Authorization": "Bearer wrong"}, 401, id="wrong"),
        pytest.param("/data", {"Authorization": "Basic s3cret"}, 401, id="other-scheme"),
        pytest.param("/data", {"Authorization": "Bearer"}, 401, id="no-token"),
        pytest.param("/data", {"Authorization": "Bearer s\u00e9cret"}, 401, id="not-ascii"),
        pytest.param("/data", {}, 401, id="none"),
        pytest.param("/livez", {}, 200, id="open-path"),
        pytest.param("//livez", {}, 401, id="almost-open-path"),
    ],
)
async def test_a_token_is_required(path, headers, status):
    app = web.Application(middlewares=[require_bearer_token(SecretStr("s3cret"))])
    app.router.add_get("/data", answer)
    add_health_routes(app, Readiness())
    async with (
        running(app, LOOPBACK) as address,
        aiohttp.ClientSession() as client,
        client.get(address.url + path, headers=headers) as response,
    ):
        assert response.status == status
        assert ("WWW-Authenticate" in response.headers) is (status == 401)


async def test_without_a_token_everything_passes():
    app = web.Application(middlewares=[require_bearer_token(None)])
    app.router.add_get("/data", answer)
    async with (
        running(app, LOOPBACK) as address,
        aiohttp.ClientSession() as client,
        client.get(f"{address.url}/data") as response,
    ):
        assert response.status == 200


def test_an_empty_token_is_refused():
    with pytest.raises(ValueError, match="the bearer token is empty"):
        require_bearer_token(SecretStr(""))
