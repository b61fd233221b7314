"""Whole agents with real movers: bytes that arrive, faults that cost no more than the pull."""

import asyncio
import gc
import re
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest

from nearkv.agent.app import build_app
from nearkv.agent.settings import AgentSettings
from nearkv.errors import ListenError
from nearkv.serving import running
from nearkv.state.codec import FrameReader
from nearkv.state.model import SnapshotBegin
from nearkv.transfer.errors import Reason
from nearkv.transfer.framing import encode_frame
from nearkv.transfer.messages import LeaseClosed, Lookup
from tests.doubles.engine import EngineDouble, EngineDoubleConfig
from tests.doubles.kv_engine import FakeEngine, KvShape, deadline_ms, pack
from tests.integration.kv_nodes import kv_node, open_descriptors
from tests.integration.stack import ANY_PORT, eventually
from tests.integration.test_transfer_peers import make_certificates

TOKENS = list(range(100, 124))
BLOCKS = [3, 9, 4, 5, 6]
SHARED = "a secret"


@pytest.fixture
def folder():
    made = Path(tempfile.mkdtemp(prefix="nkv-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def same(d, mine, p, theirs, rank=0):
    """Tell whether blocks hold the same bytes, and not just zeros."""
    read = [d.read(block, rank=rank) for block in mine]
    return any(read[0]) and read == [p.read(block, rank=rank) for block in theirs]


def movers(node):
    return [mover for mover in node.service.describe()["movers"] if mover["pid"]]


def mapped_memory():
    """The memfds that this process, which is the agents' too, has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:nearkv" in line]


# -- Bytes -----------------------------------------------------------------------------------


async def test_blocks_of_every_rank_come_from_another_engine_of_the_node():
    shape = KvShape(tp_size=2, layers=3, block_bytes=4096)
    async with (
        kv_node() as node,
        FakeEngine(node.socket, "p", shape=shape) as p,
        FakeEngine(node.socket, "d", shape=KvShape(**{**fields(shape), "blocks": 32})) as d,
    ):
        p.fill(range(10))
        address = await p.open_lease(TOKENS, BLOCKS)
        assert (await d.lookup(address, TOKENS)).num_tokens == 20
        for rank in (0, 1):
            done = await d.pull(address, [7, 8, 1], first_block=1, rank=rank)
            assert (done.reason, done.path) == ("", "shm")
            assert done.size_bytes == 3 * 3 * 4096
            assert same(d, [7, 8, 1], p, [9, 4, 5], rank)
        d.give_back(address)
        await eventually(lambda: p.releases, what="the lease ends")
        assert not any(d.read(0))


def fields(shape):
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


async def test_blocks_come_from_another_node():
    async with (
        kv_node("n1", paths=["tcp"], cluster_secret=SHARED, peer_token=SHARED) as one,
        kv_node("n2", paths=["tcp"], cluster_secret=SHARED, peer_token=SHARED) as two,
        FakeEngine(one.socket, "p") as p,
        FakeEngine(two.socket, "d") as d,
    ):
        p.fill(range(10))
        address = await p.open_lease(TOKENS, BLOCKS)
        assert (await d.lookup(address, TOKENS)).num_tokens == 20
        done = await d.pull(address, [7, 8, 1], first_block=1)
        assert (done.reason, done.path) == ("", "tcp")
        assert same(d, [7, 8, 1], p, [9, 4, 5])
        d.give_back(address)
        await eventually(lambda: p.releases, what="the lease ends")
        pairs = {pair["source"]: pair for pair in two.service.describe()["pairs"]}
        assert (pairs["n1"]["path"], pairs["n1"]["pulls"]) == ("tcp", 1)
        assert one.leases == two.leases == {"open": 0, "closing": 0}


async def test_with_tls_the_blocks_travel_under_it_too(tmp_path):
    files = make_certificates(tmp_path)
    async with (
        kv_node("n1", paths=["tcp"], peer_tls=files) as one,
        kv_node("n2", paths=["tcp"], peer_tls=files) as two,
        FakeEngine(one.socket, "p") as p,
        FakeEngine(two.socket, "d") as d,
    ):
        p.fill(range(10))
        address = await p.open_lease(TOKENS, BLOCKS)
        assert (await d.lookup(address, TOKENS)).num_tokens == 20
        done = await d.pull(address, [1])
        assert (done.reason, done.path) == ("", "tcp")
        assert same(d, [1], p, [3])
        pairs = {pair["source"]: pair for pair in two.service.describe()["pairs"]}
        assert "TLS" in pairs["n1"]["detail"]


# -- Faults ----------------------------------------------------------------------------------


async def test_what_an_engine_takes_back_does_not_count():
    async with (
        kv_node() as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d") as d,
    ):
        p.fill(range(10))
        p.obeys = False
        address = await p.open_lease(TOKENS, BLOCKS)
        assert (await d.lookup(address, TOKENS)).num_tokens == 20
        p.slots.close(p.leases[address.lease].slot)  # the agent has not heard of it yet
        assert (await d.pull(address, [1])).reason == Reason.STALE


async def test_after_engines_are_gone_nothing_of_them_is_left():
    async with kv_node() as node:
        gc.collect()
        before = open_descriptors()
        async with FakeEngine(node.socket, "p") as p, FakeEngine(node.socket, "d") as d:
            p.fill(range(10))
            address = await p.open_lease(TOKENS, BLOCKS)
            await d.lookup(address, TOKENS)
            assert (await d.pull(address, [1])).reason == ""
            (mover,) = movers(node)
            maps = Path(f"/proc/{mover['pid']}/maps")
            assert mapped(maps) == 2
            await p.disconnect()
            await eventually(
                lambda: not maps.exists() or mapped(maps) <= 1, what="the source is unmapped"
            )
            assert (await d.pull(address, [1])).reason == Reason.NO_SOURCE
        await eventually(lambda: not maps.exists(), what="the mover is gone")
        await eventually(lambda: not movers(node), what="no mover is left")
        p = d = None
        gc.collect()
        assert mapped_memory() == []
        await eventually(lambda: open_descriptors() == before, what="no descriptor is left")
        assert node.leases == {"open": 0, "closing": 0}


def mapped(maps):
    try:
        return sum("memfd:nearkv-kv" in line for line in maps.read_text().splitlines())
    except (FileNotFoundError, ProcessLookupError):
        return 0


async def test_engines_register_again_with_a_restarted_agent(folder):
    async with AsyncExitStack() as engines:
        async with kv_node(folder=folder) as node:
            p = await engines.enter_async_context(FakeEngine(node.socket, "p"))
            d = await engines.enter_async_context(FakeEngine(node.socket, "d"))
            p.fill(range(10))
            address = await p.open_lease(TOKENS, BLOCKS)
            await d.lookup(address, TOKENS)
        await asyncio.wait_for(p.scheduler.ended.wait(), 30)
        assert not node.socket.exists()
        async with kv_node(folder=folder) as node:
            await p.reconnect()
            await d.reconnect()
            assert (await d.pull(address, [1])).reason == Reason.UNKNOWN_LEASE
            assert (await d.lookup(address, TOKENS)).num_tokens == 20
            assert (await d.pull(address, [1])).reason == ""
            assert same(d, [1], p, [3])


async def test_a_second_agent_at_the_same_socket_does_not_start():
    async with kv_node() as node:
        settings = AgentSettings.model_validate(
            {
                "transfer": {
                    "socket_dir": str(node.socket.parent),
                    "peer_listen": "127.0.0.1:0",
                }
            }
        )
        with pytest.raises(ListenError, match="another agent listens there"):
            async with running(build_app(settings), ANY_PORT):
                pass
        async with FakeEngine(node.socket, "p"):
            pass


# -- What others see -------------------------------------------------------------------------


async def test_whoever_saw_a_lease_may_give_it_back():
    async with (
        kv_node() as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d") as d,
        aiohttp.ClientSession() as session,
    ):
        address = await p.open_lease(TOKENS, BLOCKS)
        await d.lookup(address, TOKENS)
        body = {"engine": "p", "epoch": p.epoch, "lease": address.lease}

        async def release(**change):
            async with session.post(
                f"{node.url}/v1/transfer/release", json={**body, **change}
            ) as answer:
                return answer.status, await answer.json(content_type=None)

        assert await release(epoch="x") == (200, {"released": False})
        assert await release() == (202, {"released": True})
        assert await release() == (200, {"released": False})
        await eventually(lambda: node.leases == {"open": 0, "closing": 0}, what="it ended")
        assert [r.why for r in p.releases] == ["aborted"]
        early = p.lease(TOKENS, BLOCKS)
        assert await release(lease=early.lease) == (200, {"released": False})
        p.scheduler.send(early)
        await eventually(lambda: len(p.releases) == 2, what="the late lease is given back")
        for wrong in (b"", b"[]", b'{"engine": 1}', b"\xff", b"{" * 9999):
            async with session.post(f"{node.url}/v1/transfer/release", data=wrong) as answer:
                assert answer.status == 400


async def test_a_lease_that_is_needed_no_more_before_it_was_looked_up_is_given_back():
    async with (
        kv_node() as node,
        FakeEngine(node.socket, "p") as p,
        FakeEngine(node.socket, "d") as d,
    ):
        address = await p.open_lease(TOKENS, BLOCKS)
        await eventually(lambda: node.leases == {"open": 1, "closing": 0}, what="it is known")
        # An engine did not wait for an agent that was late: both are read at once.
        question = Lookup(
            id=1,
            address=address,
            token_ids=pack(TOKENS),
            cache_salt="",
            lora="",
            deadline_ms=deadline_ms(10),
            first_block=0,
        )
        given_back = LeaseClosed(lease=address.lease, why="pulled")
        d.scheduler.raw.sendall(encode_frame(question) + encode_frame(given_back))
        await eventually(lambda: node.leases == {"open": 0, "closing": 0}, what="it ended")
        assert [r.why for r in p.releases] == ["pulled"]


async def test_status_metrics_and_state_show_the_transfer():
    async with EngineDouble(EngineDoubleConfig()) as engine:
        configured = [{"id": "p", "url": engine.url}, {"id": "x", "url": engine.url}]
        configured[1]["transfer"] = "off"
        async with kv_node(engines=configured) as node, aiohttp.ClientSession() as session:
            await eventually(lambda: len(node.state.trackers) == 2, what="engines are known")
            assert [t for t in node.service.problems() if "has not registered" in t] == [
                text for text in node.service.problems() if text.startswith("p:")
            ]
            async with FakeEngine(node.socket, "p") as p, FakeEngine(node.socket, "d") as d:
                address = await p.open_lease(TOKENS, BLOCKS)
                await d.lookup(address, TOKENS)
                assert (await d.pull(address, [1])).reason == ""
                async with session.get(f"{node.url}/v1/status") as answer:
                    status = await answer.json()
                async with session.get(f"{node.url}/metrics") as answer:
                    text = await answer.text()
                async with session.get(f"{node.url}/v1/state") as answer:
                    begin, *_ = FrameReader().feed(await answer.read())
        assert not [text for text in status["problems"] if "registered" in text]
        transfer = status["transfer"]
        assert {e["id"]: e["complete"] for e in transfer["engines"]} == {"p": True, "d": True}
        assert len({e["compat"] for e in transfer["engines"]} - {None}) == 1
        assert (transfer["protocol"], transfer["packet"]) == (1, "1.0")
        assert transfer["leases"] == {"open": 1, "closing": 0}
        assert transfer["running"] is True
        assert 'nearkv_agent_transfer_leases{state="open"} 1.0' in text
        assert re.search(r'transfer_pulls_total\{outcome="done",path="shm",reason=""\} 1.0', text)
        assert 'nearkv_agent_transfer_movers{kind="pull"} 1.0' in text
        assert isinstance(begin, SnapshotBegin)
        published = {info.id: info.transfer for info in begin.engines}
        assert published["p"].mode == "agent"
        assert published["x"] is None
        assert [(r.source, r.target, r.path) for r in begin.paths] == [("n1", "n1", "shm")]


async def test_an_engine_of_mode_nixl_is_published_by_what_it_serves():
    async with EngineDouble(EngineDoubleConfig()) as engine:
        configured = [{"id": "p", "url": engine.url, "transfer": "nixl"}]
        async with kv_node(engines=configured) as node:
            infos = node.state.log.infos
            await eventually(
                lambda: "p" in infos and infos["p"].transfer is not None, what="it is published"
            )
            assert msgspec.structs.asdict(infos["p"].transfer)["mode"] == "nixl"
            assert node.service.problems() == []
