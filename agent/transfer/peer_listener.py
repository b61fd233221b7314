"""The listener for other agents: an address of its own, with a token and TLS of its own."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from pydantic import SecretStr

from nearkv.agent.errors import PeerTlsError
from nearkv.agent.settings import PeerTlsSettings
from nearkv.agent.transfer.metrics import TransferMetrics
from nearkv.agent.transfer.peer_api import MAX_BODY_BYTES, PeerApi
from nearkv.certificates import Certificates, ClientCertificates
from nearkv.errors import CertificateError, ListenError
from nearkv.serving import require_bearer_token
from nearkv.settings.address import Address

_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PeerTls:
    """What agents serve each other with, and what they ask with."""

    server: Certificates
    client: ClientCertificates


def load_peer_tls(settings: PeerTlsSettings, metrics: TransferMetrics) -> PeerTls:
    """Return TLS between agents; raises :class:`PeerTlsError` naming what cannot be read."""
    try:
        return PeerTls(
            Certificates(
                settings.served,
                count=metrics.certificate_loaded,
                count_handshake=metrics.handshake_failed,
            ),
            ClientCertificates(settings.shown, count=metrics.certificate_loaded),
        )
    except CertificateError as error:
        raise PeerTlsError(f"transfer.peer_tls: {error}") from error


@asynccontextmanager
async def listening_for_peers(
    api: PeerApi, address: Address, *, token: SecretStr | None, tls: ssl.SSLContext | None
) -> AsyncIterator[Address]:
    """Serve other agents within the block; yields the address in use.

    Raises ``ListenError`` when the address cannot be listened on.
    """
    app = web.Application(middlewares=[require_bearer_token(token)], client_max_size=MAX_BODY_BYTES)
    api.add_routes(app)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_SECONDS
    )
    try:
        await runner.setup()
        site = web.TCPSite(runner, address.host, address.port, reuse_address=True, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ListenError(f"cannot listen on {address} for peers: {reason}") from error
        host, port, *_ = runner.addresses[0]
        yield Address(host, port)
    finally:
        await runner.cleanup()
