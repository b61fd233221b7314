"""Serving state to many: over TLS, to slow consumers, at once when it matters, within bounds."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from nearkv.agent.api import StateApi
from nearkv.agent.app import NODE_STATE, TRANSPORT
from nearkv.agent.app import build_app as build_agent
from nearkv.agent.engine_tracking import EngineIdentity, EngineTracker
from nearkv.agent.errors import SnapshotBusyError
from nearkv.agent.node_state import NodeState
from nearkv.agent.settings import AgentSettings
from nearkv.agent.state_log import StateLog
from nearkv.health import Readiness
from nearkv.ingress.fleet import Fleet
from nearkv.ingress.prefix_index import PrefixIndex
from nearkv.serving import running
from nearkv.state.codec import FrameReader
from nearkv.state.model import Delta, SnapshotBegin, SnapshotEnd
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.extender.tls_files import HAS_OPENSSL, make_pair, trusting
from tests.integration.stack import ANY_PORT, FAST_AGENT, eventually, running_ingress

ROOT = Path(__file__).resolve().parents[2]


def node_state(ring_limit_bytes=1 << 20, flush_seconds=0.0, tables_limit_bytes=1 << 30):
    log = StateLog(boot="b", node="n", version="1", ring_limit_bytes=ring_limit_bytes)
    return NodeState(
        log,
        boot="b",
        flush_seconds=flush_seconds,
        now=asyncio.get_running_loop().time,
        tables_limit_bytes=tables_limit_bytes,
    )


def tracker_in(state, engine="e"):
    identity = EngineIdentity(engine, "http://e", "n", "tiny", ("tiny",), key_model="tiny")
    tracker = EngineTracker(identity, state.log, secret=b"", table_limit_bytes=1 << 28)
    state.add(tracker)
    return tracker


@asynccontextmanager
async def serving(state, **settings):
    app = web.Application()
    agent = AgentSettings(node="n", state=settings)
    StateApi(state, Readiness(), agent, started_at=0.0).add_routes(app)
    async with running(app, ANY_PORT) as address:
        yield address.url


def publish(state, first, count=1000):
    state.log.blocks_of("e").add("GPU", range(first, first + count))
    state.log.seal()


# -- Slow consumers ------------------------------------------------------------------------


async def test_a_consumer_slower_than_the_ring_gets_a_snapshot_again_and_never_a_gap():
    state = node_state(ring_limit_bytes=100_000)
    tracker_in(state)
    state.log.seal()
    async with (
        serving(state, consumer_queue_bytes=10_000) as url,
        aiohttp.ClientSession(read_bufsize=1 << 10) as session,
        session.get(url + "/v1/state/stream") as response,
    ):
        await eventually(lambda: state.snapshots_served["first"] == 1, what="it follows")
        # It takes nothing now: the sockets fill, then its place in the ring is lost.
        first = 0
        while first < 5_000_000:
            publish(state, first)
            first += 1000
            await asyncio.sleep(0)
        fleet = Fleet(PrefixIndex(limit_bytes=1 << 26))
        fleet.add_agent(url)
        snapshots = 0
        reader = FrameReader()
        async with asyncio.timeout(30):
            async for data in response.content.iter_any():
                for frame in reader.feed(data):
                    fleet.apply(url, frame, 0.0)  # a gap would raise
                    snapshots += isinstance(frame, SnapshotBegin)
                if fleet.agents[url].cursor == state.log.cursor and snapshots > 1:
                    break
        assert state.snapshots_served["fell_behind"] >= 1


async def test_no_more_is_queued_for_a_consumer_than_its_queue_holds():
    state = node_state()
    tracker_in(state)
    state.log.seal()
    start = state.log.cursor
    for step in range(50):
        publish(state, step * 1000)
    frames = state.log.after(start, 30_000)
    assert frames is not None
    assert 1 <= len(frames) < 50
    assert sum(map(len, frames)) <= 30_000
    (only,) = state.log.after(start, 10)  # one at least, or it would stand still
    assert only == frames[0]


async def test_a_consumer_that_is_behind_gets_all_it_lacks_in_parts():
    state = node_state()
    tracker_in(state)
    state.log.seal()
    start = state.log.cursor
    for step in range(50):
        publish(state, step * 1000)
    async with (
        serving(state, consumer_queue_bytes=30_000) as url,
        aiohttp.ClientSession() as session,
        session.get(url + "/v1/state/stream", params={"after": str(start)}) as response,
    ):
        seqs = []
        reader = FrameReader()
        async with asyncio.timeout(30):
            async for data in response.content.iter_any():
                seqs += [f.cursor.seq for f in reader.feed(data) if isinstance(f, Delta)]
                if len(seqs) >= 50:
                    break
    assert seqs == list(range(start.seq + 1, start.seq + 51))


async def test_consumers_that_come_together_share_one_snapshot_and_all_end_up_right():
    state = node_state()
    tracker = tracker_in(state)
    tracker.table.clear()
    snapshots = [state.snapshot_to_follow() for _ in range(3)]
    assert snapshots[0] is snapshots[1] is snapshots[2]
    publish(state, 0)
    assert state.snapshot_to_follow() is snapshots[0], "the delta behind it is still there"
    readers = [snapshot.frames() for snapshot in snapshots]
    taken = [[] for _ in readers]
    for frames in zip(*readers, strict=True):
        for part, frame in zip(taken, frames, strict=True):
            part.append(frame)
    assert taken[0] == taken[1] == taken[2]


async def test_a_snapshot_is_not_shared_once_its_deltas_may_go():
    state = node_state(ring_limit_bytes=100_000)
    tracker_in(state)
    state.log.seal()
    first = state.snapshot_to_follow()
    for step in range(5):
        publish(state, step * 1000)
    assert state.snapshot_to_follow() is not first


async def test_only_so_many_different_snapshots_are_read_at_once():
    state = node_state(ring_limit_bytes=1000)
    tracker_in(state)
    held = []
    for step in range(4):
        held.append(state.snapshot_to_follow())
        publish(state, step * 1000)
    with pytest.raises(SnapshotBusyError):
        state.snapshot_to_follow()
    held.pop()
    assert state.snapshot_to_follow() is not None


# -- What must not wait --------------------------------------------------------------------


async def test_what_matters_is_sealed_at_once_and_blocks_wait_for_more():
    state = node_state(flush_seconds=3600.0)
    tracker = tracker_in(state)
    state.log.seal()

    def sealed(act):
        before = state.log.cursor
        act()
        state.changed()
        return state.log.cursor != before

    assert not sealed(lambda: state.log.blocks_of("e").add("GPU", [1]))
    assert sealed(tracker.drain)
    assert sealed(lambda: tracker.restart(noticed_by_events=False, incarnation="2"))
    assert sealed(tracker.on_unreachable)
    assert sealed(lambda: state.drop("e"))


async def test_an_engine_that_drains_is_known_before_the_next_flush():
    async with EngineDouble(EngineDoubleConfig(num_blocks=600)) as engine:
        settings = {
            **FAST_AGENT,
            "engines": [{"id": "a", "url": engine.url}],
            "state": {"flush_seconds": 3600.0, "heartbeat_seconds": 0.1},
        }
        app = build_agent(AgentSettings.model_validate(settings))
        async with running(app, ANY_PORT) as address, running_ingress(address.url) as ingress:
            state = app[NODE_STATE]
            await eventually(
                lambda: "a" in ingress.knowledge.fleet.engines, what="the engine is known"
            )
            state.trackers["a"].drain()
            state.changed()
            await eventually(
                lambda: ingress.knowledge.fleet.engines["a"].info.state == "draining",
                what="the drain is known",
            )


async def test_an_engine_killed_for_good_is_gone_from_state():
    """The bar is 2 s (issue 5); the agent looks again as soon as the event stream breaks."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.doubles.engine", "--num-blocks", "600"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        url = json.loads(await process.stdout.readline())["url"]
        settings = {"listen": "127.0.0.1:0", "engines": [{"id": "a", "url": url}]}
        app = build_agent(AgentSettings.model_validate(settings))
        async with (
            running(app, ANY_PORT) as address,
            running_ingress(address.url) as ingress,
        ):
            tracker = app[NODE_STATE].trackers["a"]
            await eventually(lambda: tracker.info.events == "live", what="events are live")
            async with ingress.session.post(
                url + "/v1/completions", json={"model": "tiny", "prompt": "long ago " * 200}
            ) as answer:
                assert answer.status == 200
            await eventually(lambda: tracker.table.block_count, what="it holds blocks")
            process.kill()
            fleet = ingress.knowledge.fleet
            await eventually(
                lambda: (
                    fleet.engines["a"].info.state == "unreachable"
                    and not tracker.table.block_count
                    and fleet.agents[address.url].cursor == app[NODE_STATE].log.cursor
                ),
                what="it is gone",
                seconds=2.0,
            )
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# -- Memory --------------------------------------------------------------------------------


async def test_tables_over_their_bound_give_up_blocks_and_say_so():
    async with EngineDouble(EngineDoubleConfig(num_blocks=600, max_model_len=8192)) as engine:
        settings = {
            **FAST_AGENT,
            "engines": [{"id": "a", "url": engine.url}],
            "state": {"tables_limit_bytes": 40 * 360, "heartbeat_seconds": 0.1},
        }
        app = build_agent(AgentSettings.model_validate(settings))
        async with running(app, ANY_PORT) as address, running_ingress(address.url) as ingress:
            tracker = app[NODE_STATE].trackers["a"]
            await eventually(lambda: tracker.info.events == "live", what="events are live")
            await engine.wait_for_subscribers()
            for number in range(8):
                await ingress.complete(f"{number} long ago " * 200)
            await eventually(lambda: tracker.table.counts.evicted, what="blocks were given up")
            await eventually(lambda: tracker.info.events == "partial", what="it says so")
            await eventually(lambda: tracker.table.block_count <= 40, what="it is in its bound")
            async with ingress.session.get(address.url + "/v1/status") as answer:
                status = await answer.json()
            assert any("does not fit into memory" in each for each in status["problems"])
            async with ingress.session.get(address.url + "/metrics") as answer:
                assert "nearkv_agent_blocks_evicted_total" in await answer.text()


# -- TLS -----------------------------------------------------------------------------------

tls = pytest.mark.skipif(not HAS_OPENSSL, reason="the openssl program is not installed")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    if not HAS_OPENSSL:
        pytest.skip("the openssl program is not installed")
    folder = tmp_path_factory.mktemp("pairs")
    return {name: make_pair(folder, name) for name in ("old", "new", "reader", "stranger")}


@asynccontextmanager
async def tls_agent(cert, key, client_ca=None):
    served = {"cert": str(cert), "key": str(key), "reload_seconds": 0.05}
    if client_ca is not None:
        served["client_ca"] = str(client_ca)
    app = build_agent(AgentSettings.model_validate({**FAST_AGENT, "tls": served}))
    async with running(app, ANY_PORT, transport=app[TRANSPORT]) as address:
        yield f"https://{address}"


@tls
async def test_an_ingress_follows_an_agent_over_mutual_tls_and_strangers_do_not(pairs):
    old, reader = pairs["old"], pairs["reader"]
    shown = {"ca": str(old.cert), "cert": str(reader.cert), "key": str(reader.key)}
    async with (
        tls_agent(old.cert, old.key, reader.cert) as url,
        running_ingress(url, agent_tls=shown) as ingress,
        aiohttp.ClientSession() as session,
    ):
        assert ingress.knowledge.fleet.agents[url].connected
        nobody = trusting(old)
        for path, status in {
            "/v1/state": 401,
            "/v1/status": 401,
            "/metrics": 401,
            "/livez": 200,
        }.items():
            async with session.get(url + path, ssl=nobody) as answer:
                assert answer.status == status, path
        with pytest.raises(aiohttp.ClientError):
            async with session.get(
                url + "/v1/state", ssl=trusting(old, showing=pairs["stranger"])
            ) as answer:
                await answer.read()


@tls
async def test_a_renewed_certificate_is_served_and_streams_that_are_open_stay(pairs, tmp_path):
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    pairs["old"].copy_to(cert, key)
    async with tls_agent(cert, key) as url, aiohttp.ClientSession() as session:
        stream = await session.get(url + "/v1/state/stream", ssl=trusting(pairs["old"]))
        pairs["new"].copy_to(cert, key)
        renewed = trusting(pairs["new"])

        async def is_renewed():
            try:
                async with session.get(url + "/v1/state", ssl=renewed) as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        async with asyncio.timeout(30):
            while not await is_renewed():  # noqa: ASYNC110 (it is another host's state)
                await asyncio.sleep(0.02)
        reader = FrameReader()
        kinds = []
        async with asyncio.timeout(30):
            async for data in stream.content.iter_any():
                kinds += [type(frame) for frame in reader.feed(data)]
                if len(kinds) > 4:
                    break
        assert SnapshotEnd in kinds
        assert Delta not in kinds
        stream.close()
