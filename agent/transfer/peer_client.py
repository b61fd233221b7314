"""Asking other agents. Every call has a deadline, and every answer a bound."""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

import aiohttp
import msgspec
import structlog
from pydantic import SecretStr

from nearkv.agent.transfer.peer_messages import (
    BODY_TYPE,
    LOOKUP,
    OPEN,
    PATH_PREFIX,
    PROBE,
    RELEASE,
    RENEW,
    WITHDRAW,
    OpenAnswer,
    PeerLookup,
    PeerOpen,
    PeerProbe,
    PeerRefusal,
    PeerRelease,
    PeerRenew,
    PeerWithdraw,
    ProbeAnswer,
    decode,
    encode,
    refusal_error,
)
from nearkv.agent.transfer.peer_urls import Network, check_peer_url
from nearkv.bounded_reading import AnswerTooLargeError, read_at_most
from nearkv.certificates import ClientCertificates, tls_options
from nearkv.http_failures import explain_failure
from nearkv.transfer.errors import ProtocolError, PullError, Reason, TransferError
from nearkv.transfer.packet import MAX_HEADER_BYTES

_MAX_ANSWER_BYTES = MAX_HEADER_BYTES + 4096
_MAX_CONNECTIONS = 128
_MAX_CONNECTIONS_PER_PEER = 16
_CLOSING_SECONDS = 2.0

log = structlog.get_logger(__name__)


class PeerClient:
    """Calls other agents, by their base URL. Must be closed."""

    def __init__(
        self,
        *,
        token: SecretStr | None = None,
        tls: ClientCertificates | None = None,
        networks: Sequence[Network] = (),
    ) -> None:
        self._tls = tls
        self._networks = networks
        headers = {"Content-Type": BODY_TYPE}
        if token is not None:
            headers["Authorization"] = f"Bearer {token.get_secret_value()}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            auto_decompress=False,
            connector=aiohttp.TCPConnector(
                limit=_MAX_CONNECTIONS, limit_per_host=_MAX_CONNECTIONS_PER_PEER
            ),
        )

    async def close(self) -> None:
        """Let go of all connections."""
        await self._session.close()

    async def lookup(self, url: str, request: PeerLookup, *, seconds: float) -> bytes:
        """Return the head of the state packet of a lease; raises :class:`TransferError`."""
        return await self._call(url, LOOKUP, request, seconds)

    async def open(self, url: str, request: PeerOpen, *, seconds: float) -> OpenAnswer:
        """Be let at the blocks of a lease; raises :class:`TransferError`."""
        return decode(await self._call(url, OPEN, request, seconds), OpenAnswer)

    async def probe(self, url: str, request: PeerProbe, *, seconds: float) -> ProbeAnswer:
        """Be let at bytes to measure the path with; raises :class:`TransferError`."""
        return decode(await self._call(url, PROBE, request, seconds), ProbeAnswer)

    async def renew(self, url: str, request: PeerRenew, *, seconds: float) -> None:
        """Give a lease its time again; raises :class:`TransferError`."""
        await self._call(url, RENEW, request, seconds)

    async def release(self, url: str, request: PeerRelease) -> None:
        """End a lease. Best effort: it ends by itself, if later."""
        await self._tell(url, RELEASE, request)

    async def withdraw(self, url: str, request: PeerWithdraw) -> None:
        """End what was granted. Best effort: it ends by itself, if later."""
        await self._tell(url, WITHDRAW, request)

    async def _tell(self, url: str, call: str, request: msgspec.Struct) -> None:
        try:
            await self._call(url, call, request, _CLOSING_SECONDS)
        except TransferError as error:
            log.info("peer_not_told", url=url, call=call, reason=error.reason, error=str(error))

    async def _call(self, url: str, call: str, request: msgspec.Struct, seconds: float) -> bytes:
        base = check_peer_url(url, tls=self._tls is not None, networks=self._networks)
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.post(
                    f"{base}{PATH_PREFIX}{call}",
                    data=encode(request),
                    allow_redirects=False,
                    **tls_options(self._tls),
                ) as answer,
            ):
                body = await read_at_most(answer, _MAX_ANSWER_BYTES)
        except TimeoutError as error:
            raise PullError(Reason.DEADLINE, f"{base}: no answer in time") from error
        except AnswerTooLargeError as error:
            raise PullError(Reason.TOO_LARGE, f"{base}: {error}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PullError(Reason.PEER_LOST, f"{base}: {explain_failure(error)}") from error
        if answer.status == HTTPStatus.OK:
            return body
        raise _refusal(base, answer.status, body)


def _refusal(base: str, status: int, body: bytes) -> TransferError:
    """Return a refusal as an error: the peer's own, or what its status says."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return PullError(Reason.AUTH, f"{base}: it wants another transfer.peer_token")
    try:
        return refusal_error(decode(body, PeerRefusal))
    except ProtocolError:
        return PullError(Reason.PEER_REFUSED, f"{base}: status {status}")
