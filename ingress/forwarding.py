"""Forwarding a request to an engine and its answer to the client.

The body goes through unchanged, both ways, with back-pressure. Nothing is sent to the client
before the engine's first body byte, so until then another engine can be tried. From then on
a failure ends the stream with a clear error.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import msgspec
from aiohttp import hdrs, web
from multidict import CIMultiDict

from nearkv.bounded_reading import join_at_most
from nearkv.ingress.answers import error_event, is_event_stream
from nearkv.ingress.engine_failures import FailureKind
from nearkv.ingress.errors import EngineFailedError, EngineTimeoutError
from nearkv.ingress.patience import Wait
from nearkv.ingress.settings import DeadlineSettings
from nearkv.ingress.tracing.context import TRACEPARENT_HEADER
from nearkv.ingress.upstream.answer import Answer
from nearkv.ingress.upstream.errors import NotReachedError
from nearkv.ingress.upstream.heads import Origin, encode_head, origin_of
from nearkv.ingress.upstream.pool import EnginePool
from nearkv.serving import cut_connection

_WHOLE_BODY_BYTES = 256 << 10
_TAIL_BYTES = 4096
_ORIGINS_KEPT = 16_384
_USAGE = re.compile(
    rb'"(?:(cached_tokens|cache_read_input_tokens)|(?:completion|output)_tokens)":\s*(\d{1,15})\b'
)
_RETRYABLE_STATUSES = frozenset({500, 502, 503, 504})
_WITH_BODY = frozenset({hdrs.METH_POST, hdrs.METH_PUT, hdrs.METH_PATCH})
"""Methods whose requests say so when their body is empty."""

_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip

_NOT_FORWARDED = _HOP_BY_HOP | {
    "content-encoding",  # the server has decoded the body
    "content-length",
    "expect",
    "host",
    # Headers that name hosts or ranks steer traffic behind the router: never from clients.
    "x-data-parallel-rank",
    "x-data-parallel-host-port",
    "x-encoder-hosts-ports",
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-kv-cache-source-host-port",
    "x-prefiller-host-port",
    "x-prefiller-url",
}
_NOT_RETURNED = _HOP_BY_HOP | {"content-length", "server", "date"}
_OURS = "x-nearkv-"


class Target(msgspec.Struct, frozen=True):
    """Where a request goes; ``traceparent`` takes the place of the client's, if not empty."""

    engine: str
    url: str
    dp_rank: int | None = None
    traceparent: str = ""


@dataclass(slots=True)
class Opened:
    """An engine's answer, begun: its first bytes are here. ``whole`` says that it is all here."""

    response: Answer
    first: bytes
    whole: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """An engine's whole answer to a request of our own."""

    status: int
    body: bytes


@dataclass(slots=True)
class Outcome:
    """How a forwarded answer ended; ``reported_cached_tokens`` is the engine's own count.

    So is ``output_tokens``; ``chunks`` are the pieces that a streamed answer came in.

    ``writing`` says that the client is being waited for, not the engine.
    """

    reported_cached_tokens: int | None = None
    output_tokens: int | None = None
    chunks: int | None = None
    error: str | None = None
    writing: bool = False


class RetryableFailureError(Exception):
    """The engine failed before its first byte; another one may do better.

    ``opened`` is its answer, where it gave one that could be passed on instead.
    """

    def __init__(self, message: str, kind: FailureKind, opened: Opened | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.opened = opened

    def discard(self) -> None:
        """Let go of the answer that nobody gets."""
        if self.opened is not None:
            self.opened.response.close()


class Forwarder:
    """Sends requests to engines over one connection pool.

    With ``keeps_keys`` clients' API keys are the ingress's to check, so engines do not see
    them, but ``own_key``, if there is one.
    """

    def __init__(
        self,
        pool: EnginePool,
        deadlines: DeadlineSettings,
        *,
        own_key: str | None = None,
        keeps_keys: bool = False,
    ) -> None:
        self._pool = pool
        self._own_key = own_key
        self._keeps_keys = keeps_keys
        self._deadlines = deadlines
        self._origins: dict[str, Origin] = {}

    async def open(
        self,
        request: web.Request,
        body: bytes,
        target: Target,
        request_id: str,
        wait: Wait | None = None,
    ) -> Opened:
        """Send a request and wait for the first bytes of the answer.

        Raises :class:`RetryableFailureError`, or :class:`EngineTimeoutError` when the engine
        took the request and kept silent (trying again would double the work). ``wait`` lets
        others end it early.
        """
        seconds = self._deadlines.first_byte_seconds
        try:
            answer = await self._begin(request, body, target, request_id)
            deadline = _end_after(answer, seconds, wait)
            try:
                opened = await _first_bytes(answer)
                answer.be_in_time()
            except BaseException:
                answer.close()
                raise
            finally:
                deadline.cancel()
        except TimeoutError as error:
            if wait is not None and wait.why is not None:
                raise RetryableFailureError("it was silent for too long", wait.why) from error
            raise EngineTimeoutError(
                f"engine {target.engine} sent nothing for {seconds:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise RetryableFailureError(
                f"{type(error).__name__}: {error}", failure_kind(error)
            ) from error
        return _checked(opened)

    async def ask(  # noqa: PLR0913 - keyword-only, but the request and its body
        self,
        request: web.Request,
        body: bytes,
        *,
        target: Target,
        request_id: str,
        deadline_seconds: float,
        limit_bytes: int,
        wait: Wait | None = None,
    ) -> Asked:
        """Send a request for ourselves and return its whole answer, if that is in time.

        The answer comes plain: the client's wish for a coding is not passed on. The
        connection is closed however this ends early, which has the engine drop the request.
        Raises ``TimeoutError``, ``aiohttp.ClientError`` (``AnswerTooLargeError`` among them)
        and ``OSError``.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_seconds
        answer = await self._begin(
            request, body, target, request_id, plain=True, seconds=deadline_seconds
        )
        deadline = _end_after(answer, until - loop.time(), wait)
        try:
            await answer.begun()
            return Asked(answer.status, await join_at_most(answer.parts(), limit_bytes))
        finally:
            deadline.cancel()
            # A connection that was read to its end is already back in the pool.
            answer.close()

    async def _begin(
        self,
        request: web.Request,
        body: bytes,
        target: Target,
        request_id: str,
        *,
        plain: bool = False,
        seconds: float | None = None,
    ) -> Answer:
        """Send a request, over a new connection if need be; raises ``NotReachedError``."""
        headers = self._headers(request, request_id, target)
        if plain:
            headers.popall(hdrs.ACCEPT_ENCODING, None)
        origin = self._origin_of(target.url)
        method = request.method
        length = len(body) if body or method in _WITH_BODY else None
        head = encode_head(method, origin, _path_of(request), headers.items(), length)
        connection = self._pool.take(origin)
        if connection is None:
            connection = await self._pool.connect(origin, seconds)
        return connection.send(method, head, body)

    def _headers(self, request: web.Request, request_id: str, target: Target) -> CIMultiDict[str]:
        headers = forwarded_headers(request.headers.items(), request_id, target.dp_rank)
        if target.traceparent:
            headers[TRACEPARENT_HEADER] = target.traceparent
        if self._keeps_keys:
            headers.popall(hdrs.AUTHORIZATION, None)
            headers.popall("X-Api-Key", None)
            if self._own_key is not None:
                headers[hdrs.AUTHORIZATION] = f"Bearer {self._own_key}"
        return headers

    def _origin_of(self, url: str) -> Origin:
        """Return where an engine's URL leads, parsed once."""
        origin = self._origins.get(url)
        if origin is None:
            if len(self._origins) >= _ORIGINS_KEPT:
                self._origins.clear()
            try:
                origin = self._origins[url] = origin_of(url)
            except ValueError as error:
                raise NotReachedError(str(error)) from error
        return origin

    async def relay(
        self,
        request: web.Request,
        opened: Opened,
        headers: dict[str, str],
        outcome: Outcome,
        *,
        first_byte: Callable[[], None],
    ) -> web.StreamResponse:
        """Pass an opened answer on to the client; closes it in any case."""
        try:
            returned = returned_headers(opened.response.headers.items(), headers)
            if opened.whole:
                first_byte()
                outcome.reported_cached_tokens, outcome.output_tokens = reported_tokens(
                    opened.first
                )
                if request.method == hdrs.METH_HEAD and opened.response.content_length:
                    # Of the body that a GET would bring; the library would say 0.
                    returned[hdrs.CONTENT_LENGTH] = str(opened.response.content_length)
                return web.Response(
                    status=opened.response.status, body=opened.first, headers=returned
                )
            return await self._stream(request, opened, returned, outcome, first_byte)
        finally:
            # A connection that was read to its end is already back in the pool.
            opened.response.close()

    async def _stream(
        self,
        request: web.Request,
        opened: Opened,
        headers: CIMultiDict[str],
        outcome: Outcome,
        first_byte: Callable[[], None],
    ) -> web.StreamResponse:
        answer = web.StreamResponse(status=opened.response.status, headers=headers)
        if opened.response.content_length is not None:
            answer.content_length = opened.response.content_length
        await answer.prepare(request)
        first_byte()
        try:
            tail = await self._copy(opened, answer, outcome)
            outcome.reported_cached_tokens, outcome.output_tokens = reported_tokens(tail)
        except (aiohttp.ClientPayloadError, TimeoutError) as error:
            outcome.error = _cause(error, outcome)
            await self._end_broken(request, answer, outcome.error)
        except ConnectionError:
            outcome.error = "client_gone"
        return answer

    async def _copy(self, opened: Opened, answer: web.StreamResponse, outcome: Outcome) -> bytes:
        """Copy chunks as they come; the deadline runs anew with each of them.

        A client that takes nothing for that long counts as gone too, the end of the answer
        included. Returns the last bytes.
        """
        loop = asyncio.get_running_loop()
        idle_seconds = self._deadlines.idle_seconds
        tail = last = opened.first
        outcome.chunks = 1
        async with asyncio.timeout(idle_seconds) as deadline:
            outcome.writing = True
            await answer.write(opened.first)
            outcome.writing = False
            while chunk := await opened.response.read_some():
                deadline.reschedule(loop.time() + idle_seconds)
                outcome.writing = True
                await answer.write(chunk)
                outcome.writing = False
                tail, last = last, chunk
                outcome.chunks += 1
            deadline.reschedule(loop.time() + idle_seconds)
            outcome.writing = True
            await answer.write_eof()
        return (tail[-_TAIL_BYTES:] + last)[-_TAIL_BYTES:]

    async def _end_broken(
        self, request: web.Request, answer: web.StreamResponse, cause: str
    ) -> None:
        """End a stream that broke: an error event where the client reads events.

        Any other body cannot say so, nor one whose length or coding is promised; its connection
        is cut, so that nobody takes a part for the whole.
        """
        may_add = answer.content_length is None and hdrs.CONTENT_ENCODING not in answer.headers
        if cause != "client_stalled" and may_add and is_event_stream(answer.content_type):
            error = (
                EngineTimeoutError("the engine stopped sending in the middle of the answer")
                if cause == "engine_timeout"
                else EngineFailedError("the engine failed in the middle of the answer")
            )
            try:
                async with asyncio.timeout(self._deadlines.connect_seconds):
                    await answer.write(error_event(error, request.path))
                    await answer.write_eof()
            except (ConnectionError, TimeoutError):
                cut_connection(request)
        else:
            cut_connection(request)


def failure_kind(error: Exception) -> FailureKind:
    """Tell whether a request reached the engine before it failed."""
    return FailureKind.UNREACHABLE if isinstance(error, NotReachedError) else FailureKind.BROKEN


def _end_after(answer: Answer, seconds: float, wait: Wait | None) -> asyncio.TimerHandle:
    """Let waiting for an answer end by ``TimeoutError`` after this long, or by others' word."""
    if wait is not None:
        wait.answer = answer
    return asyncio.get_running_loop().call_later(seconds, answer.be_overdue, TimeoutError())


async def _first_bytes(answer: Answer) -> Opened:
    await answer.begun()
    length = answer.content_length
    if length is not None and length <= _WHOLE_BODY_BYTES:
        return Opened(answer, await answer.read(), whole=True)
    first = await answer.read_some()
    return Opened(answer, first, whole=not first)


def _checked(opened: Opened) -> Opened:
    """Return an answer that is the client's; raises :class:`RetryableFailureError`."""
    status = opened.response.status
    if status == HTTPStatus.SWITCHING_PROTOCOLS:
        opened.response.close()
        raise RetryableFailureError(
            "it switched protocols, which nobody asked for", FailureKind.BROKEN
        )
    if status in _RETRYABLE_STATUSES:
        raise RetryableFailureError(f"status {status}", FailureKind.STATUS, opened)
    return opened


def _cause(error: Exception, outcome: Outcome) -> str:
    if not isinstance(error, TimeoutError):
        return "engine_died"
    return "client_stalled" if outcome.writing else "engine_timeout"


def _path_of(request: web.Request) -> str:
    path = request.raw_path
    if not path.startswith("/"):  # absolute-form (RFC 9112, 3.2.2), which names a host
        path = str(request.rel_url)
    return path.partition("#")[0]


def forwarded_headers(
    headers: Iterable[tuple[str, str]], request_id: str, dp_rank: int | None
) -> CIMultiDict[str]:
    """Return the client's headers less what is hop-by-hop or names hosts."""
    kept: CIMultiDict[str] = CIMultiDict()
    named: list[str] = []
    for name, value in headers:
        lowered = name.lower()
        if lowered not in _NOT_FORWARDED and not lowered.startswith(_OURS):
            kept.add(name, value)
        elif lowered == "connection":
            named += value.split(",")
    for name in named:  # what Connection names is hop-by-hop too (RFC 9110, 7.6.1)
        kept.popall(name.strip(), None)
    kept["X-Request-Id"] = request_id
    if dp_rank is not None:
        kept["X-data-parallel-rank"] = str(dp_rank)
    return kept


def returned_headers(headers: Iterable[tuple[str, str]], ours: dict[str, str]) -> CIMultiDict[str]:
    """Return the engine's headers less what is hop-by-hop, and our own."""
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        if name.lower() not in _NOT_RETURNED:
            kept.add(name, value)
    kept.update(ours)
    return kept


def reported_tokens(tail: bytes) -> tuple[int | None, int | None]:
    """Return the prompt tokens found in the cache and the tokens answered, where they are told.

    That is ``cached_tokens`` among the details of usage, or Anthropic's field for it, and
    ``completion_tokens`` or ``output_tokens``; the last of each counts.
    """
    cached = output = None
    for is_cached, digits in _USAGE.findall(tail):
        if is_cached:
            cached = int(digits)
        else:
            output = int(digits)
    return cached, output
