"""Following many agents: one that troubles us does not trouble the others."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from nearkv.ingress import followers as module
from nearkv.ingress.fleet import Fleet
from nearkv.ingress.followers import Followers
from nearkv.ingress.following import FollowLimits
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.serving import running
from nearkv.settings import Address
from nearkv.state.codec import encode_frame
from nearkv.state.model import Cursor, Heartbeat, SnapshotBegin, SnapshotEnd
from tests.core.waiting import eventually

CURSOR = Cursor("boot", 0, 0)


@pytest.fixture(autouse=True)
def _frequent_sweeps(monkeypatch):
    monkeypatch.setattr(module, "_SWEEP_SECONDS", 0.1)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@asynccontextmanager
async def agent(node):
    """An agent without engines, that sends a snapshot and then heartbeats."""

    async def stream(request):
        response = web.StreamResponse()
        await response.prepare(request)
        begin = SnapshotBegin(cursor=CURSOR, node=node, version="1", engines=(), gauges=())
        for frame in (begin, SnapshotEnd(cursor=CURSOR)):
            await response.write(encode_frame(frame))
        while True:
            await asyncio.sleep(0.01)
            await response.write(encode_frame(Heartbeat(cursor=CURSOR, ages_seconds={})))

    app = web.Application()
    app.router.add_get("/v1/state/stream", stream)
    async with running(app, Address("127.0.0.1", 0)) as address:
        yield address.url


class At:
    """Followers at work."""

    def __init__(self, fleet, session, **more):
        self.fleet = fleet
        self.clock = Clock()
        self.errors = Counter()
        self.followers = Followers(
            fleet,
            session,
            now=self.clock,
            count_error=lambda reason: self.errors.update([reason]),
            limits=FollowLimits(),
            **{"keep_seconds": 60.0, **more},
        )

    async def synced(self, url):
        await eventually(
            lambda: url in self.fleet.agents and self.fleet.agents[url].connected,
            what=f"{url} is followed",
        )


@asynccontextmanager
async def at_work(fleet=None, **more):
    async with aiohttp.ClientSession() as session:
        it = At(fleet or Fleet(PrefixIndex()), session, **more)
        task = asyncio.create_task(it.followers.run())
        try:
            yield it
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_replaced_agent_is_forgotten_when_the_next_one_of_its_node_is_heard():
    async with at_work() as it, agent("n1") as old, agent("n2") as other, agent("n1") as new:
        it.followers.follow([old, other])
        await it.synced(old)
        await it.synced(other)
        it.followers.follow([other])
        await eventually(lambda: not it.fleet.agents[old].listed, what="it is left")
        assert it.fleet.agents[old].error == "not listed any more"
        it.followers.follow([other, new])
        await it.synced(new)
        await eventually(lambda: old not in it.fleet.agents, what="it is forgotten")
        assert it.fleet.agents.keys() == {other, new}


async def test_an_agent_without_a_successor_is_forgotten_after_a_while():
    async with at_work() as it, agent("n1") as url:
        it.followers.follow([url])
        await it.synced(url)
        it.followers.follow([])
        await eventually(lambda: not it.fleet.agents[url].listed, what="it is left")
        it.clock.now = 59.0
        await asyncio.sleep(2 * module._SWEEP_SECONDS)
        assert url in it.fleet.agents
        it.clock.now = 60.0
        await eventually(lambda: url not in it.fleet.agents, what="it is forgotten")


async def test_an_agent_that_is_listed_again_goes_on_from_where_it_was():
    async with at_work() as it, agent("n1") as url:
        it.followers.follow([url])
        await it.synced(url)
        it.followers.follow([])
        await eventually(lambda: not it.fleet.agents[url].listed, what="it is left")
        it.followers.follow([url])
        await it.synced(url)
        it.clock.now = 1000.0
        await asyncio.sleep(2 * module._SWEEP_SECONDS)
        assert it.fleet.agents[url].connected


class BrokenFleet(Fleet):
    """One that cannot take what a certain agent says."""

    broken = ""

    def apply(self, url, frame, now):
        if url == self.broken:
            raise RuntimeError("a defect")
        super().apply(url, frame, now)


async def test_a_defect_with_one_agent_ends_none_of_the_others(monkeypatch):
    monkeypatch.setattr(module, "_AFTER_DEFECT_SECONDS", 0.01)
    fleet = BrokenFleet(PrefixIndex())
    async with at_work(fleet) as it, agent("n1") as good, agent("n2") as bad:
        fleet.broken = bad
        it.followers.follow([good, bad])
        await it.synced(good)
        await eventually(lambda: it.errors["defect"] > 1, what="it is counted and tried again")
        fleet.broken = ""
        await it.synced(bad)


@pytest.mark.parametrize("urls", [[], ["http://127.0.0.1:9"]])
async def test_ending_leaves_no_task_behind(urls):
    async with at_work() as it:
        it.followers.follow(urls)
        await eventually(lambda: len(it.followers._tasks) == len(urls), what="they are followed")
    assert it.followers._tasks == {}
