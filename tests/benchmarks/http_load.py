"""A lean HTTP/1.1 load generator: prepared request bytes, keep-alive connections, timings.

Closed loop: each connection sends its next request when the answer to the last one is whole.
Understands Content-Length and chunked answers, and nothing else.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_DEADLINE_SECONDS = 120.0


@dataclass(slots=True)
class LoadResult:
    """What a run measured, in seconds; ``bursts`` is first to last byte of each answer."""

    latencies: list[float] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)
    failed: int = 0
    elapsed: float = 0.0

    @property
    def requests_per_second(self) -> float:
        """Answers per second of the whole run."""
        return len(self.latencies) / self.elapsed


def post_bytes(path: str, body: bytes) -> bytes:
    """Return a whole POST request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """One keep-alive connection that works through its requests."""

    def __init__(self, requests: Sequence[bytes], result: LoadResult, deadline: float) -> None:
        self._requests = requests
        self._result = result
        self._deadline = deadline
        self._next = 0
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._sent_at = 0.0
        self._first_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._buffer:
            self._first_at = now
        self._buffer += data
        if not _is_whole(self._buffer):
            return
        self._result.latencies.append(now - self._sent_at)
        self._result.bursts.append(now - self._first_at)
        self._result.failed += not self._buffer.startswith(b"HTTP/1.1 200")
        self._buffer = b""
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))

    def _send(self) -> None:
        assert self._transport is not None
        if self._next == len(self._requests) or time.perf_counter() > self._deadline:
            self.done.set_result(None)
            self._transport.close()
            return
        request = self._requests[self._next]
        self._next += 1
        self._sent_at = time.perf_counter()
        self._transport.write(request)


def _is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    lowered = head.lower()
    at = lowered.find(b"content-length:")
    if at >= 0:
        length = int(lowered[at + 15 :].split(b"\r\n", 1)[0])
        return len(body) >= length
    return body.endswith(b"0\r\n\r\n")


async def load(
    url: str, requests: Sequence[bytes], *, connections: int = 1, seconds: float = 1e9
) -> LoadResult:
    """Send requests over some connections, each taking its share, for at most ``seconds``."""
    host, _, port = url.removeprefix("http://").partition(":")
    loop: Any = asyncio.get_running_loop()
    result = LoadResult()
    start = time.perf_counter()
    waits = []
    for i in range(connections):
        share = requests[i::connections]
        _, protocol = await loop.create_connection(
            lambda share=share: _Connection(share, result, start + seconds), host, int(port)
        )
        waits.append(protocol.done)
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await asyncio.gather(*waits)
    result.elapsed = time.perf_counter() - start
    return result
