"""Connections that are kept, and those that cannot be had."""

import asyncio
import ssl

import pytest

from nearkv.ingress.upstream.errors import EngineLeftError, NotReachedError
from nearkv.ingress.upstream.heads import encode_head, origin_of
from nearkv.ingress.upstream.pool import EnginePool
from tests.integration.raw_http import deaf_port, raw_engine
from tests.integration.stack import eventually
from tests.integration.test_transfer_peers import make_certificates

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def pool_of(*, connect_seconds=10.0, idle_seconds=60.0):
    return EnginePool(connect_seconds=connect_seconds, idle_seconds=idle_seconds)


async def send(pool, origin):
    connection = pool.take(origin) or await pool.connect(origin)
    return connection.send("GET", encode_head("GET", origin, "/", [], None), b"")


async def ask(pool, origin):
    async with asyncio.timeout(20):
        answer = await send(pool, origin)
        await answer.begun()
        return await answer.read()


async def test_a_connection_is_used_again():
    async with raw_engine(OK) as engine:
        pool, origin = pool_of(), origin_of(engine.url)
        for _ in range(5):
            assert await ask(pool, origin) == b"ok"
        assert (engine.connections, pool.open_connections) == (1, 1)
        pool.close()
        await eventually(lambda: pool.open_connections == 0, what="it is closed")


async def test_requests_at_once_have_connections_of_their_own():
    async with raw_engine(OK) as engine:
        pool, origin = pool_of(), origin_of(engine.url)
        answers = await asyncio.gather(*[ask(pool, origin) for _ in range(8)])
        assert answers == [b"ok"] * 8
        assert engine.connections == pool.open_connections
        pool.close()


async def test_a_connection_that_was_idle_for_too_long_is_not_used_again():
    async with raw_engine(OK) as engine:
        pool, origin = pool_of(idle_seconds=0.01), origin_of(engine.url)
        await ask(pool, origin)
        await eventually(lambda: pool.open_connections == 0, what="it is swept away")
        await ask(pool, origin)
        assert engine.connections == 2
        pool.close()


async def test_a_connection_that_the_engine_has_closed_is_not_used_again():
    async def once(writer):
        writer.write(OK)
        writer.close()

    async with raw_engine(once) as engine:
        pool, origin = pool_of(), origin_of(engine.url)
        for number in (1, 2):
            assert await ask(pool, origin) == b"ok"
            await eventually(lambda: pool.open_connections == 0, what="it is gone")
            assert engine.connections == number
        pool.close()


async def test_an_engine_that_hangs_up_instead_of_answering_has_left():
    async def leave(writer):
        writer.close()

    async with raw_engine(leave) as engine:
        pool = pool_of()
        with pytest.raises(EngineLeftError):
            await ask(pool, origin_of(engine.url))
        await eventually(lambda: pool.open_connections == 0, what="it is gone")


async def test_who_cannot_be_reached_is_told_from_who_does_not_answer(unused_tcp_port):
    pool = pool_of(connect_seconds=0.2)
    with pytest.raises(NotReachedError, match=r"127\.0\.0\.1:\d+"):
        await pool.connect(origin_of(f"http://127.0.0.1:{unused_tcp_port}"))
    with pytest.raises(NotReachedError, match="no-such-host"):
        await pool_of().connect(origin_of("http://no-such-host.invalid:1"))
    with deaf_port() as url:
        with pytest.raises(NotReachedError, match="took over"):
            await pool.connect(origin_of(url))
        with pytest.raises(NotReachedError, match=r"over 0\.1 s"):
            await pool_of().connect(origin_of(url), seconds=0.1)
    assert pool.open_connections == 0


async def test_closing_the_pool_ends_answers_under_way():
    async def silent(writer):
        await writer.drain()

    async with raw_engine(silent) as engine:
        pool, origin = pool_of(), origin_of(engine.url)
        answer = await send(pool, origin)
        pool.close()
        with pytest.raises(EngineLeftError):
            await answer.begun()
        with pytest.raises(NotReachedError, match="closing"):
            await pool.connect(origin)


async def test_an_engine_whose_certificate_nobody_vouches_for_is_not_reached(tmp_path):
    files = make_certificates(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(files["cert"], files["key"])
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=tls)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(NotReachedError, match=r"(?i)certificate"):
            await pool_of().connect(origin_of(f"https://127.0.0.1:{port}"))
