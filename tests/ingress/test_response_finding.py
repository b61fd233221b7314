"""Asking engines which of them has a response."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from nearkv.ingress.fleet import EngineView
from nearkv.ingress.response_finding import ResponseFinder
from nearkv.serving import running
from nearkv.settings import Address
from nearkv.state.model import EngineInfo, EngineState


class Engine:
    """Answers 200 to the ids it has, hangs where it is told to, notes who asked."""

    def __init__(self, *has, hangs=False):
        self.has = has
        self.hangs = hangs
        self.asked = []
        self.keys = []

    async def answer(self, request):
        self.asked.append(request.match_info["id"])
        self.keys.append(request.headers.get("Authorization"))
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(status=200 if request.match_info["id"] in self.has else 404)


@asynccontextmanager
async def serving(*engines):
    async with AsyncExitStack() as stack:
        views = []
        for number, engine in enumerate(engines):
            app = web.Application()
            app.router.add_get("/v1/responses/{id}", engine.answer)
            address = await stack.enter_async_context(running(app, Address("127.0.0.1", 0)))
            info = EngineInfo(
                id=f"e{number}", incarnation="i", url=address.url, state=EngineState.READY
            )
            views.append(EngineView(info, "agent"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield session, views


def finder(session, *, seconds=5.0, api_key=None, keeps_keys=False):
    return ResponseFinder(session, timeout_seconds=seconds, api_key=api_key, keeps_keys=keeps_keys)


@pytest.mark.parametrize("response_id", ["resp_1", "odd/../id?x=1#y%2f"])
async def test_the_engine_that_has_it_is_found(response_id):
    async with serving(Engine(), Engine(response_id), Engine()) as (session, views):
        assert await finder(session).find(response_id, views, {}) is views[1]


async def test_nobody_has_it():
    engines = Engine("a"), Engine()
    async with serving(*engines) as (session, views):
        assert await finder(session).find("b", views, {}) is None
    assert [engine.asked for engine in engines] == [["b"], ["b"]]


async def test_one_that_hangs_holds_up_nobody_and_the_deadline_ends_it():
    async with serving(Engine(hangs=True), Engine("a")) as (session, views):
        assert await finder(session).find("a", views, {}) is views[1]
        assert await finder(session, seconds=0.05).find("b", views, {}) is None


async def test_one_that_is_gone_is_no_failure():
    gone = EngineView(
        EngineInfo(id="g", incarnation="i", url="http://127.0.0.1:9", state=EngineState.READY), ""
    )
    async with serving(Engine("a")) as (session, views):
        assert await finder(session).find("a", [gone, *views], {}) is views[0]


async def test_a_server_is_asked_once_and_an_unreachable_one_never():
    engine, away = Engine(), Engine()
    async with serving(engine, away) as (session, views):
        lost = EngineInfo(
            id="x", incarnation="i", url=views[1].info.url, state=EngineState.UNREACHABLE
        )
        asked = [views[0], EngineView(views[0].info, "agent"), EngineView(lost, "agent")]
        assert await finder(session).find("a", asked, {}) is None
    assert (engine.asked, away.asked) == (["a"], [])


@pytest.mark.parametrize(
    ("own", "headers", "shown"),
    [
        (None, {}, None),
        (None, {"Authorization": "Bearer client"}, "Bearer client"),
        ("own", {"Authorization": "Bearer client"}, "Bearer own"),
    ],
)
async def test_the_key_shown(own, headers, shown):
    engine = Engine()
    async with serving(engine) as (session, views):
        await finder(session, api_key=own).find("a", views, headers)
    assert engine.keys == [shown]


@pytest.mark.parametrize("own", [None, "own"])
async def test_a_tenant_s_key_is_shown_to_no_engine(own):
    engine = Engine()
    async with serving(engine) as (session, views):
        one = finder(session, api_key=own, keeps_keys=True)
        await one.find("a", views, {"Authorization": "Bearer tenant"})
    assert engine.keys == [own and "Bearer own"]


async def test_made_up_ids_cannot_multiply_requests():
    engine = Engine(hangs=True)
    async with serving(engine) as (session, views):
        one = finder(session, seconds=0.5)
        found = await asyncio.gather(*(one.find(f"r{i}", views, {}) for i in range(50)))
        assert found == [None] * 50
        assert len(engine.asked) <= 8
        assert await one.find("x" * 257, views, {}) is None
