"""The listener for other agents: an address of its own, with a token and TLS of its own."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from pydantic import SecretStr

from nearkv.agent.errors import PeerTlsError
from nearkv.agent.transfer.peer_api import MAX_BODY_BYTES, PeerApi
from nearkv.errors import ListenError
from nearkv.serving import require_bearer_token
from nearkv.settings.address import Address

_CLOSE_SECONDS = 1.0


def server_context(cert: Path, key: Path, ca: Path | None) -> ssl.SSLContext:
    """Return TLS for the listener; with ``ca`` peers must show a certificate of it.

    Raises :class:`PeerTlsError` naming what cannot be read.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
        if ca is not None:
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl's errors are such, too
        raise _tls_error(cert, key, ca, error) from error
    return context


def client_context(cert: Path, key: Path, ca: Path | None) -> ssl.SSLContext:
    """Return TLS for asking peers, with our own certificate; raises :class:`PeerTlsError`."""
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
        context.load_cert_chain(cert, key)
    except OSError as error:
        raise _tls_error(cert, key, ca, error) from error
    return context


def _tls_error(cert: Path, key: Path, ca: Path | None, error: OSError) -> PeerTlsError:
    return PeerTlsError(f"transfer.peer_tls: {cert}, {key}, {ca or 'no ca'}: {error}")


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
