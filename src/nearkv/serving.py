"""Serve an aiohttp application until told to stop, and stop with manners.

Shutdown order: readiness turns false, the server keeps answering while requests are in
flight (at most ``drain_seconds``), then it closes. A second signal closes at once.
"""

import asyncio
import hmac
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import SecretStr

from nearkv.errors import ListenError
from nearkv.half_closing import HalfClosingRunner
from nearkv.health import HEALTH_PATHS, Readiness
from nearkv.server_log import ServerLog
from nearkv.settings.address import Address

T = TypeVar("T")
_KEEPALIVE_SECONDS = 75.0
_CLOSE_SECONDS = 1.0
_READ_BUFFER_BYTES = 1 << 18
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Transport:
    """How connections are served.

    ``keepalive_seconds`` is how long an idle connection stays open; it has to outlast the
    clients' own idle time, or they send a request into a connection that is being closed.
    ``read_buffer_bytes`` is how much of a body is taken in before a handler must read it.
    With ``answer_half_closed`` a client that will send no more still gets its answer; it cannot
    be told from one that went away, so handlers then find out when they answer.
    """

    keepalive_seconds: float = _KEEPALIVE_SECONDS
    read_buffer_bytes: int = _READ_BUFFER_BYTES
    answer_half_closed: bool = False
    tls: ssl.SSLContext | None = None

    def url_of(self, address: Address) -> str:
        """Return the base URL of an address that is served so."""
        return address.url if self.tls is None else f"https://{address}"


_PLAIN = Transport()


class StopRequest:
    """A wish to stop: the first asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self._drain = asyncio.Event()
        self._abort = asyncio.Event()

    def request(self) -> None:
        """Ask for a drain, or, when that was asked for before, for an end at once."""
        (self._abort if self._drain.is_set() else self._drain).set()

    async def wait_for_drain(self) -> None:
        """Return at the first request."""
        await self._drain.wait()

    async def wait_for_abort(self) -> None:
        """Return at the second request."""
        await self._abort.wait()


class InFlight:
    """Knows the requests whose handler has not returned, streams included.

    Either :meth:`middleware` counts for a whole application, or a handler does it itself
    by :meth:`enter` and :meth:`leave`: aiohttp runs applications without any middleware on
    a shorter path.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def middleware(self) -> Middleware:
        """Return the middleware that counts; it belongs before all others."""

        @web.middleware
        async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.enter(request)
            try:
                return await handler(request)
            finally:
                self.leave(request)

        return count_requests

    def enter(self, request: web.Request) -> None:
        """Count a request whose handler begins."""
        if not self._tasks:
            self._idle.clear()
        self._tasks.add(request.task)

    def leave(self, request: web.Request) -> None:
        """Count a request off, however its handler ended."""
        self._tasks.discard(request.task)
        if not self._tasks:
            self._idle.set()

    @property
    def count(self) -> int:
        """How many requests are in flight."""
        return len(self._tasks)

    def cancel(self) -> None:
        """Cancel the handlers of all requests in flight."""
        for task in self._tasks:
            task.cancel()

    async def wait_until_idle(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()


@asynccontextmanager
async def running(
    app: web.Application,
    address: Address,
    *,
    close_seconds: float = _CLOSE_SECONDS,
    transport: Transport = _PLAIN,
) -> AsyncIterator[Address]:
    """Serve ``app`` inside the block; yield the address in use, name and port 0 resolved.

    Handlers are cancelled when their client goes away, so that nobody computes for a
    closed connection. On exit, handlers still running get ``close_seconds``, then are
    cancelled. Raises ``ListenError`` when the address cannot be listened on.
    """
    runner_class = HalfClosingRunner if transport.answer_half_closed else web.AppRunner
    runner = runner_class(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=ServerLog(),
        keepalive_timeout=transport.keepalive_seconds,
        shutdown_timeout=close_seconds,
        read_bufsize=transport.read_buffer_bytes,
    )
    try:
        await runner.setup()
        site = web.TCPSite(
            runner, address.host, address.port, reuse_address=True, ssl_context=transport.tls
        )
        await _listen(site, address)
        host, port, *_ = runner.addresses[0]
        yield Address(host, port)
    finally:
        await runner.cleanup()


async def serve(  # noqa: PLR0913 - keyword-only, and only three are required
    app: web.Application,
    *,
    address: Address,
    readiness: Readiness,
    drain_seconds: float = 30.0,
    transport: Transport = _PLAIN,
    stop: StopRequest | None = None,
    in_flight: InFlight | None = None,
    on_listening: Callable[[Address], None] | None = None,
) -> None:
    """Serve ``app`` until SIGTERM or SIGINT (or ``stop``), then drain and close.

    Logs ``listening`` with the address in use (and hands it to ``on_listening``),
    ``draining``, ``stopping`` with the number of requests that it abandons, and
    ``stopped``. With ``in_flight`` given, the handlers that a drain waits for count
    themselves. Raises ``ListenError`` when the address cannot be listened on.
    """
    stop = stop or StopRequest()
    if in_flight is None:
        in_flight = InFlight()
        app.middlewares.insert(0, in_flight.middleware())
    with _stopping_on_signals(stop):
        async with running(app, address, transport=transport) as actual:
            _log.info("listening", address=str(actual), url=transport.url_of(actual))
            if on_listening is not None:
                on_listening(actual)
            await stop.wait_for_drain()
            readiness.start_draining()
            _log.info("draining", in_flight=in_flight.count, drain_seconds=drain_seconds)
            await _first_of(
                [in_flight.wait_until_idle(), stop.wait_for_abort()], timeout_seconds=drain_seconds
            )
            _log.info("stopping", abandoned=in_flight.count)
            # aiohttp would give each handler more time and not wait for its cancellation.
            in_flight.cancel()
            await _first_of([in_flight.wait_until_idle()], timeout_seconds=_CLOSE_SECONDS)
    _log.info("stopped")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program's coroutine on uvloop where it can be imported, else on asyncio."""
    uvloop = _uvloop()
    factory = None if uvloop is None else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def require_bearer_token(
    token: SecretStr | None, *, open_paths: Collection[str] = HEALTH_PATHS
) -> Middleware:
    """Return a middleware that answers 401 without ``Authorization: Bearer <token>``.

    ``None`` lets everything pass. ``open_paths`` are exact paths that need no token. The
    comparison takes the same time wherever the first difference is. Raises
    ``ValueError`` for an empty token, which is a secret that failed to arrive.
    """
    if token is not None and not token.get_secret_value():
        raise ValueError("the bearer token is empty; leave it unset to serve without one")
    expected = None if token is None else token.get_secret_value().encode()
    opened = frozenset(open_paths)

    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is None or request.path in opened:
            return await handler(request)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        presented = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "bearer" and hmac.compare_digest(presented, expected):
            return await handler(request)
        challenge = 'Bearer realm="nearkv"' + (', error="invalid_token"' if given else "")
        message = "the bearer token is wrong" if given else "a bearer token is required"
        return _unauthorized(message, challenge=challenge)

    return check_token


def require_client_certificate(*, open_paths: Collection[str] = HEALTH_PATHS) -> Middleware:
    """Return a middleware that answers 401 where the client's connection has no certificate.

    For servers whose TLS takes clients without one, for the sake of ``open_paths``.
    """
    opened = frozenset(open_paths)

    @web.middleware
    async def check_certificate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in opened or request.get_extra_info("peercert"):
            return await handler(request)
        return _unauthorized("a client certificate is required", challenge=None)

    return check_certificate


def guard_with_token(handler: Handler, token: SecretStr | None) -> Handler:
    """Return one handler behind a bearer token, for applications that are open otherwise.

    A middleware or a sub-application would cost every request of a busy server.
    """
    if token is None:
        return handler
    check = require_bearer_token(token, open_paths=())

    async def guarded(request: web.Request) -> web.StreamResponse:
        return await check(request, handler)

    return guarded


def cut_connection(request: web.BaseRequest) -> None:
    """Break a client's connection at once, whatever is still buffered for it.

    Closing would wait for a client that takes nothing, for ever.
    """
    if request.transport is not None:
        request.transport.abort()


def _unauthorized(message: str, *, challenge: str | None) -> web.Response:
    error = {"message": message, "type": "authentication_error", "param": None, "code": None}
    headers = {} if challenge is None else {"WWW-Authenticate": challenge}
    return web.json_response({"error": error}, status=401, headers=headers)


async def _listen(site: web.TCPSite, address: Address) -> None:
    try:
        await site.start()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ListenError(f"cannot listen on {address}: {reason}") from error


@contextmanager
def _stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.request)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _first_of(waits: Sequence[Coroutine[Any, Any, None]], *, timeout_seconds: float) -> None:
    """Return when one of the waits is over, or after the timeout."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _uvloop() -> ModuleType | None:
    try:
        import uvloop  # noqa: PLC0415 - absent on some platforms
    except ImportError:
        return None
    return uvloop
