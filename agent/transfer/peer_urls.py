"""Which agents may be asked: their addresses come with requests, so they are checked (pure).

A lease's address passes through routers and clients. An agent shows its token to whom it
asks, so it asks none but what the settings allow.
"""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from nearkv.transfer.errors import PullError, Reason

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_MAX_URL_LENGTH = 512


def check_peer_url(url: str, *, tls: bool, networks: Sequence[Network] = ()) -> str:
    """Return a peer's base URL without a slash at its end; raises :class:`PullError`.

    With ``tls``, only loopback may be asked in the clear. With ``networks``, the host must be
    an address in one of them.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise PullError(Reason.NO_SOURCE, f"agent: not a URL: {error}") from error
    extras = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not host or extras or len(url) > _MAX_URL_LENGTH:
        raise PullError(Reason.NO_SOURCE, f"agent: not the base URL of an agent: {url[:80]!r}")
    address = _address_of(host)
    is_loopback = host == "localhost" or (address is not None and address.is_loopback)
    if tls and parts.scheme == "http" and not is_loopback:
        raise PullError(Reason.AUTH, "agent: peers are asked over TLS only, and this is plain HTTP")
    if networks and (address is None or not any(address in network for network in networks)):
        raise PullError(Reason.PEER_REFUSED, f"agent: {host} is in none of transfer.peer_networks")
    return url.rstrip("/")


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
