"""Engines at the agent's socket: who gets in, what is refused, and that nothing is left behind."""

import asyncio
import contextlib
import gc
import os
import shutil
import socket
import stat
import struct
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from nearkv.agent.transfer.socket_server import SocketServer
from nearkv.errors import ListenError
from nearkv.state.model import EngineInfo
from nearkv.transfer.framing import encode_frame, send_with_fds
from nearkv.transfer.memory import create_memory
from nearkv.transfer.messages import CancelPull, LeaseClosed, LookupDone, Refused, RegisterWorker
from tests.doubles.agent_line import Line
from tests.doubles.kv_engine import FakeEngine, KvShape, RegistrationRefused
from tests.integration.kv_nodes import open_descriptors
from tests.integration.kv_service import scripted_service
from tests.integration.stack import eventually


@pytest.fixture
def folder():
    made = Path(tempfile.mkdtemp(prefix="nkv-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@asynccontextmanager
async def line_to(node):
    line = Line(node.socket)
    line.connect()
    try:
        yield line
    finally:
        await line.close()


@asynccontextmanager
async def watched_service(**settings):
    """Yield a service; descriptors must be as many at the end as without connections."""
    async with scripted_service(**settings) as node:
        before = open_descriptors()
        yield node
        await eventually(lambda: not engines(node), what="nobody is registered")
        gc.collect()
        await eventually(lambda: open_descriptors() == before, what="no descriptor is left")


def engines(node):
    return node.service.workings.registry.engines


# -- The socket ------------------------------------------------------------------------------


async def test_the_socket_has_its_rights_and_goes_with_the_agent(folder):
    server = SocketServer(folder / "run", lambda sock: sock.close())
    server.start()
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o660
    assert stat.S_IMODE(server.path.parent.stat().st_mode) & 0o007 == 0
    server.stop_accepting()
    assert not server.path.exists()


async def test_a_second_agent_on_the_same_path_does_not_start(folder):
    first, second = (SocketServer(folder, lambda sock: sock.close()) for _ in range(2))
    first.start()
    with pytest.raises(ListenError, match="another agent listens there"):
        second.start()
    second.stop_accepting()
    assert first.path.exists()
    first.stop_accepting()


async def test_a_socket_that_nobody_listens_on_is_replaced(folder):
    path = folder / "agent.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = SocketServer(folder, lambda sock: sock.close())
    server.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    server.stop_accepting()


async def test_a_file_that_is_no_socket_is_left_alone(folder):
    (folder / "agent.sock").write_text("mine")
    with pytest.raises(ListenError, match="no socket"):
        SocketServer(folder, lambda sock: sock.close()).start()
    assert (folder / "agent.sock").read_text() == "mine"


async def test_an_agent_leaves_a_socket_that_is_anothers_by_now(folder):
    first = SocketServer(folder, lambda sock: sock.close())
    first.start()
    first.path.unlink()
    second = SocketServer(folder, lambda sock: sock.close())
    second.start()
    first.stop_accepting()
    assert second.path.exists()
    second.stop_accepting()


async def test_a_path_that_is_too_long_is_named(folder):
    with pytest.raises(ListenError, match="too long"):
        SocketServer(folder / ("x" * 100), lambda sock: sock.close()).start()


async def test_a_folder_that_cannot_be_made_is_named(folder):
    (folder / "file").write_text("")
    with pytest.raises(ListenError, match="file/run"):
        SocketServer(folder / "file" / "run", lambda sock: sock.close()).start()


# -- Registration ----------------------------------------------------------------------------


async def test_a_complete_engine_is_published_until_it_leaves():
    async with watched_service() as node:
        log = node.state.log
        log.put_info(EngineInfo(id="p", incarnation="1", url="http://p"))
        assert log.infos["p"].transfer is None
        async with FakeEngine(node.socket, "p", shape=KvShape(tp_size=2)) as p:
            assert (p.greeting.node, p.greeting.agent) == ("n1", node.service.peer_url)
            published = log.infos["p"].transfer
            assert (published.mode, published.agent) == ("agent", node.service.peer_url)
            assert published.kv_bytes_per_token == 2 * 1024 * 2 // 4
            assert dict(node.service.gauges().engines) == {"complete": 1, "incomplete": 0}
            await p.workers[1].close()
            await eventually(lambda: log.infos["p"].transfer is None, what="it is withdrawn")
            await eventually(
                lambda: any("1 of 2 workers" in text for text in node.service.problems()),
                what="half an engine is a problem",
            )
            p.workers[1] = Line(node.socket)
            await p.register_worker(1)
            assert log.infos["p"].transfer == published
        await eventually(lambda: log.infos["p"].transfer is None, what="it is withdrawn")


async def test_an_engine_that_registers_before_it_is_known_is_published_when_it_is():
    async with watched_service() as node, FakeEngine(node.socket, "p"):
        node.state.log.put_info(EngineInfo(id="p", incarnation="1", url="http://p"))
        assert node.state.log.infos["p"].transfer.mode == "agent"


async def test_an_engine_that_comes_back_keeps_its_leases():
    async with watched_service() as node, FakeEngine(node.socket, "p") as p:
        tokens = list(range(8))
        address = await p.open_lease(tokens, [1, 2])
        await p.reconnect()
        async with FakeEngine(node.socket, "d") as d:
            assert (await d.lookup(address, tokens)).num_tokens == 8


async def refused(node, **changes):
    """Return why the agent refuses an engine, and check that it counted that."""
    engine = FakeEngine(node.socket, **changes)
    try:
        with pytest.raises(RegistrationRefused) as raised:
            await engine.register()
    finally:
        await engine.close()
    count = node.count("registrations", outcome="refused", reason=raised.value.reason)
    assert count == 1
    return raised.value.reason, raised.value.message


async def test_engines_whose_transfer_is_not_the_agents_are_refused():
    async with watched_service(modes={"e": "off", "x": "nixl"}) as node:
        reason, text = await refused(node, engine="e/dp1")
        assert (reason, "off" in text) == ("peer_refused", True)


async def test_memory_that_its_owner_could_take_away_is_refused():
    async with watched_service() as node, line_to(node) as line:
        hello = FakeEngine(node.socket)
        fd = os.memfd_create("unsealed")
        os.ftruncate(fd, hello.shape.memory.size)
        line.send(hello.worker_hello(), [fd])
        os.close(fd)
        answer = await line.next()
        assert isinstance(answer, Refused)
        assert (answer.reason, "sealed" in answer.message) == ("memory", True)
        await asyncio.wait_for(line.ended.wait(), 30)
        await hello.close()


async def hello_answer(node, change, fds=1, *, scheduler=False):
    """Return the answer to a registration that was tampered with."""
    engine = FakeEngine(node.socket)
    memory = create_memory(engine.shape.memory.size)
    try:
        async with line_to(node) as line:
            message = engine.scheduler_hello() if scheduler else engine.worker_hello()
            message = msgspec.structs.replace(message, fds=fds, **change)
            line.send(message, [memory.fd] * fds)
            return await line.next()
    finally:
        memory.close()
        await engine.close()


@pytest.mark.parametrize(
    ("change", "fds", "reason"),
    [
        ({"protocol": 99}, 1, "version"),
        ({}, 0, "malformed"),
        ({}, 2, "malformed"),
        ({"engine": ""}, 1, "malformed"),
        (
            {"memory": msgspec.structs.replace(KvShape().memory, size=1 << 30)},
            1,
            "memory",
        ),
        ({"memory": msgspec.structs.replace(KvShape().memory, block_stride=1)}, 1, "layout"),
        ({"compatibility": KvShape(layers=3).compatibility()}, 1, "layout"),
    ],
)
async def test_a_registration_that_cannot_be_is_refused_with_its_reason(change, fds, reason):
    async with watched_service() as node:
        answer = await hello_answer(node, change, fds)
        assert isinstance(answer, Refused)
        assert answer.reason == reason
        assert node.count("registrations", outcome="refused", reason=reason) == 1
        assert node.count("connection_ends", cause="refused") == 1


async def test_slots_that_the_descriptor_does_not_hold_are_refused():
    async with watched_service() as node:
        answer = await hello_answer(node, {"slots": 1 << 20}, scheduler=True)
        assert answer.reason == "memory"


async def test_a_descriptor_that_is_no_memfd_is_refused():
    async with watched_service() as node, line_to(node) as line:
        engine = FakeEngine(node.socket)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            line.send(engine.worker_hello(), [theirs.fileno()])
            assert (await line.next()).reason == "memory"
        await engine.close()


# -- Hostile ends ----------------------------------------------------------------------------


async def ends(node, data, cause, fds=()):
    """Send raw bytes; the connection must end, for that cause, and nobody else's."""
    before = node.count("connection_ends", cause=cause)
    async with line_to(node) as line:
        line.raw.settimeout(40)
        with contextlib.suppress(ConnectionError):
            send_with_fds(line.raw, data, fds)
        line.raw.settimeout(0)
        await asyncio.wait_for(line.ended.wait(), 30)
    assert node.count("connection_ends", cause=cause) == before + 1


def frame(body):
    return struct.pack("<I", len(body)) + body


async def test_nonsense_ends_its_own_connection_and_no_other():
    async with watched_service() as node, FakeEngine(node.socket, "p") as p:
        hello = encode_frame(p.worker_hello())
        memory = create_memory(4096)
        for data in (
            frame(b"\xff"),
            frame(b""),
            frame(msgspec.msgpack.encode({"type": "unknown"})),
            frame(msgspec.msgpack.encode({"type": "register_worker"})),
            frame(b"\x91" * 100_000),
            struct.pack("<I", 0xFFFFFFFF),
            encode_frame(CancelPull(id=1)),
            encode_frame(LookupDone(id=1, num_tokens=1)),
            hello,
        ):
            await ends(node, data, "malformed", fds=[])
        # Descriptors that came with it are closed, announced or not, taken or not.
        other = encode_frame(msgspec.structs.replace(p.worker_hello(), engine="x"))
        await ends(node, frame(b"\xff"), "malformed", fds=[memory.fd] * 3)
        await ends(node, other + frame(b"\xff"), "malformed", fds=[memory.fd])
        await ends(node, frame(b"") + other, "malformed", fds=[memory.fd] * 8)
        memory.close()
        assert (await p.lookup(await p.open_lease([1] * 4, [1]), [1] * 4)).num_tokens == 4


async def test_messages_of_the_wrong_role_end_the_connection():
    async with watched_service() as node:
        for wrong, role in ((LeaseClosed(lease="x", why=""), "worker"), (CancelPull(id=1), "")):
            engine = FakeEngine(node.socket)
            await engine.register()
            line = engine.workers[0] if role else engine.scheduler
            line.send(wrong)
            await asyncio.wait_for(line.ended.wait(), 30)
            await engine.close()
        assert node.count("connection_ends", cause="malformed") == 2


async def test_a_second_registration_on_a_connection_ends_it():
    async with watched_service() as node:
        engine = FakeEngine(node.socket)
        await engine.register()
        engine.workers[0].send(engine.worker_hello(), [engine.memories[0].fd])
        await asyncio.wait_for(engine.workers[0].ended.wait(), 30)
        await engine.close()


async def test_an_end_that_says_nothing_is_not_waited_for():
    async with watched_service(handshake_seconds=0.05) as node:
        async with line_to(node) as line:
            line.raw.send(struct.pack("<I", 100) + b"half")
            await asyncio.wait_for(line.ended.wait(), 30)
        assert node.count("connection_ends", cause="no_handshake") == 1


async def test_only_so_many_connections_are_taken():
    async with watched_service(max_connections=2) as node, FakeEngine(node.socket, "p"):
        async with line_to(node) as line:
            await asyncio.wait_for(line.ended.wait(), 30)
        assert node.count("connection_ends", cause="too_many") == 1


async def test_users_that_are_not_allowed_are_turned_away():
    async with watched_service(allowed_uids=[os.geteuid() + 1]) as node:
        async with line_to(node) as line:
            await asyncio.wait_for(line.ended.wait(), 30)
        assert node.count("connection_ends", cause="not_allowed") == 1


async def test_an_engine_that_takes_nothing_is_cut_off():
    async with watched_service() as node:
        engine = FakeEngine(node.socket)
        await engine.register_worker()
        session = next(iter(node.service.workings.registry.engines.values())).workers[0].owner
        line = engine.workers[0]
        line._task.cancel()
        await asyncio.gather(line._task, return_exceptions=True)
        big = RegisterWorker(
            protocol=1,
            engine="x" * (1 << 20),
            epoch="",
            compatibility=engine.shape.compatibility(),
            memory=engine.shape.memory,
        )
        for _ in range(20):
            session.send(big)
        assert node.count("connection_ends", cause="too_slow") == 1
        await engine.close()
