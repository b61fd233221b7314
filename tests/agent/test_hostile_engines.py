"""An engine that answers nonsense hurts nobody but itself, and not for good.

Beside it stands an engine that does well: its state must go on reaching consumers.
"""

import asyncio
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from nearkv.agent.app import NODE_STATE, build_app
from nearkv.agent.discovering import EngineSpec
from nearkv.agent.node_state import NodeState
from nearkv.agent.probing import EngineProbe
from nearkv.agent.settings import AgentSettings
from nearkv.agent.state_log import StateLog
from nearkv.agent.subscribing import open_context
from nearkv.agent.watching import EngineWatch, WatchLimits
from nearkv.serving import running
from nearkv.state.codec import FrameReader
from nearkv.state.model import SnapshotBegin
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.integration.stack import ANY_PORT, FAST_AGENT, eventually

DEEP = "[" * 100_000 + "]" * 100_000
MODELS = '{"data": [{"id": "tiny"}]}'
SOUND = {
    "/v1/models": MODELS,
    "/version": '{"version": "0.32.0"}',
    "/kv_event_sources": "{}",
    "/metrics": "vllm:num_requests_running 1\n",
}
SOURCE = '{"endpoint": "tcp://*:1"}'
INFO = 'vllm:cache_config_info{kv_cache_memory_bytes="1000000000000"} 1\n'
NONSENSE = {
    "deep-models": ("/v1/models", f'{{"data": [], "more": {DEEP}}}'),
    "endless-names": ("/v1/models", f'{{"data": [{{"id": "{"n" * (17 << 20)}"}}]}}'),
    "long-names": ("/v1/models", f'{{"data": [{{"id": "{"n" * (4 << 20)}"}}]}}'),
    "surrogate": ("/v1/models", '{"data": [{"id": "\\ud800"}]}'),
    "long-version": ("/version", f'{{"version": "{"9" * (2 << 20)}"}}'),
    "deep-version": ("/version", f'{{"version": "1", "more": {DEEP}}}'),
    "rank-of-5000-digits": ("/kv_event_sources", f'{{"{"9" * 5000}": {SOURCE}}}'),
    "rank-beyond-the-wire": ("/kv_event_sources", f'{{"{10**30}": {SOURCE}}}'),
    "many-ranks": (
        "/kv_event_sources",
        "{" + ",".join(f'"{rank}": {SOURCE}' for rank in range(3000)) + "}",
    ),
    "no-endpoint": ("/kv_event_sources", '{"0": {"endpoint": "pgm://x"}}'),
    "infinite-use": ("/metrics", f"{INFO}vllm:kv_cache_usage_perc 1e308\n"),
    "start-beyond-time": ("/metrics", "process_start_time_seconds 1e306\n"),
    "label-without-end": ("/metrics", f"vllm:num_requests_running{{{'a' * 300_000}}} 1\n"),
    "huge-number": ("/metrics", f"vllm:num_requests_running {'9' * 400}\n"),
    "below-zero": ("/metrics", "vllm:num_requests_waiting -7\n"),
    "no-block-size": ("/metrics", 'vllm:cache_config_info{block_size="0"} 1\n'),
}


class Hostile:
    """An engine that answers whatever it is given by path."""

    def __init__(self):
        self.answers = dict(SOUND)
        self.asked = []
        self.cookies = set()

    async def answer(self, request):
        self.asked.append(request.path)
        self.cookies |= set(request.cookies)
        answer = self.answers.get(request.path)
        if isinstance(answer, Exception):
            raise answer
        response = web.Response(text=answer or "", status=200 if answer else 404)
        response.set_cookie(f"n{len(self.asked)}", "x")
        return response

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        async with running(app, ANY_PORT) as address:
            yield address.url


@asynccontextmanager
async def agent_over(*urls):
    engines = [{"id": name, "url": url} for name, url in zip("abc", urls, strict=False)]
    app = build_app(AgentSettings.model_validate({**FAST_AGENT, "engines": engines}))
    async with running(app, ANY_PORT) as address:
        yield app, address.url


async def snapshot_of(url):
    """Return the head of a snapshot, read as a consumer of the state does."""
    async with aiohttp.ClientSession() as session, session.get(url + "/v1/state") as answer:
        frames = list(FrameReader().feed(await answer.read()))
    assert isinstance(frames[0], SnapshotBegin)
    return {engine.id: engine for engine in frames[0].engines}, {g.id: g for g in frames[0].gauges}


@pytest.mark.parametrize(("path", "answer"), NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_hurts_nobody_else_and_heals(path, answer):
    hostile = Hostile()
    hostile.answers[path] = answer
    good = EngineDouble(EngineDoubleConfig(num_blocks=64))
    async with good, hostile.serving() as url, agent_over(good.url, url) as (app, agent):
        state = app[NODE_STATE]
        await eventually(
            lambda: max(map(hostile.asked.count, (path, "/metrics"))) > 1, what="it was asked"
        )
        await eventually(
            lambda: "a" in state.trackers and state.trackers["a"].info.events == "live",
            what="the other one is followed",
        )
        engines, gauges = await snapshot_of(agent)
        assert engines["a"].state == "ready"
        assert all((gauge.requests_waiting or 0) >= 0 for gauge in gauges.values())
        assert all(engine.block_size != 0 for engine in engines.values())
        async with aiohttp.ClientSession() as session:
            for page in ("/v1/status", "/v1/summary", "/metrics", "/readyz"):
                async with session.get(agent + page) as response:
                    assert response.status == 200, page
        assert state.watch_failures == 0
        hostile.answers = dict(SOUND)
        await eventually(
            lambda: "b" in state.trackers and state.trackers["b"].info.state == "ready",
            what="it heals",
        )


async def test_the_agent_is_not_sent_elsewhere_by_an_engine():
    hostile, elsewhere = Hostile(), Hostile()
    async with elsewhere.serving() as target, hostile.serving() as url:
        for path in SOUND:
            hostile.answers[path] = web.HTTPFound(target + path)
        async with agent_over(url) as (app, _):
            await eventually(lambda: hostile.asked, what="it was asked")
            await eventually(lambda: app[NODE_STATE].problems, what="its answer was read")
            assert "302" in app[NODE_STATE].problems["a"]
            assert elsewhere.asked == []


class FailingProbe(EngineProbe):
    """A probe with a defect, which shows as often as it is told."""

    failures = 1

    async def version(self):
        if self.failures:
            self.failures -= 1
            raise ZeroDivisionError("a defect")
        return await super().version()


async def test_cookies_of_an_engine_are_not_kept():
    hostile = Hostile()
    async with hostile.serving() as url, agent_over(url.replace("127.0.0.1", "localhost")):
        await eventually(lambda: len(hostile.asked) > 6, what="it was asked")
        assert hostile.cookies == set()


async def test_an_engine_whose_watch_fails_is_watched_anew():
    hostile = Hostile()
    state = NodeState(
        StateLog(boot="b", node="n", version="1"), boot="b", flush_seconds=0.0, now=time.monotonic
    )
    context = open_context()
    async with hostile.serving() as url, aiohttp.ClientSession() as session:
        watch = EngineWatch(
            EngineSpec("a", url),
            FailingProbe(url, session, timeout_seconds=5),
            state,
            node="n",
            context=context,
            limits=WatchLimits(
                scrape_interval_seconds=0.05, table_limit_bytes=1 << 20, retry_seconds=0.2
            ),
        )
        task = asyncio.create_task(watch.run())
        await watch.first_look()
        assert "ZeroDivisionError" in state.problems["a"]
        await eventually(lambda: "a" in state.trackers, what="it is watched anew")
        assert (state.watch_failures, state.problems) == (1, {})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    context.destroy(linger=0)
