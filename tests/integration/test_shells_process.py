"""The ingress as a process of its own: signals, and a log that nobody reads any more."""

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager

from tests.integration.raw_http import exchange, raw_engine, request
from tests.integration.stack import eventually

DEADLINE_SECONDS = 40


@asynccontextmanager
async def ingress_process(engine):
    """Run ``nearkv-ingress`` in front of one engine; yield the process and its URL."""
    static = json.dumps([{"id": "s", "url": engine.url}])
    arguments = ("--listen", "127.0.0.1:0", "--engines", static)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nearkv.ingress", *arguments), stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (line := json.loads(await process.stderr.readline()))["event"] != "listening":
                pass
            yield process, line["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


async def test_requests_are_answered_when_the_reader_of_the_log_has_gone():
    async def hang_up(writer):
        writer.close()

    async with raw_engine(hang_up) as engine, ingress_process(engine) as (process, url):
        process._transport.get_pipe_transport(2).close()
        for _ in range(3):
            # That the engine failed is a warning, which is written at once: within the request.
            given = await exchange(url, request("GET /v1/x"), until=b"}}")
            assert b" 502 " in given
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_stop_lets_streams_end_and_serves_who_comes_meanwhile():
    go_on = asyncio.Event()

    async def stream(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await go_on.wait()
        writer.write(b"5\r\nworld\r\n0\r\n\r\n")

    async with raw_engine(stream) as engine, ingress_process(engine) as (process, url):
        first = asyncio.create_task(exchange(url, request("GET /v1/1"), until=b"\r\n0\r\n"))
        await eventually(lambda: engine.requests, what="the first arrived")
        process.send_signal(signal.SIGTERM)
        while b'"draining"' not in await process.stderr.readline():
            pass
        assert b" 503 " in await exchange(url, request("GET /readyz"), until=b"draining")
        assert b" 200 " in await exchange(url, request("GET /livez"), until=b"ok")
        late = asyncio.create_task(exchange(url, request("GET /v1/2"), until=b"\r\n0\r\n"))
        await eventually(lambda: len(engine.requests) == 2, what="the second arrived")
        assert process.returncode is None
        go_on.set()
        assert all(b"world" in answer for answer in await asyncio.gather(first, late))
        assert await process.wait() == 0
