"""The agent between engines and consumers that misbehave: nothing lost, nothing held for ever."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from nearkv.agent.api import StateApi
from nearkv.agent.app import NODE_STATE
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.event_sources import EventSource
from nearkv.agent.node_state import NodeState
from nearkv.agent.settings import AgentSettings
from nearkv.agent.state_log import StateLog
from nearkv.agent.subscribing import (
    EventSubscription,
    Notifications,
    SubscriptionLimits,
)
from nearkv.block_keys import KeyNamespace, chain_keys, pack_tokens, root_key
from nearkv.health import Readiness
from nearkv.ingress.fleet import Fleet
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.serving import running
from nearkv.state.codec import FrameReader, encode_frame
from nearkv.state.model import (
    Blocks,
    Cursor,
    Delta,
    EngineInfo,
    EventsState,
    SnapshotBegin,
    SnapshotEnd,
)
from tests.doubles.engine import EngineDouble, EngineDoubleConfig, Faults
from tests.doubles.engine.events import BlockStored
from tests.integration.raw_http import deaf_client, request, watched
from tests.integration.stack import (
    ANY_PORT,
    FAST_AGENT,
    eventually,
    running_agent,
    running_ingress,
    small_fleet,
)

DOCUMENT = "A long winter closed the pass above the village for weeks. " * 30
FOLLOW = request("GET /v1/state/stream")


def double(**config):
    return EngineDouble(EngineDoubleConfig(**{"num_blocks": 600, "max_model_len": 8192, **config}))


def node_state(flush_seconds=0.0):
    log = StateLog(boot="b", node="n", version="1", ring_limit_bytes=8 << 20)
    now = asyncio.get_running_loop().time
    return NodeState(log, boot="b", flush_seconds=flush_seconds, now=now)


def tracker_in(state):
    identity = EngineIdentity("e", "http://e", "n", "tiny", ("tiny",), key_model="tiny")
    tracker = EngineTracker(identity, state.log, secret=b"", table_limit_bytes=1 << 28)
    state.add(tracker)
    return tracker


# -- Consumers ---------------------------------------------------------------------------


@asynccontextmanager
async def serving_state(state, **api):
    app = web.Application()
    StateApi(state, Readiness(), AgentSettings(node="n"), started_at=0.0, **api).add_routes(app)
    async with watched(app) as (url, server):
        yield url, server


async def test_a_consumer_that_takes_nothing_is_cut_off():
    state = node_state()
    tracker_in(state)
    async with serving_state(state, write_seconds=0.2) as (url, server), deaf_client(url, FOLLOW):
        await eventually(lambda: state.consumers == 1, what="it follows")
        first = 0
        while state.consumers:
            state.log.blocks_of("e").add("GPU", range(first, first + 50_000))
            first += 50_000
            state.changed()
            await asyncio.sleep(0)
            assert first < 50_000_000, "never given up"
        await eventually(lambda: not server.connections, what="it is cut off")


async def follow(url, fleet, session, until, cursor=None):
    """Follow a stream into a fleet until a condition holds; return the kinds of frames seen."""
    fleet.add_agent(url)
    kinds = []
    reader = FrameReader()
    query = {"after": str(cursor)} if cursor else {}
    async with session.get(url + "/v1/state/stream", params=query) as response:
        async for data in response.content.iter_any():
            for frame in reader.feed(data):
                fleet.apply(url, frame, 0.0)
                kinds.append(type(frame))
            if until(fleet):
                return kinds
    return kinds


def stored(*numbers):
    """Return a message that one-block prompts are held now, each of its number's tokens."""
    events = [["BlockStored", [n], None, [n] * 16, 16, None, "GPU"] for n in numbers]
    return msgspec.msgpack.encode([0.0, events, 0])


def key_of(number):
    (key,) = chain_keys(root_key(KeyNamespace("tiny")), pack_tokens([number] * 16), 16)
    return key


async def test_fifty_consumers_get_the_same_state_and_resume_without_a_snapshot():
    state = node_state()
    tracker = tracker_in(state)

    async def change(seqs):
        for seq in seqs:
            tracker.on_message(seq, stored(*range(seq * 10, seq * 10 + 10)), state.now())
            state.changed()
            await asyncio.sleep(0)

    def knows(number):
        key = key_of(number)
        return lambda fleet: fleet.match([key]) == {"e": 1}

    async with (
        serving_state(state) as (url, _),
        aiohttp.ClientSession() as session,
        asyncio.timeout(30),
    ):
        fleets = [Fleet(PrefixIndex(limit_bytes=1 << 26)) for _ in range(50)]
        following = [follow(url, fleet, session, knows(299)) for fleet in fleets]
        await asyncio.gather(change(range(30)), *following)
        await eventually(lambda: state.consumers == 0, what="all have left")
        await change(range(30, 40))
        again = await asyncio.gather(
            *(follow(url, fleet, session, knows(399), fleet.agents[url].cursor) for fleet in fleets)
        )
    assert all(SnapshotBegin not in kinds and Delta in kinds for kinds in again)
    for fleet in fleets:
        assert all(fleet.match([key_of(number)]) for number in range(400))


async def test_a_consumer_far_behind_gets_all_it_lacks():
    state = node_state()
    tracker_in(state)
    start = state.log.cursor
    for step in range(20):
        state.log.blocks_of("e").add("GPU", range(step * 40_000, (step + 1) * 40_000))
        state.log.seal()
    async with serving_state(state) as (url, _), aiohttp.ClientSession() as session:
        fleet = Fleet(PrefixIndex(limit_bytes=1 << 28))
        fleet.add_agent(url).cursor = start
        async with asyncio.timeout(30):
            kinds = await follow(
                url, fleet, session, lambda f: f.agents[url].cursor == state.log.cursor, start
            )
        assert SnapshotBegin not in kinds
        assert fleet.match([799_999]) == {"e": 1}


@pytest.mark.parametrize("frames", [1, 2], ids=["after-begin", "after-blocks"])
async def test_an_agent_that_dies_within_its_snapshot_leaves_what_was_known(frames):
    info = EngineInfo(id="e", incarnation="1", url="http://e", models=("tiny",))
    cursor = Cursor("b", 0, 1)
    snapshot = [
        SnapshotBegin(cursor=cursor, node="n", version="1", engines=(info,), gauges=()),
        Blocks(engine="e", tier="GPU", keys=b"\1" * 8),
        SnapshotEnd(cursor=cursor),
    ]
    answers = [3, frames, frames, 3]

    async def stream(request):
        response = web.StreamResponse()
        await response.prepare(request)
        count = answers.pop(0) if answers else 3
        for frame in snapshot[:count]:
            await response.write(encode_frame(frame))
        return response

    app = web.Application()
    app.router.add_get("/v1/state/stream", stream)
    key = int.from_bytes(b"\1" * 8, "little")
    async with running(app, ANY_PORT) as address, running_ingress(address.url) as ingress:
        fleet = ingress.knowledge.fleet

        def still_known():
            assert fleet.match([key]) == {"e": 1}
            return not answers

        await eventually(still_known, what="all four connections were made")
        assert len(fleet._engine_of_slot) == 1


# -- Engines -----------------------------------------------------------------------------


@asynccontextmanager
async def fake_engine(*, metrics="", endpoint=None, max_model_len="100"):
    """Serve what the agent asks an engine."""
    models = f'{{"data": [{{"id": "tiny", "max_model_len": {max_model_len}}}]}}'
    source = {"0": {"endpoint": endpoint, "replay_endpoint": endpoint}} if endpoint else {}

    def answering(make):
        async def answer(_request):
            return make()

        return answer

    app = web.Application()
    for path, make in {
        "/v1/models": lambda: web.Response(text=models, content_type="application/json"),
        "/version": lambda: web.json_response({"version": "1"}),
        "/kv_event_sources": lambda: web.json_response(source),
        "/metrics": lambda: web.Response(text=metrics),
    }.items():
        app.router.add_get(path, answering(make))
    async with running(app, ANY_PORT) as address:
        yield address.url


CACHE = 'vllm:cache_config_info{{engine="0",block_size="{}",kv_cache_size_tokens="{}"}} 1.0\n'


@pytest.mark.parametrize(
    "odd",
    [
        {"metrics": 'vllm:num_requests_running{engine="0"} 1e300\n'},
        {"metrics": 'vllm:num_requests_running{engine="0"} -1e300\n'},
        {"metrics": CACHE.format("32", "9" * 30)},
        {"metrics": CACHE.format("9" * 5000, "100")},
        {"max_model_len": "9" * 30},
        {"endpoint": "nonsense"},
        {"endpoint": "tcp://*"},
    ],
    ids=["gauge", "negative", "tokens", "digits", "length", "endpoint", "no-port"],
)
async def test_an_engine_that_says_nonsense_disturbs_no_other(odd):
    async with double() as engine, fake_engine(**odd) as url:
        engines = [{"id": "good", "url": engine.url}, {"id": "odd", "url": url}]
        app = build_agent(AgentSettings.model_validate({**FAST_AGENT, "engines": engines}))
        async with running(app, ANY_PORT) as address, running_ingress(address.url) as ingress:
            state = app[NODE_STATE]
            await eventually(
                lambda: "odd" in state.trackers or "odd" in state.problems, what="it was asked"
            )
            await eventually(
                lambda: "good" in state.trackers and state.trackers["good"].info.block_size,
                what="the other is known",
            )
            await engine.wait_for_subscribers()
            await eventually(
                lambda: (
                    "good" in ingress.knowledge.fleet.engines
                    and ingress.knowledge.fleet.agents[address.url].cursor == state.log.cursor
                ),
                what="the state is served",
            )
            async with ingress.session.get(address.url + "/readyz") as ready:
                assert ready.status == 200


class Cable:
    """A TCP connection between two parties that can be pulled out and put back."""

    def __init__(self, endpoint):
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._peer = (host, int(port))
        self._server = None
        self._port = 0
        self._tasks = set()

    @property
    def endpoint(self):
        return f"tcp://127.0.0.1:{self._port}"

    async def plug_in(self):
        self._server = await asyncio.start_server(
            self._carry, "127.0.0.1", self._port, reuse_address=True
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def pull_out(self):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _carry(self, reader, writer):
        self._tasks.add(asyncio.create_task(self._both_ways(reader, writer)))

    async def _both_ways(self, reader, writer):
        far_reader, far_writer = await asyncio.open_connection(*self._peer)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            for each in (writer, far_writer):
                each.transport.abort()


async def _pump(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def test_what_was_published_while_the_event_stream_was_away_is_learnt_without_more():
    async with double() as engine, AsyncExitStack() as stack:
        cable = Cable(engine.kv_events_endpoints[0])
        await cable.plug_in()
        stack.push_async_callback(cable.pull_out)
        configured = {
            "id": "a",
            "url": engine.url,
            "kv_events": cable.endpoint,
            "kv_replay": engine.kv_replay_endpoints[0],
        }
        app = build_agent(AgentSettings.model_validate({**FAST_AGENT, "engines": [configured]}))
        await stack.enter_async_context(running(app, ANY_PORT))
        state = app[NODE_STATE]
        await engine.wait_for_subscribers()
        await eventually(lambda: state.trackers["a"].info.events == "live", what="events are live")
        tracker = state.trackers["a"]
        await cable.pull_out()
        await eventually(lambda: tracker.info.events == "lost", what="the loss is noticed")
        async with (
            aiohttp.ClientSession() as client,
            client.post(engine.url + "/v1/completions", json={"model": "tiny", "prompt": DOCUMENT}),
        ):
            pass
        assert tracker.table.block_count == 0
        await cable.plug_in()
        await eventually(lambda: tracker.table.block_count > 0, what="missed blocks are there")
        await eventually(lambda: tracker.info.events == "live", what="events are live again")


@asynccontextmanager
async def subscribed(limits):
    """Run a subscription to sockets that the test publishes and replays on itself."""
    context = zmq.asyncio.Context()
    live, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (live, replay)]
    state = node_state()
    tracker = tracker_in(state)
    subscription = EventSubscription(
        EventSource(*(f"tcp://127.0.0.1:{port}" for port in ports)),
        tracker,
        context=context,
        notify=Notifications(now=state.now, changed=state.changed, suspect=lambda: None),
        limits=limits,
    )
    task = asyncio.create_task(subscription.run())
    try:
        async with asyncio.timeout(30):
            await live.recv()  # the subscription
        yield live, replay, tracker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


async def test_a_replay_that_never_ends_does_not_hold_live_events_for_ever():
    async with subscribed(SubscriptionLimits(replay_seconds=0.3)) as (live, replay, tracker):

        async def drip():
            identity, *_ = await replay.recv_multipart()
            for seq in range(1_000_000):
                await replay.send_multipart([identity, b"", seq.to_bytes(8, "big"), b"\xc1"])
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        await live.send_multipart([b"", (7).to_bytes(8, "big"), stored(1)])
        await eventually(lambda: tracker.table.block_count == 1, what="the live event is applied")
        assert tracker.info.events is EventsState.PARTIAL
        dripping.cancel()


async def test_a_flood_of_events_loses_none_and_lets_consumers_through():
    async with double(num_blocks=70_000) as engine, small_fleet(engine) as (ingress, agent):
        publisher = engine.ranks[0].publisher
        counts = agent.state.trackers["a"].counts
        slowest = 0.0
        for batch in range(400):
            publisher.publish(
                [
                    BlockStored(hashes=(n,), parent=None, token_ids=[n] * 32, block_size=32)
                    for n in range(batch * 100, batch * 100 + 100)
                ]
            )
            if batch % 20 == 0:
                asked_at = time.monotonic()
                async with ingress.session.get(agent.url + "/v1/status"):
                    slowest = max(slowest, time.monotonic() - asked_at)
        await ingress.synced(agent)
        assert counts.blocks_stored == 40_000
        assert agent.state.trackers["a"].table.block_count == 40_000
        assert (counts.gaps, counts.undecodable) == (0, 0)
        assert slowest < 20.0


async def test_an_agent_that_restarts_does_not_take_its_engines_for_gone():
    async with double() as engine, AsyncExitStack() as stack:
        async with running_agent(engine) as agent:
            ingress = await stack.enter_async_context(running_ingress(agent.url))
            first_cursor = agent.state.log.cursor
        listen = agent.url.removeprefix("http://")
        await engine.inject(Faults(hang_seconds=1.0, paths=("/v1/models",), times=1))
        view = ingress.knowledge.fleet.agents[agent.url]

        def is_followed_again():
            assert "a" in ingress.knowledge.fleet.engines
            return view.cursor is not None and view.cursor.boot != first_cursor.boot

        async with asyncio.TaskGroup() as both:
            again = stack.enter_async_context(running_agent(engine, listen=listen))
            both.create_task(again)
            both.create_task(eventually(is_followed_again, what="it is followed again"))


async def test_agents_that_restart_under_load_cause_no_wrong_hit():
    async with double() as a, double() as b, AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        agent = await first.enter_async_context(running_agent(a, b))
        listen = agent.url.removeprefix("http://")
        ingress = await stack.enter_async_context(running_ingress(agent.url))
        wrong = []
        stop = asyncio.Event()

        async def keep_asking(number):
            turn = 0
            while not stop.is_set():
                turn += 1
                response, body = await ingress.complete(f"{number} {turn % 3}: {DOCUMENT}")
                assert response.status == 200, body
                predicted = int(response.headers.get("x-nearkv-predicted-cached-tokens", 0))
                reported = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                if predicted > reported:
                    wrong.append((predicted, reported))

        async with asyncio.TaskGroup() as clients:
            for number in range(4):
                clients.create_task(keep_asking(number))
            for _ in range(2):
                seen = ingress.knowledge.totals.requests
                await eventually(
                    lambda seen=seen: ingress.knowledge.totals.requests > seen + 20, what="progress"
                )
                await first.aclose()
                agent = await first.enter_async_context(running_agent(a, b, listen=listen))
            stop.set()
        await ingress.synced(agent)
        assert wrong == []
