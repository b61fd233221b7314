"""Engines and clients that speak raw bytes, for what no well-behaved library would send."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_DEADLINE_SECONDS = 30.0

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class RawEngine:
    """An engine that answers every request by one function; keeps what it was asked."""

    url: str = ""
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    connections: int = 0

    @property
    def lines(self) -> list[bytes]:
        """The request lines received."""
        return [head.split(b"\r\n", 1)[0] for head, _ in self.requests]


@asynccontextmanager
async def raw_engine(answer: Answer | bytes) -> AsyncIterator[RawEngine]:
    """Serve ``answer`` to every request; the connection stays until the function closes it."""
    engine = RawEngine()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine.connections += 1
        with (
            contextlib.closing(writer),
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError),
        ):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                engine.requests.append(
                    (head, await reader.readexactly(int(length[1])) if length else b"")
                )
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    engine.url = "http://{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield engine
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def deaf_port() -> Iterator[str]:
    """A port whose connections never come about: its queue is full and nobody accepts."""
    with socket.socket() as listener, contextlib.ExitStack() as held:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)  # noqa: FBT003 (the socket's own signature)
            filler.connect_ex(listener.getsockname())
        yield "http://{}:{}".format(*listener.getsockname())


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    """Return a request as bytes; ``line`` is like ``GET /v1/x``."""
    length = [f"Content-Length: {len(body)}"] if body else []
    version = "" if " HTTP/" in line else " HTTP/1.1"
    head = [line + version, "Host: test", *headers, *length]
    return "\r\n".join([*head, "", ""]).encode() + body


async def exchange(url: str, data: bytes, *, until: bytes) -> bytes:
    """Send bytes and read until the answer contains ``until``, or the peer closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = b""
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            while until not in answer and (piece := await reader.read(1 << 16)):
                answer += piece
    finally:
        writer.close()
    return answer


@asynccontextmanager
async def deaf_client(url: str, data: bytes) -> AsyncIterator[socket.socket]:
    """Send bytes and never read: a client that takes nothing."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)  # noqa: FBT003 (the socket's own signature)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, (host, int(port)))
        await loop.sock_sendall(raw, data)
        yield raw


@asynccontextmanager
async def watched(app: web.Application) -> AsyncIterator[tuple[str, web.Server]]:
    """Serve an application as the components do; yield its URL, and who is connected."""
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, keepalive_timeout=75, shutdown_timeout=1
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        assert runner.server is not None
        yield "http://{}:{}".format(*runner.addresses[0]), runner.server
    finally:
        await runner.cleanup()
