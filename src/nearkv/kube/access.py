"""Requests to the API server: one HTTP session, credentials kept current.

Credentials are loaded and renewed in a thread of their own, one at a time, with a deadline: an
exec plugin may hang. They are loaded anew after a 401 or a failed TLS handshake, which is how
rotated client certificates and CAs are noticed.
"""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import aiohttp
import structlog

from nearkv._version import __version__
from nearkv.bounded_reading import read_at_most
from nearkv.keepalive import probed_socket
from nearkv.kube.credentials import Endpoint, Loader, automatic, plain
from nearkv.kube.errors import AccessError, ApiError, Trouble
from nearkv.kube.failing import naming_failures, refusal

T = TypeVar("T")
_ERROR_BYTES = 64 << 10
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AccessLimits:
    """Deadlines in seconds, and how many connections may be open at once.

    ``renew_seconds`` is the shortest time between two looks at the credentials,
    ``reload_seconds`` that between two loads of everything after a refusal.
    """

    connect_seconds: float = 5.0
    credential_seconds: float = 30.0
    renew_seconds: float = 10.0
    reload_seconds: float = 5.0
    connections: int = 32


class ApiAccess:
    """Access to one API server; use as ``async with ApiAccess(loader) as access``."""

    def __init__(
        self,
        load: Loader,
        *,
        limits: AccessLimits | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an access; loaders are in :mod:`nearkv.kube.credentials`."""
        self._load = load
        self._limits = limits or AccessLimits()
        self._now = now
        self._session: aiohttp.ClientSession | None = None
        self._endpoint: Endpoint | None = None
        self._authorization = ""
        self._loaded_at = self._renewed_at = float("-inf")
        self._is_refused = False
        self._renewal: asyncio.Task[AccessError | None] | None = None

    @classmethod
    def automatic(cls, kubeconfig: str = "", context: str = "") -> Self:
        """Return the access by a kubeconfig that was named, else by the pod's service account."""
        return cls(automatic(kubeconfig, context))

    @classmethod
    def plain(cls, url: str, token: str = "") -> Self:
        """Return the access by a URL without any configuration, for tests above all."""
        return cls(plain(url, token))

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._limits.connections, socket_factory=_keep_alive_socket
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept": "application/json", "User-Agent": f"nearkv/{__version__}"},
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def request(  # noqa: PLR0913 (keyword-only, and each is a property of the request)
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        total_seconds: float | None = None,
        silence_seconds: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; yield the response if it is a success, body not read yet.

        ``path`` begins with ``/api``. ``silence_seconds`` bounds the wait for each piece of the
        answer. Raises :class:`ApiError` when there is no answer, or one that is no success. What
        reading the body raises is the caller's to name, with ``naming_failures``.
        """
        if self._session is None:
            raise RuntimeError("the access is not open: use `async with`")
        endpoint = await self._current()
        headers = {"Authorization": self._authorization} if self._authorization else {}
        if body is not None:
            headers["Content-Type"] = content_type
        with naming_failures():
            try:
                response = await self._session.request(
                    method,
                    endpoint.url + path,
                    params=params,
                    data=body,
                    headers=headers,
                    # Another address must never see the token.
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(
                        total=total_seconds,
                        connect=self._limits.connect_seconds,
                        sock_read=silence_seconds,
                    ),
                    **_route(endpoint),
                )
            except aiohttp.ClientSSLError:
                self._is_refused = True
                raise
        async with response:
            if not response.ok or response.status >= 300:  # noqa: PLR2004 (HTTP's redirects)
                raise await self._refusal(response)
            yield response

    async def read(
        self,
        method: str,
        path: str,
        *,
        limit_bytes: int,
        **options: Any,  # noqa: ANN401 (those of `request`)
    ) -> bytes:
        """Send a request and return its answer's body; options are those of :meth:`request`.

        Raises :class:`ApiError`, with ``TOO_LARGE`` for a body over its limit.
        """
        async with self.request(method, path, **options) as response:
            with naming_failures():
                return await read_at_most(response, limit_bytes)

    async def _refusal(self, response: aiohttp.ClientResponse) -> ApiError:
        self._is_refused |= response.status == 401  # noqa: PLR2004 (HTTP's)
        body = b""
        with suppress(aiohttp.ClientError, OSError):
            body = await read_at_most(response, _ERROR_BYTES)
        return refusal(response.status, body, response.headers.get("Retry-After"))

    async def _current(self) -> Endpoint:
        """Return the endpoint, loaded or renewed when it is time to."""
        if self._endpoint is None or self._must_reload() or self._must_renew():
            if self._renewal is None or self._renewal.done():
                self._renewal = asyncio.create_task(self._renew())
            try:
                async with asyncio.timeout(self._limits.credential_seconds):
                    error = await asyncio.shield(self._renewal)
            except TimeoutError as late:
                raise ApiError(
                    Trouble.CREDENTIALS, "the credentials did not come in time"
                ) from late
            if error is not None:
                raise ApiError(Trouble.CREDENTIALS, str(error)) from error
        assert self._endpoint is not None  # noqa: S101 (set by a renewal without an error)
        return self._endpoint

    def _must_reload(self) -> bool:
        return self._is_refused and self._now() >= self._loaded_at + self._limits.reload_seconds

    def _must_renew(self) -> bool:
        return self._now() >= self._renewed_at + self._limits.renew_seconds

    async def _renew(self) -> AccessError | None:
        """Load or renew; an error is returned, since nobody may be left who waits for it."""
        endpoint = self._endpoint
        try:
            if endpoint is None or self._must_reload():
                self._loaded_at = self._now()
                endpoint = await _in_thread(self._load)
                if endpoint.is_anonymous:
                    _log.warning("no_credentials_for_api_server", url=endpoint.url)
                self._endpoint = None
            if endpoint.authorization is not None:
                self._authorization = await _in_thread(endpoint.authorization)
        except AccessError as error:
            if self._endpoint is None or self._is_refused:
                return error
            # The token at hand may be good for long; if it is not, a 401 will tell.
            _log.warning("token_not_renewed", error=str(error))
        else:
            if self._endpoint is None:
                self._is_refused = False
            self._endpoint = endpoint
        self._renewed_at = self._now()
        return None


def _keep_alive_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket that notices within a minute that its other end is gone.

    A watch may be quiet for longer, and a load balancer may forget it without a word.
    """
    return probed_socket(address, after_seconds=30, every_seconds=10, probes=3)


def _route(endpoint: Endpoint) -> dict[str, Any]:
    route: dict[str, Any] = {"proxy": endpoint.proxy, "server_hostname": endpoint.server_hostname}
    if endpoint.tls is not None:
        route["ssl"] = endpoint.tls
    return route


async def _in_thread(function: Callable[[], T]) -> T:
    """Return what a blocking function returns.

    It runs in a thread that the process does not wait for at its end, unlike those of a pool.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settle_with: Callable[[], None]) -> None:
        if not done.done():
            settle_with()

    def work() -> None:
        try:
            settle_with = partial(done.set_result, function())
        except Exception as error:  # noqa: BLE001 (raised where it is waited for)
            settle_with = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, settle_with)

    threading.Thread(target=work, name="kube-credentials", daemon=True).start()
    return await done
