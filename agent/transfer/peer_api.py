"""What this agent answers to other agents, and to the ingress that gives leases back."""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

import msgspec
import structlog
from aiohttp import web

from nearkv.agent.probes.answering import ProbeDesk
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.peer_messages import (
    BODY_TYPE,
    LOOKUP,
    OPEN,
    PATH_PREFIX,
    PROBE,
    RELEASE,
    RENEW,
    WITHDRAW,
    LeaseName,
    PeerLookup,
    PeerOpen,
    PeerProbe,
    PeerRefusal,
    PeerRelease,
    PeerRenew,
    PeerWithdraw,
    decode,
    encode,
)
from nearkv.agent.transfer.sourcing import SourceDesk
from nearkv.transfer.errors import ProtocolError, PullError, Reason, TransferError
from nearkv.transfer.packet import encode_head

MAX_BODY_BYTES = 64 << 10
PACKET_TYPE = "application/vnd.nearkv.packet"
_BODY_SECONDS = 5.0
_LONGEST_SECONDS = 30.0
_MAX_AT_ONCE = 256

M = TypeVar("M")
log = structlog.get_logger(__name__)


class PeerApi:
    """Handlers for other agents' calls, over what this node's engines hold."""

    def __init__(
        self,
        source: SourceDesk,
        metrics: TransferMetrics,
        *,
        key: bytes | None,
        probes: ProbeDesk | None = None,
    ) -> None:
        self._source = source
        self._metrics = metrics
        self._key = key
        self._probes = probes
        self._busy = 0

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to the peer listener's application."""
        for call, handler in (
            (LOOKUP, self._handler(LOOKUP, PeerLookup, self._lookup)),
            (OPEN, self._handler(OPEN, PeerOpen, self._open)),
            (RENEW, self._handler(RENEW, PeerRenew, self._renew)),
            (RELEASE, self._handler(RELEASE, PeerRelease, self._release)),
            (WITHDRAW, self._handler(WITHDRAW, PeerWithdraw, self._withdraw)),
            (PROBE, self._handler(PROBE, PeerProbe, self._probe)),
        ):
            app.router.add_post(PATH_PREFIX + call, handler)

    def _handler(
        self, call: str, kind: type[M], act: Callable[[M], Awaitable[bytes]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                body = await self._answer(request, kind, act)
            except TransferError as error:
                self._metrics.peer_called(call, error.reason)
                log.info("peer_refused", call=call, peer=request.remote, error=str(error))
                return _refusal(error)
            self._metrics.peer_called(call)
            media_type = PACKET_TYPE if call == LOOKUP else BODY_TYPE
            return web.Response(body=body, content_type=media_type)

        return handle

    async def _answer(
        self, request: web.Request, kind: type[M], act: Callable[[M], Awaitable[bytes]]
    ) -> bytes:
        if self._busy >= _MAX_AT_ONCE:
            raise PullError(Reason.BUSY, f"{_MAX_AT_ONCE} calls are under way already")
        self._busy += 1
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await request.read()
            message = decode(body, kind)
            async with asyncio.timeout(_LONGEST_SECONDS):
                return await act(message)
        except TimeoutError:
            raise PullError(Reason.DEADLINE, "it took too long") from None
        finally:
            self._busy -= 1

    async def _lookup(self, message: PeerLookup) -> bytes:
        seconds = max(0, message.wait_ms) / 1000
        manifest = await self._source.manifest(message, tenant=message.tenant, seconds=seconds)
        return encode_head(manifest, key=self._key)

    async def _open(self, message: PeerOpen) -> bytes:
        return encode(await self._source.open(message))

    async def _renew(self, message: PeerRenew) -> bytes:
        self._source.renew(message)
        return b""

    async def _release(self, message: PeerRelease) -> bytes:
        self._source.release(message, message.why)
        return b""

    async def _withdraw(self, message: PeerWithdraw) -> bytes:
        self._source.withdraw(message.ticket)
        if self._probes is not None:
            await self._probes.withdraw(message.ticket)
        return b""

    async def _probe(self, message: PeerProbe) -> bytes:
        if self._probes is None:
            raise PullError(Reason.PEER_REFUSED, "probes are off here")
        return encode(await self._probes.open(message))


class LeaseApi:
    """The main listener's call for whoever has seen a lease and needs it no more."""

    def __init__(self, source: SourceDesk) -> None:
        self._source = source

    async def release(self, request: web.Request) -> web.Response:
        """End the lease that the JSON body names; it may have ended before."""
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await request.read()
            name = msgspec.json.decode(body, type=LeaseName)
        except TimeoutError:
            raise web.HTTPRequestTimeout(text="the body did not come in time") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise web.HTTPBadRequest(text=f"want engine, epoch and lease: {error}") from error
        was_open = self._source.release(name, "aborted")
        return web.json_response({"released": was_open}, status=202 if was_open else 200)


def _refusal(error: TransferError) -> web.Response:
    status = HTTPStatus.CONFLICT
    if isinstance(error, ProtocolError):
        status = HTTPStatus.BAD_REQUEST
    elif error.reason is Reason.BUSY:
        status = HTTPStatus.SERVICE_UNAVAILABLE
    body = encode(PeerRefusal(reason=error.reason, message=str(error)))
    return web.Response(status=status, body=body, content_type=BODY_TYPE)
