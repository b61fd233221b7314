"""Where other nodes find the data, and behind what: the options of the movers' backends."""

import asyncio
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from nearkv.agent.settings import TransferSettings
from nearkv.errors import ListenError


async def backend_options(settings: TransferSettings) -> dict[str, dict[str, Any]]:
    """Return the options of backends that listen: where, what others are told, and TLS.

    Raises :class:`ListenError` when the host that others are told has no address.
    """
    host = settings.data_host or settings.peer_listen.host
    told = urlsplit(settings.peer_url or "").hostname or settings.peer_listen.host
    address = {"host": host, "advertise": await _resolve(told)}
    tcp: dict[str, Any] = dict(address)
    tls = settings.peer_tls
    if tls is not None:
        # Readers are told an address and not a name, so the CA alone has to do where there
        # is one of our own.
        tcp["tls"] = {
            "cert": str(tls.cert),
            "key": str(tls.key),
            "ca": str(tls.ca or ""),
            "check_host": tls.ca is None,
        }
    # Theirs is where readers ask; the bytes take what UCX finds, which no TLS of ours covers.
    return {"tcp": tcp, "ucx": address, "nixl": address}


async def _resolve(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ListenError(f"transfer.peer_url: {host} has no address: {error}") from error
    return str(found[0][4][0])
