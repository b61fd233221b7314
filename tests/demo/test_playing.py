from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from nearkv.demo.playing import Player
from nearkv.demo.report import shortcomings
from nearkv.demo.scenario import Topic
from tests.doubles.engine import EngineDouble, EngineDoubleConfig

TOPIC = Topic("handbook", "All work and no play. " * 200, ("Who?", "Why?", "When?"), rounds=10)


class Notebook:
    def __init__(self):
        self.lines = []

    def asking(self, document, turn):
        self.lines.append(("asking", document, turn))

    def answered(self, document, turn):
        self.lines.append(("answered", document, turn.turn))


@asynccontextmanager
async def relay(session, engine_urls):
    """A stand-in for the ingress that takes the engines in turn."""
    calls = iter(range(1000))

    async def pass_on(request):
        number = next(calls) % len(engine_urls)
        url = f"{engine_urls[number]}/v1/chat/completions"
        async with session.post(url, data=await request.read(), headers=request.headers) as reply:
            headers = {"x-nearkv-engine": f"engine-{number}", "x-nearkv-reason": "in-turn"}
            return web.Response(body=await reply.read(), status=reply.status, headers=headers)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", pass_on)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def play(engines, *, routed_to):
    notebook = Notebook()
    urls = tuple(engine.url for engine in engines)
    async with (
        aiohttp.ClientSession() as session,
        relay(session, [urls[number] for number in routed_to]) as url,
    ):
        player = Player(
            session=session,
            ingress_url=url,
            engine_urls=urls,
            model_name="tiny",
            policy="in-turn",
            audience=notebook,
        )
        return await player.play([TOPIC]), notebook


@pytest.fixture
async def engines():
    async with (
        EngineDouble(EngineDoubleConfig()) as first,
        EngineDouble(EngineDoubleConfig()) as second,
    ):
        yield first, second


async def test_counters_of_the_engines_agree_with_the_answers(engines):
    report, notebook = await play(engines, routed_to=[0])
    main = report.main
    assert main.counted.total == main.without_reuse_tokens
    assert main.counted.cached == sum(turn.cached_tokens for turn in main.turns)
    assert notebook.lines[:2] == [("asking", "handbook", 1), ("answered", "handbook", 1)]
    assert len(main.turns) == TOPIC.rounds


async def test_follow_ups_on_one_engine_meet_the_bars(engines):
    report, _ = await play(engines, routed_to=[0])
    assert shortcomings(report) == []


async def test_follow_ups_in_turn_do_not(engines):
    report, _ = await play(engines, routed_to=[0, 1])
    reasons = shortcomings(report)
    assert any("expected" in reason for reason in reasons)
    assert len(report.main.strays) == TOPIC.rounds // 2
