"""The agent's HTTP API over a real server: what a consumer of the state gets."""

import asyncio
import base64
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web

from nearkv.agent.api import STREAM_TYPE, StateApi
from nearkv.agent.engine_metrics import RankReading
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.node_state import NodeState
from nearkv.agent.settings import AgentSettings
from nearkv.agent.state_log import StateLog
from nearkv.block_keys import KeyNamespace, chain_keys, pack_keys, pack_tokens, root_key
from nearkv.health import Readiness
from nearkv.serving import running
from nearkv.settings import Address
from nearkv.state.codec import FrameReader
from nearkv.state.model import Cursor, Delta, Heartbeat, SnapshotBegin, SnapshotEnd

STORE = msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1, 2], 2]], 0])
KEY = chain_keys(root_key(KeyNamespace("tiny")), pack_tokens([1, 2]), 2)
DEADLINE_SECONDS = 30


class Agent:
    """One engine's tracker behind the API, without anything that watches."""

    def __init__(self, **state):
        self.settings = AgentSettings(node="n", state=state)
        log = StateLog(boot="b", node="n", version="1")
        now = asyncio.get_running_loop().time
        self.state = NodeState(log, boot="b", flush_seconds=0.0, now=now)
        self.readiness = Readiness()
        identity = EngineIdentity("e", "http://e", "n", "tiny", ("tiny",), key_model="tiny")
        self.tracker = EngineTracker(identity, log, secret=b"", table_limit_bytes=1 << 20)
        self.state.add(self.tracker)
        self.tracker.on_message(0, STORE, now())
        self.read(running=0)

    def read(self, running):
        reading = RankReading(requests_running=running)
        now = self.state.now()
        self.tracker.on_reading(reading, start_time_seconds=1.0, boot="b", now=now)
        self.state.changed()

    @asynccontextmanager
    async def client(self):
        app = web.Application()
        StateApi(self.state, self.readiness, self.settings, started_at=0.0).add_routes(app)
        timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
        async with (
            running(app, Address("127.0.0.1", 0)) as address,
            aiohttp.ClientSession(address.url, timeout=timeout) as session,
        ):
            yield session
            self.readiness.start_draining()  # ends streams that are still open


@pytest.fixture
async def agent():
    return Agent(heartbeat_seconds=0.05)


async def frames_of(response):
    reader = FrameReader()
    async for data in response.content.iter_any():
        for frame in reader.feed(data):
            yield frame


async def take_until(frames, wanted):
    """Return frames up to the first that is wanted; the session's deadline bounds the wait."""
    taken = []
    async for frame in frames:
        taken.append(frame)
        if wanted(frame):
            break
    return taken


def is_beat(frame):
    return isinstance(frame, Heartbeat)


async def test_a_new_consumer_gets_a_snapshot_and_the_ages_at_once(agent):
    async with agent.client() as client, client.get("/v1/state/stream") as response:
        assert response.content_type == STREAM_TYPE
        begin, blocks, end, beat = await take_until(frames_of(response), is_beat)
    assert isinstance(begin, SnapshotBegin)
    assert isinstance(end, SnapshotEnd)
    assert blocks.keys == pack_keys(KEY)
    assert beat.cursor == begin.cursor == end.cursor
    assert beat.ages_seconds["e"] >= 0


async def test_changes_follow_as_deltas(agent):
    async with agent.client() as client, client.get("/v1/state/stream") as response:
        frames = frames_of(response)
        (*_, beat) = await take_until(frames, is_beat)
        agent.read(running=5)
        (*_, delta) = await take_until(frames, lambda frame: isinstance(frame, Delta))
    assert delta.cursor.seq == beat.cursor.seq + 1
    assert delta.gauges[0].requests_running == 5


async def test_a_consumer_that_comes_back_gets_only_what_it_missed(agent):
    async with agent.client() as client:
        async with client.get("/v1/state/stream") as response:
            (*_, beat) = await take_until(frames_of(response), is_beat)
        agent.read(running=5)
        known = {"after": str(beat.cursor)}
        async with client.get("/v1/state/stream", params=known) as response:
            first, *_ = await take_until(frames_of(response), is_beat)
    assert isinstance(first, Delta)


@pytest.mark.parametrize("cursor", [Cursor("old", 0, 1), Cursor("b", 0, 99)], ids=str)
async def test_an_unknown_cursor_gets_a_snapshot(agent, cursor):
    known = {"after": str(cursor)}
    async with agent.client() as client, client.get("/v1/state/stream", params=known) as response:
        first, *_ = await take_until(frames_of(response), is_beat)
    assert isinstance(first, SnapshotBegin)


async def test_heartbeats_come_through_a_stream_that_is_never_quiet(agent):
    stop = asyncio.Event()

    async def change_for_ever():
        count = 0
        while not stop.is_set():
            agent.read(running=(count := count + 1))
            await agent.state.wait_for_news(1.0)

    async with agent.client() as client, client.get("/v1/state/stream") as response:
        frames = frames_of(response)
        await take_until(frames, is_beat)
        changing = asyncio.create_task(change_for_ever())
        taken = [await take_until(frames, is_beat) for _ in range(3)]
        stop.set()
        await changing
    seqs = [frame.cursor.seq for part in taken for frame in part if isinstance(frame, Delta)]
    assert len(seqs) > 3
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    assert [part[-1].cursor.seq for part in taken[1:]] == [
        part[-2].cursor.seq for part in taken[1:]
    ]


@pytest.mark.parametrize("after", ["x", "b:0", "b:0:x"])
async def test_a_bad_cursor_is_the_clients_mistake(agent, after):
    known = {"after": after}
    async with agent.client() as client, client.get("/v1/state/stream", params=known) as response:
        assert response.status == 400
        assert "cursor" in await response.text()


async def test_consumers_over_the_limit_are_told_to_come_back():
    agent = Agent(max_consumers=1)
    async with agent.client() as client, client.get("/v1/state/stream") as first:
        assert first.status == 200
        async with client.get("/v1/state/stream") as second:
            assert (second.status, second.headers["Retry-After"]) == (503, "5")


async def test_the_snapshot_alone_is_the_streams_first_frames(agent):
    async with agent.client() as client, client.get("/v1/state") as response:
        begin, blocks, end = FrameReader().feed(await response.read())
    assert (type(begin), type(end)) == (SnapshotBegin, SnapshotEnd)
    assert (blocks.engine, blocks.tier, blocks.keys) == ("e", "GPU", pack_keys(KEY))


@pytest.mark.parametrize("keys", [False, True], ids=["counted", "with-keys"])
async def test_people_get_json(agent, keys):
    query = {"keys": "true"} if keys else {}
    headers = {"Accept": "application/json"}
    async with (
        agent.client() as client,
        client.get("/v1/state", params=query, headers=headers) as r,
    ):
        body = await r.json()
    assert body["blocks"] == {"e": {"GPU": 1}}
    assert body["engines"][0]["id"] == "e"
    if keys:
        assert base64.b64decode(body["keys"]["e"]["GPU"]) == pack_keys(KEY)
    else:
        assert "keys" not in body


async def test_draining_ends_streams(agent):
    async with agent.client() as client, client.get("/v1/state/stream") as response:
        await take_until(frames_of(response), is_beat)
        agent.readiness.start_draining()
        async for _ in response.content.iter_any():
            pass
        assert agent.state.consumers == 0
