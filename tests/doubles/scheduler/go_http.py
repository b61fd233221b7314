"""Go's HTTP client as an extender meets it: one POST at a time over kept-alive connections.

An idle connection is used again for 90 s, two are kept for a host. Go notices a close that arrives
while a connection is idle, and dials anew; a close that crosses the POST on the wire fails the
call, since a POST is not sent twice. ``notices_close=False`` plays that second case for every
closed connection.
"""

import asyncio
import gzip
import ssl
import zlib
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.doubles.scheduler.clocks import Now

IDLE_SECONDS = 90.0
_IDLE_PER_HOST = 2
_HEAD_LIMIT_BYTES = 1 << 20
_WITHOUT_BODY = frozenset({204, 304})


class TransportError(Exception):
    """No answer came; ``reason`` is timeout, refused, closed or malformed."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Reply:
    """An answer: its status and its body, unpacked."""

    status: int
    body: bytes


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: int = 0
    idle_since: float = 0.0

    def close(self) -> None:
        self.writer.close()


@dataclass(slots=True)
class GoHttpClient:
    """A client with a pool; ``dialled`` counts connections, ``calls`` requests."""

    timeout_seconds: float
    now: Now
    tls: ssl.SSLContext | None = None
    notices_close: bool = True
    dialled: int = 0
    calls: int = 0
    _idle: dict[tuple[str, int], list[_Connection]] = field(default_factory=dict)

    async def post(self, url: str, body: bytes) -> Reply:
        """Post JSON; raises :class:`TransportError`."""
        self.calls += 1
        try:
            async with asyncio.timeout(self.timeout_seconds):
                return await self._exchange(url, body)
        except TimeoutError as error:
            raise TransportError(
                f'Post "{url}": context deadline exceeded (Client.Timeout exceeded)', "timeout"
            ) from error

    def close(self) -> None:
        """Close idle connections."""
        for pool in self._idle.values():
            for connection in pool:
                connection.close()
        self._idle.clear()

    async def _exchange(self, url: str, body: bytes) -> Reply:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise TransportError(f'Post "{url}": unsupported protocol scheme', "refused")
        place = (parts.hostname, parts.port or (443 if secure else 80))
        connection = await self._acquire(place, secure=secure, url=url)
        head = (
            f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"User-Agent: Go-http-client/1.1\r\nContent-Length: {len(body)}\r\n"
            "Content-Type: application/json\r\nAccept-Encoding: gzip\r\n\r\n"
        )
        keep = False
        try:
            connection.writer.write(head.encode() + body)
            # Not drained: an answer may come, and count, before the body was taken.
            reply, keep = await _read_reply(connection.reader)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, zlib.error) as error:
            raise _broken(url, connection, error) from error
        finally:
            if keep:
                self._release(place, connection)
            else:
                connection.close()
        return reply

    async def _acquire(self, place: tuple[str, int], *, secure: bool, url: str) -> _Connection:
        pool = self._idle.get(place, [])
        while pool:
            connection = pool.pop()
            too_old = self.now() - connection.idle_since >= IDLE_SECONDS
            if too_old or (self.notices_close and connection.reader.at_eof()):
                connection.close()
                continue
            return connection
        tls = (self.tls or ssl.create_default_context()) if secure else None
        try:
            reader, writer = await asyncio.open_connection(*place, ssl=tls, limit=_HEAD_LIMIT_BYTES)
        except OSError as error:
            raise TransportError(f'Post "{url}": dial tcp: {error}', "refused") from error
        self.dialled += 1
        return _Connection(reader, writer)

    def _release(self, place: tuple[str, int], connection: _Connection) -> None:
        connection.used += 1
        connection.idle_since = self.now()
        pool = self._idle.setdefault(place, [])
        if len(pool) >= _IDLE_PER_HOST:
            connection.close()
        else:
            pool.append(connection)


def _broken(url: str, connection: _Connection, error: Exception) -> TransportError:
    if not isinstance(error, OSError | EOFError):
        return TransportError(f'Post "{url}": malformed HTTP response: {error}', "malformed")
    what = "http: server closed idle connection" if connection.used else "EOF"
    return TransportError(f'Post "{url}": {what}', "closed")


async def _read_reply(reader: asyncio.StreamReader) -> tuple[Reply, bool]:
    """Read an answer; return it and whether the connection can be used again."""
    status = 100
    headers: dict[str, str] = {}
    while status < 200:  # 1xx come before the answer
        head = await _read_head(reader)
        version, _, rest = head[0].partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(head[0][:40])
        status = int(rest[:3])
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:])
        }
    keep = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    if status in _WITHOUT_BODY:
        return Reply(status, b""), keep
    body, delimited = await _read_body(reader, headers)
    if headers.get("content-encoding") == "gzip":
        body = gzip.decompress(body)
    return Reply(status, body), keep and delimited


async def _read_head(reader: asyncio.StreamReader) -> list[str]:
    head = await reader.readuntil(b"\r\n\r\n")
    return head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> tuple[bytes, bool]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunks(reader), True
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"])), True
    return await reader.read(), False


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return b"".join(parts)
